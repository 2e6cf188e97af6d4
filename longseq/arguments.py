"""The constructor arguments of an object, read from its attributes.

Mechanisms, encoders, the classifier and the data modules keep each argument as an attribute of the same name, with an
underscore in front where torch already uses the name. So longseq can describe these objects, and build them again.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, get_type_hints


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


def argument_names(kind: Callable) -> list[str]:
    """Names of the arguments of a function, or of a class's constructor, including those that its keywords go to."""
    names: dict[str, None] = {}
    for parameters, _ in constructors(kind):
        names |= dict.fromkeys(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
    return list(names)


def argument_hints(kind: type) -> dict[str, Any]:
    """The type hints of a constructor's arguments, including those that its keywords go to.

    If a constructor's hints name something that is not installed, its arguments are left out.
    """
    hints: dict[str, Any] = {}
    for parameters, constructor in constructors(kind):
        with suppress(NameError):
            types = get_type_hints(constructor)
            hints = {p.name: types[p.name] for p in parameters if p.name in types} | hints
    return hints


def constructors(kind: Callable) -> Iterator[tuple[list[inspect.Parameter], Any]]:
    """Parameters and function of a class's constructor, and of each constructor that gets its keywords: the base
    class's, or that of a dataclass named beside them, as in ``**sizes: Annotated[Any, Sizes]``. Of a function, itself.
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
    """A setting that only a running command shows to be wrong; the message names it."""

    exit_code = 2
