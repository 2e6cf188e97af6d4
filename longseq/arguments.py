"""The constructor arguments of an object, which its attributes hold.

Mechanisms, encoders, the classifier and the data modules keep each argument as an attribute of the same name, or, where
torch has taken the name, of the name with an underscore in front. So they can be described, and built again.
"""

import inspect
from typing import Any


def argument_names(kind: type) -> list[str]:
    """The names of a constructor's arguments, those included that it hands on as keywords to the next class's."""
    names: dict[str, None] = {}
    for each in kind.__mro__:
        if "__init__" not in vars(each):
            continue
        parameters = list(inspect.signature(each.__init__).parameters.values())[1:]
        names |= dict.fromkeys(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            break
    return list(names)


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
