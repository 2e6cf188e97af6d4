"""The start of the command line. Whatever needs no torch is answered here, before torch is imported.

Importing torch and Lightning takes seconds. Help, a wrong command and a missing configuration need neither.
"""

import difflib
import gc
import io
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import longseq
from longseq.cli.command_list import COMMANDS
from longseq.cli.errors import UserError
from longseq.cli.names import shown
from longseq.cli.process.threads import keep_to_quota

# What `fit --help` shows; with any other argument it lists all flags.
_FIRST_FLAGS = {
    "--config FILE": "a configuration: image/folder and audio/folder are for files of your own",
    "--data.root DIR": "the folder of the data: a folder for each class, or train/, val/ and test/ with such folders",
    "--minutes 10": "how long to train, the test included; or --trainer.max_epochs 60",
    "--experiment NAME": "the run is in runs/NAME/0, the next one in runs/NAME/1",
    "--resume true": "resume the newest unfinished run; or give a run's folder",
    "--model.init_from CKPT": "start from a trained model",
    "--model.encoder.attention NAME": "Linformer, Verma, None, ...; --model.encoder.depth 1 adds a block of it",
    "--model.learning_rate 1e-3": "the peak of the learning rate",
    "--data.batch_size 32": "samples per step, on each device",
    "--trainer.devices 8": "GPUs; with --trainer.precision bf16-mixed they compute in bfloat16",
}
CONFIGURATIONS = "longseq has configurations such as image/digits"


def main(args: list[str] | None = None) -> None:
    """Run the command line; a user's mistake becomes one line on standard error and an exit code."""
    began = time.monotonic()
    args = sys.argv[1:] if args is None else args
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may support only ASCII
    if args[:1] in (["-h"], ["--help"]):
        print(_help())
        return
    if len(args) == 2 and args[0] == "fit" and args[1] in ("-h", "--help"):
        print(_help_of_fit())
        return
    if args[:1] == ["--version"]:
        print(f"longseq {longseq.__version__}")
        return
    try:
        if not args or args[0].startswith("-"):
            raise UserError(f"command: missing; choose one of {', '.join(COMMANDS)}")
        if args[0] not in COMMANDS:
            raise UserError(f"{args[0]}: no such command; {nearest(args[0], COMMANDS)}")
        args = with_configurations(args)
        keep_to_quota()
        run = _import_run()
    except UserError as error:
        print(shown(f"error: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("SIGINT: stopped; start it again", file=sys.stderr)
        sys.exit(130)
    run(args, began)


def _import_run() -> Callable[[list[str], float], None]:
    """Import torch, Lightning and `run`, which turns garbage collection on again.

    Raises:
        UserError: If a library is not installed.
    """
    gc.disable()  # collections would scan the imported objects repeatedly: a tenth of the start-up time
    try:
        from longseq.cli.run_command import run
    except BaseException as error:
        gc.enable()
        ours = ("longseq", "datamodules")
        if not isinstance(error, ModuleNotFoundError) or not error.name or error.name.startswith(ours):
            raise
        remedy = f"activate .venv, or install longseq here: python -m pip install {Path(longseq.__file__).parents[1]}"
        raise UserError(f"{error.name}: not installed for {sys.executable}; {remedy}") from error
    return run


def _help() -> str:
    return f"""longseq trains classifiers of images and sound as very long sequences, at linear cost.

usage: longseq COMMAND [--config FILE] [--FLAG VALUE ...]

{_columns({name: command.sentence for name, command in COMMANDS.items()})}

longseq COMMAND --help lists the flags of a command. longseq --version prints the version.
To begin: longseq fit --config image/digits"""


def _help_of_fit() -> str:
    return f"""{COMMANDS["fit"].sentence}

usage: longseq fit --config FILE [--FLAG VALUE ...]

{_columns(_FIRST_FLAGS)}

All flags: longseq fit --config image/folder --help
Flags of a class: longseq fit --model.encoder.help ImageEncoder
To begin: longseq fit --config image/digits"""


def _columns(sentences: dict[str, str]) -> str:
    width = max(map(len, sentences))
    return "\n".join(f"  {name:<{width}}  {sentence}" for name, sentence in sentences.items())


def nearest(name: str, known: Iterable[str]) -> str:
    """The remedy for an unknown name: the most similar known name, or all known names if they are few."""
    known = sorted(set(known))
    parent, _, last = name.rpartition(".")
    # compare with names under the same parent, or with whole paths if there are none
    beside = {path.rpartition(".")[2]: path for path in known if path.rpartition(".")[0] == parent}
    near = [beside[last_part] for last_part in difflib.get_close_matches(last, beside, 1)]
    if not (near or (beside and parent)):
        near = difflib.get_close_matches(name, known, 1) or difflib.get_close_matches(last, known, 1)
    if near:
        return f"did you mean {near[0]}?"
    return f"choose one of {', '.join(known)}" if 0 < len(known) < 20 else "see --help"


def with_configurations(args: list[str]) -> list[str]:
    """Replace each name of a configuration in the arguments by its path.

    Raises:
        UserError: If there is no such file.
    """
    words, is_of_config = [], False
    for word in args:
        if word.startswith("-"):
            flag, equals, value = word.partition("=")
            is_of_config = flag in ("-c", "--config")
            if is_of_config and equals:
                is_of_config, word = False, f"{flag}={configuration(value)}"
        elif is_of_config:
            word = configuration(word)
        words.append(word)
    return words


def configuration(name: str) -> str:
    """The path of a configuration: a file in the working folder, otherwise one that comes with longseq.

    Args:
        name: A path, or a name such as ``image/digits``; YAML or JSON text is returned as it is.

    Raises:
        UserError: If there is no such file.
    """
    if name.lstrip().startswith(("{", "[")):
        return name
    ours = Path(longseq.__file__).parent
    for folder in (Path(), ours / "configs", ours):
        for path in (folder / name, folder / f"{name}.yaml"):
            if path.is_file() or (folder == Path() and _is_pipe(path)):
                return str(path)
    raise UserError(f"{name}: no such file; {CONFIGURATIONS}")


def _is_pipe(path: Path) -> bool:
    return path.exists() and not path.is_dir()


def add_working_folder() -> None:
    """Let Python find the user's own modules in the working folder, after the installed ones."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
