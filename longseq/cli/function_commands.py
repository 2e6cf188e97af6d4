"""Run the commands that are one function, whose arguments are the flags."""

import importlib
import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from longseq.arguments import ArgumentError
from longseq.cli.before_torch import add_working_folder
from longseq.cli.command_list import COMMANDS
from longseq.cli.errors import UserError
from longseq.cli.errors.building import refused_in_building
from longseq.cli.errors.parsing import OneLineParser
from longseq.files.description import NETWORKS


def _with_brackets(function: Callable[..., None], args: list[str]) -> list[str]:
    """Rewrite lists from the shell's form, ``--n 512 1024``, to jsonargparse's form, ``--n=[512, 1024]``."""
    hints = get_type_hints(function)
    bracketed = list(takewhile(lambda word: not word.startswith("--"), args))  # words without a flag: refused later
    given: dict[str, list[str]] = {}
    for flag, values in _flags(args):
        kind = hints.get(flag.removeprefix("--"))
        if get_origin(kind) is list and values and not values[0].startswith("["):
            given.setdefault(flag, []).extend(values)  # a flag given twice extends its list
        else:
            bracketed += [flag, *values]
    for flag, values in given.items():
        numbers = get_args(hints[flag.removeprefix("--")]) == (int,)
        bracketed.append(f"{flag}=[{', '.join(values if numbers else map(json.dumps, values))}]")
    return bracketed


def _flags(args: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the values that follow it."""
    starts = [number for number, token in enumerate(args) if token.startswith("--")]
    for start, end in pairwise([*starts, len(args)]):
        yield args[start], args[start + 1 : end]


# The flags of a training that a report accepts if it trains.
_OF_TRAININGS = re.compile(
    r"--((data|model|trainer)([.+=].*)?|(allow_class|skip_bad_steps|peak_flops|checkpoint_minutes|minutes|folds|grow)(=.*)?)"
)


def _with_flags_together(function: Callable[..., None], args: list[str]) -> list[str]:
    """Append the flags of a report's trainings, such as ``--data.root DIR``, to the report's list ``--flags``."""
    if "flags" not in get_type_hints(function):
        return args
    given = list(_flags(args))
    direct = [word for flag, values in given if _OF_TRAININGS.fullmatch(flag) for word in (flag, *values)]
    if not direct:
        return args
    own, listed = list(takewhile(lambda word: not word.startswith("--"), args)), list[str]()
    for flag, values in given:
        name, equals, value = flag.partition("=")
        if name == "--flags":
            listed += _listed([value, *values] if equals else values)
        elif not _OF_TRAININGS.fullmatch(flag):
            own += [flag, *values]
    return [*own, f"--flags={json.dumps([*listed, *direct])}"]


def _listed(values: list[str]) -> list[str]:
    if not values or not values[0].startswith("["):
        return values
    try:
        (listed,) = map(json.loads, values)
        return [str(word) for word in listed]
    except ValueError as error:
        raise UserError(f'flags: got {" ".join(values)}; give a list such as \'["--data.root", "DIR"]\'') from error


def _with_class_of_file(function: Callable[..., None], args: list[str]) -> list[str]:
    """Rewrite a network that is the path of a file, ``--network m.onnx``, to its class and the file."""
    if "network" not in get_type_hints(function):
        return args
    rewritten = list(takewhile(lambda word: not word.startswith("--"), args))
    for flag, values in _flags(args):
        name, equals, value = flag.partition("=")
        kind = None
        if name == "--network" and (equals or values):
            path, *others = [value, *values] if equals else values
            kind = NETWORKS[".ckpt"] if Path(path).is_dir() else NETWORKS.get(Path(path).suffix.lower())
        rewritten += [flag, *values] if kind is None else ["--network", kind, "--network.file", path, *others]
    return rewritten


def run_function(name: str, args: list[str]) -> None:
    """Parse the flags of a command's function, and call it.

    Raises:
        UserError: If a flag is wrong, or the function refuses a value.
    """
    command = COMMANDS[name]
    function = getattr(importlib.import_module(f"{command.package}.{name}"), name)
    parser = OneLineParser(prog=f"longseq {name}", description=command.sentence)
    parser.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    parser.add_function_arguments(
        function, as_group=False, sub_configs=True, as_positional=name in ("contract", "review")
    )
    args = _with_class_of_file(function, _with_flags_together(function, args))
    given = parser.parse_args(_with_brackets(function, args))
    try:
        made: Any = parser.instantiate(given)
    except Exception as error:
        refused = refused_in_building(error, given.as_dict())
        if refused is None:
            raise
        raise refused from error
    settings = made.as_dict()
    settings.pop("debug")
    if settings.get("allow_class"):
        add_working_folder()
    try:
        function(**settings)
    except ArgumentError as error:
        raise UserError(f"{error.argument}: {error.what}") from error
    except OSError as error:  # about the output folder, because errors of inputs are handled where they are read
        if isinstance(error, BrokenPipeError) or error.filename is None:
            raise
        raise UserError(f"{error.filename}: {error.strerror}; give another --out", exit_code=6) from error
