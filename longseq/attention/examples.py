"""Examples of every mechanism in every form, for tests, measurements and tables that cover all of them."""

import dataclasses
import inspect
from typing import Any, TypeVar

import longseq.attention as attention

Kind = TypeVar("Kind")


def exported(kind: type[Kind]) -> list[type[Kind]]:
    """The concrete classes of a kind that longseq.attention exports."""
    values: list[Any] = [getattr(attention, name) for name in attention.__all__]
    return [x for x in values if inspect.isclass(x) and issubclass(x, kind) and not inspect.isabstract(x)]


def every_projection() -> list[attention.Projection]:
    """The examples of every projection that longseq.attention exports.

    Raises:
        TypeError: If a projection has no example.
    """
    return [example for kind in exported(attention.Projection) for example in _examples_of(kind)]


def every_mechanism() -> list[attention.Mechanism]:
    """The examples of every mechanism that longseq.attention exports.

    If a mechanism takes a projection, one of its examples is repeated with every projection.

    Raises:
        TypeError: If a mechanism or a projection has no example.
    """
    mechanisms: list[Any] = []
    for kind in exported(attention.Mechanism):
        examples = _examples_of(kind)
        mechanisms += examples
        with_k = (example for example in examples if isinstance(getattr(example, "k", None), int))
        plain: Any = next(with_k, examples[0])
        if hasattr(plain, "projection"):
            others = (projection for projection in every_projection() if projection != plain.projection)
            mechanisms += [dataclasses.replace(plain, projection=projection) for projection in others]
    return mechanisms


def _examples_of(kind: Any) -> list[Any]:
    examples = kind.examples()
    if not examples:
        raise TypeError(f"{kind.__name__} must have an example, or no test would try it; return one from examples()")
    return examples
