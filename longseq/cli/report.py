"""The commands of longseq/reports from the command line: their functions' arguments are the flags."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise, takewhile
from typing import get_args, get_origin, get_type_hints

from longseq.cli.errors import OneLineParser, UserError
from longseq.reports import COMMANDS


def _with_brackets(report: Callable[..., None], args: list[str]) -> list[str]:
    """Lists as shells have them, ``--n 512 1024``, as jsonargparse has them, ``--n=[512, 1024]``."""
    hints = get_type_hints(report)
    bracketed = list(takewhile(lambda word: not word.startswith("--"), args))  # of no flag: the parser refuses them
    for flag, values in _flags(args):
        kind = hints.get(flag.removeprefix("--"))
        if get_origin(kind) is list and values and not values[0].startswith("["):
            numbers = get_args(kind) == (int,)
            bracketed.append(f"{flag}=[{', '.join(values if numbers else map(json.dumps, values))}]")
        else:
            bracketed += [flag, *values]
    return bracketed


def _flags(args: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag and the values behind it."""
    starts = [number for number, token in enumerate(args) if token.startswith("--")]
    for start, end in pairwise([*starts, len(args)]):
        yield args[start], args[start + 1 : end]


def run_report(name: str, args: list[str]) -> None:
    """Parse the flags of a report's function, and call it.

    Raises:
        UserError: If a flag is wrong, or the function refuses a value.
    """
    report = COMMANDS[name]
    parser = OneLineParser(prog=f"train.py {name}", description=(report.__doc__ or "").split("\n")[0])
    parser.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    parser.add_function_arguments(report, as_group=False, sub_configs=True)
    settings = parser.parse_args(_with_brackets(report, args)).as_dict()
    settings.pop("debug")
    try:
        report(**settings)
    except ValueError as error:  # "<argument> must ..."
        name, _, rest = str(error).partition(" ")
        if not rest.startswith("must "):
            raise
        raise UserError(f"{name}: {rest}") from error
