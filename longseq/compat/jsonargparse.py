"""jsonargparse: parse its error messages about flags and configurations, and note which class cannot be built."""

import re
from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jsonargparse import Namespace, add_instantiator

Kind = Literal[
    "no such option", "no flag", "no such argument", "not allowed", "no such class", "missing", "no value",
    "wrong value", "no such file", "not YAML", "other",
]  # fmt: skip


class Fault(NamedTuple):
    """The content of an error message of jsonargparse.

    Attributes:
        kind: Kind of the fault.
        key: The wrong flag or key, without init_args; empty if the message names none.
        what: The wrong name, value or path; for ``not YAML`` and ``other`` the message itself, on one line.
        expected: For ``wrong value`` the possible types; for ``no such argument`` the class that lacks the argument.
    """

    kind: Kind
    key: str
    what: str
    expected: list[str]


def fault_of(message: str) -> Fault:
    """Parse a message of many lines."""
    key = ".".join(re.findall(r'Parser key "([^"]+)"', message))

    def fault(kind: Kind, what: str, expected: list[str] | None = None) -> Fault:
        return Fault(kind, key, what, expected or [])

    if match := re.search(r"[Uu]nrecognized arguments: ([^-].*)", message):
        return fault("no flag", match[1])
    if match := re.search(r"[Uu]nrecognized arguments: -*([^\s=]+)|does not accept option '([^']+)'", message):
        return fault("no such option", (match[1] or match[2]).replace("init_args.", ""))
    if match := re.search(r"Option '([^']+)' is not accepted", message):
        return fault("no such argument", match[1], re.findall(r"class_path '([^']+)'", message)[-1:])
    if match := re.search(r"Importing '([^']+)' is not allowed", message):
        return fault("not allowed", match[1])
    if match := re.search(r"dot import path string: (\S+)", message):
        return fault("no such class", match[1])
    if match := re.search(r"arguments are required: (.*)", message):
        return fault("missing", match[1])
    if match := re.search(r"argument (?:-\w/)?--([\w.]+): expected .*argument", message):
        return fault("no value", match[1])
    if match := re.search(r"Expected a (.*?)\. Got value: (.*)", message):
        return fault("wrong value", match[2], [_type_name(match[1])])
    if match := re.search(r"Given value: (.*)", message):
        expected = dict.fromkeys(_type_name(kind) for kind in re.findall(r"- Expected an? (.+)", message))
        return fault("wrong value", match[1], list(expected))
    if match := re.search(r"File does not exist: '(.*)'", message):
        return fault("no such file", match[1])
    if "Problems parsing config: " in message:
        return fault("not YAML", _flat(message.partition(": ")[2]))
    return fault("other", _flat(re.sub(r"Parser key .*?:\n", "", message)))


def with_nulls(args: Any) -> Any:
    """The arguments of an inner parser, with null instead of None. For a flag two classes deep, such as
    ``--model.encoder.attention.k null``, jsonargparse parses the value and passes ``--k=None`` to an inner parser,
    which would read this as a string."""
    if not isinstance(args, list):
        return args
    return [f"{arg[:-4]}null" if isinstance(arg, str) and arg.endswith("=None") else arg for arg in args]


def with_name_for_none(parser: ArgumentParser, values: Any, kind: type, name: str) -> Any:
    """The values of a parser's flags, with a class's name in place of the word None where one of this kind is expected.
    null cannot have this meaning: jsonargparse takes it for an argument that is missing."""
    expected = (action.dest for action in parser._actions if getattr(action, "_typehint", None) is kind)
    none = ("None", {"class_path": "None"}, Namespace(class_path="None"))
    names = {key: name for key in expected if values.get(key) in none}
    return type(values)({**dict(values.items()), **names}) if names else values


def options_of(parser: ArgumentParser) -> set[str]:
    """Names of a parser's flags, including those of its commands."""
    names = {option.lstrip("-") for action in parser._actions for option in action.option_strings}
    commands = [action.choices for action in parser._actions if isinstance(action.choices, Mapping)]
    return names.union(*(options_of(command) for choices in commands for command in choices.values()))


def refusing_class(error: BaseException) -> type | None:
    """The class whose constructor has raised an error, if jsonargparse has called it, and no class inside of it."""
    return getattr(error, "refused_by", None)


def _built(class_type: type[Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return class_type(*args, **kwargs)
    except Exception as error:
        vars(error).setdefault("refused_by", class_type)
        raise


add_instantiator(_built, object)  # jsonargparse calls it for every class of a configuration


def _type_name(text: str) -> str:
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text).replace("typing.", "").replace("NoneType", "null")
    return text.replace("Literal[", "one of [").strip()


def _flat(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().rstrip(".")
