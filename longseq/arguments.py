"""The constructor arguments of an object, read from its attributes.

Mechanisms, encoders, the classifier and the data modules keep each argument as an attribute of the same name, with an
underscore in front where torch already uses the name. So longseq can describe these objects, and build them again.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, get_args, get_type_hints


class ArgumentError(ValueError):
    """An argument of a constructor or a function has a value that cannot be used.

    datamodules has the same class. Neither package imports the other: the command line knows both by their fields.

    Args:
        argument: Name of the argument.
        what: "must ..., got ...; <remedy>".
    """

    def __init__(self, argument: str, what: str = "") -> None:
        super().__init__(argument, what)
        self.argument, self.what = argument, what

    def __str__(self) -> str:
        return f"{self.argument} {self.what}".rstrip()


def require(holds: bool, argument: str, what: str) -> None:
    """Raise ArgumentError(argument, what) unless ``holds``."""
    if not holds:
        raise ArgumentError(argument, what)


def require_positive(remedy: str = "the README's configs have values that work", /, **numbers: float) -> None:
    """Check that arguments, given by name, are above 0; NaN is not."""
    for name, number in numbers.items():
        require(number > 0, name, f"must be positive, got {number}; {remedy}")


def require_choice(argument: str, value: object, choices: Any) -> None:
    """Check that the value of an argument is one of the strings of a Literal."""
    *others, last = get_args(choices)
    listed = f"{', '.join(others)} or {last}"
    require(value in (*others, last), argument, f"must be {listed}, got {value!r}; choose one of them")


def argument_names(kind: Callable) -> list[str]:
    """Names of the arguments of a function or of a class's constructor, including those forwarded as keywords."""
    names: dict[str, None] = {}
    for parameters, _ in constructors(kind):
        names |= dict.fromkeys(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
    return list(names)


def argument_hints(kind: type) -> dict[str, Any]:
    """The type hints of a constructor's arguments, including those forwarded as keywords.

    A constructor whose hints name something that is not installed is left out.
    """
    hints: dict[str, Any] = {}
    for parameters, constructor in constructors(kind):
        with suppress(NameError):
            types = get_type_hints(constructor)
            hints = {p.name: types[p.name] for p in parameters if p.name in types} | hints
    return hints


def constructors(kind: Callable) -> Iterator[tuple[list[inspect.Parameter], Any]]:
    """Parameters and function of a class's constructor, and of each constructor to which it forwards its keywords.

    That is the constructor of the base class, or of the dataclass that the annotation names, as in
    ``**sizes: Annotated[Any, Sizes]``. For a function: its own parameters.
    """
    if not isinstance(kind, type):
        yield list(inspect.signature(kind).parameters.values()), kind
        return
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
        yield parameters, base.__init__
        keywords = next((p.annotation for p in parameters if p.kind == p.VAR_KEYWORD), None)
        if keywords is None:
            return
        for described in getattr(keywords, "__metadata__", ()):
            yield from constructors(described)
            return


def arguments_of(value: Any) -> dict[str, Any]:
    """Each argument of an object's constructor and its value.

    Raises:
        TypeError: If the object does not keep an argument as an attribute.
    """
    values = {}
    for name in argument_names(type(value)):
        attribute = f"_{name}" if f"_{name}" in vars(value) else name
        if not hasattr(value, attribute):
            raise TypeError(f"{type(value).__qualname__} must keep its argument {name} as an attribute")
        values[name] = getattr(value, attribute)
    return values


class SettingError(Exception):
    """A wrong setting that is found only while a command runs; the message names it."""

    exit_code = 2
