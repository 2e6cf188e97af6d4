"""The commands of longseq/reports from the command line: their functions' arguments are the flags."""

from longseq.cli.errors import OneLineParser, UserError
from longseq.reports import COMMANDS


def run_report(name: str, args: list[str]) -> None:
    """Parse the flags of a report's function, and call it.

    Raises:
        UserError: If a flag is wrong, or the function refuses a value.
    """
    report = COMMANDS[name]
    parser = OneLineParser(prog=f"train.py {name}", description=(report.__doc__ or "").split("\n")[0])
    parser.add_argument("--config", action="config", help="A YAML file with these flags.")
    parser.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    parser.add_function_arguments(report, as_group=False, sub_configs=True)
    settings = parser.parse_args(args).as_dict()
    for ours in ("config", "debug"):
        settings.pop(ours)
    try:
        report(**settings)
    except ValueError as error:  # "<argument> must ..."
        name, _, rest = str(error).partition(" ")
        if not rest.startswith("must "):
            raise
        raise UserError(f"{name}: {rest}") from error
