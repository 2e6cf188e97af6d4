"""The constructor arguments of an object, which its attributes hold.

Mechanisms, encoders, the classifier and the data modules keep each argument as an attribute of the same name, or, where
torch has taken the name, of the name with an underscore in front. So they can be described, and built again.
"""

import inspect
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, get_type_hints


class ArgumentError(ValueError):
    """An argument of a constructor or a function that cannot be.

    datamodules has the same class. Neither package imports the other, and the command line knows both by their fields.

    Args:
        argument: Its name.
        what: "must ..., got ...; <remedy>".
    """

    def __init__(self, argument: str, what: str = "") -> None:
        super().__init__(argument, what)
        self.argument, self.what = argument, what

    def __str__(self) -> str:
        return f"{self.argument} {self.what}".rstrip()


def argument_names(kind: type) -> list[str]:
    """The names of a constructor's arguments, including those forwarded as keywords to the base class."""
    names: dict[str, None] = {}
    for parameters, _ in _constructors(kind):
        names |= dict.fromkeys(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
    return list(names)


def argument_hints(kind: type) -> dict[str, Any]:
    """The type hints of a constructor's arguments, including those forwarded as keywords to the base class.

    A constructor whose hints name something that is not installed has none.
    """
    hints: dict[str, Any] = {}
    for parameters, constructor in _constructors(kind):
        with suppress(NameError):
            found = get_type_hints(constructor)
            hints = {p.name: found[p.name] for p in parameters if p.name in found} | hints
    return hints


def _constructors(kind: type) -> Iterator[tuple[list[inspect.Parameter], Any]]:
    """The constructor's parameters, and those of the base classes to which it forwards keywords."""
    for each in kind.__mro__:
        if "__init__" not in vars(each):
            continue
        parameters = list(inspect.signature(each.__init__).parameters.values())[1:]
        yield parameters, each.__init__
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            return


def arguments_of(value: Any) -> dict[str, Any]:
    """Each argument of an object's constructor and its value.

    Raises:
        TypeError: If the object does not hold one.
    """
    held = {}
    for name in argument_names(type(value)):
        attribute = f"_{name}" if f"_{name}" in vars(value) else name
        if not hasattr(value, attribute):
            raise TypeError(f"{type(value).__qualname__} must keep its argument {name} as an attribute")
        held[name] = getattr(value, attribute)
    return held
