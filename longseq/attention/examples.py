"""All mechanisms in all their forms, for tests, measurements and tables that leave none out."""

import dataclasses
import inspect
from typing import Any, TypeVar

import longseq.attention as attention

Kind = TypeVar("Kind")


def exported(kind: type[Kind]) -> list[type[Kind]]:
    """The concrete classes of a kind that longseq.attention exports."""
    found: list[Any] = [getattr(attention, name) for name in attention.__all__]
    return [x for x in found if inspect.isclass(x) and issubclass(x, kind) and not inspect.isabstract(x)]


def every_projection() -> list[attention.Projection]:
    """The examples of every projection that longseq.attention exports.

    Raises:
        TypeError: If a class has none.
    """
    return [example for kind in exported(attention.Projection) for example in _examples_of(kind)]


def every_mechanism() -> list[attention.Mechanism]:
    """The examples of every mechanism that longseq.attention exports; one that takes a projection with each of them.

    Raises:
        TypeError: If a class has none.
    """
    found: list[Any] = []
    for kind in exported(attention.Mechanism):
        examples = _examples_of(kind)
        found += examples
        plain: Any = next((each for each in examples if isinstance(getattr(each, "k", None), int)), examples[0])
        if hasattr(plain, "projection"):
            others = (projection for projection in every_projection() if projection != plain.projection)
            found += [dataclasses.replace(plain, projection=projection) for projection in others]
    return found


def _examples_of(kind: Any) -> list[Any]:
    examples = kind.examples()
    if not examples:
        raise TypeError(f"{kind.__name__} must have an example, or no test would try it; return one from examples()")
    return examples
