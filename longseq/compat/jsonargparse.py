"""jsonargparse: its reports of what is wrong with flags and configurations, taken apart."""

import re
from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal[
    "no such option", "no such argument", "not allowed", "no such class", "missing", "wrong value", "no such file",
    "not YAML", "other",
]  # fmt: skip


class Fault(NamedTuple):
    """What a report of jsonargparse says.

    Attributes:
        kind: Of the fault.
        key: The flag or the key that is at fault, without init_args; empty if the report names none.
        what: The name, value or path that is wrong; of another kind the whole report, on one line.
        expected: Types that a wrong value may have; the class that lacks an argument.
    """

    kind: Kind
    key: str
    what: str
    expected: list[str]


def fault_of(message: str) -> Fault:
    """Take a report of many lines apart."""
    key = ".".join(re.findall(r'Parser key "([^"]+)"', message))

    def fault(kind: Kind, what: str, expected: list[str] | None = None) -> Fault:
        return Fault(kind, key, what, expected or [])

    if found := re.search(r"[Uu]nrecognized arguments: -*([^\s=]+)|does not accept option '([^']+)'", message):
        return fault("no such option", (found[1] or found[2]).replace("init_args.", ""))
    if found := re.search(r"Option '([^']+)' is not accepted", message):
        return fault("no such argument", found[1], re.findall(r"class_path '([^']+)'", message)[-1:])
    if found := re.search(r"Importing '([^']+)' is not allowed", message):
        return fault("not allowed", found[1])
    if found := re.search(r"dot import path string: (\S+)", message):
        return fault("no such class", found[1])
    if found := re.search(r"arguments are required: (.*)", message):
        return fault("missing", found[1])
    if found := re.search(r"Expected a (.*?)\. Got value: (.*)", message):
        return fault("wrong value", found[2], [_type_name(found[1])])
    if found := re.search(r"Given value: (.*)", message):
        expected = dict.fromkeys(_type_name(kind) for kind in re.findall(r"- Expected an? (.+)", message))
        return fault("wrong value", found[1], list(expected))
    if found := re.search(r"File does not exist: '(.*)'", message):
        return fault("no such file", found[1])
    if "Problems parsing config: " in message:
        return fault("not YAML", _flat(message.partition(": ")[2]))
    return fault("other", _flat(re.sub(r"Parser key .*?:\n", "", message)))


def options_of(parser: ArgumentParser) -> set[str]:
    """Names of a parser's flags, those of its commands included."""
    names = {option.lstrip("-") for action in parser._actions for option in action.option_strings}
    commands = [action.choices for action in parser._actions if isinstance(action.choices, Mapping)]
    return names.union(*(options_of(command) for choices in commands for command in choices.values()))


def _type_name(text: str) -> str:
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text).replace("typing.", "").replace("NoneType", "null")
    return text.replace("Literal[", "one of [").strip()


def _flat(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().rstrip(".")
