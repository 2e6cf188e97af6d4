"""The constructor arguments of an object, which its attributes hold.

Mechanisms, encoders, the classifier and the data modules keep each argument as an attribute of the same name, or, where
torch has taken the name, of the name with an underscore in front. So they can be described, and built again.
"""

import inspect
from typing import Any


def arguments_of(value: Any) -> dict[str, Any]:
    """Each argument of an object's constructor and its value.

    Raises:
        TypeError: If the object does not hold one.
    """
    held = {}
    for name in inspect.signature(type(value)).parameters:
        attribute = f"_{name}" if f"_{name}" in vars(value) else name
        if not hasattr(value, attribute):
            raise TypeError(f"{type(value).__qualname__} must keep its argument {name} as an attribute")
        held[name] = getattr(value, attribute)
    return held
