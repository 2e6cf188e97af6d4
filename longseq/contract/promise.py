"""A promise: what a class must do, how to test it, and what to do if it is broken."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class BrokenPromise(Exception):  # noqa: N818  (it is not an error of longseq)
    """What is wrong, and the remedy, in one line."""


class _SeenError(Exception):
    """What is wrong with an object."""


@dataclass(frozen=True)
class Promise:
    """A test of an object, which raises BrokenPromise.

    Args:
        says: What is promised.
        remedy: What to do if it is broken.
        test: Raises an error whose message says what is wrong.
    """

    says: str
    remedy: str
    test: Callable[[Any], None]

    def __call__(self, subject: Any) -> None:
        try:
            torch.manual_seed(0)
            self.test(subject)
        except Exception as error:  # the user's code may raise anything
            if hasattr(error, "exit_code"):  # an error with its own remedy, such as missing data
                raise
            failure = " ".join(str(error).split())
            failure = failure if isinstance(error, _SeenError) else f"{type(error).__name__} {failure}".strip()
            raise BrokenPromise(f"{failure}; {self.remedy}") from error


def promise(says: str, remedy: str) -> Callable[[Callable[[Any], None]], Promise]:
    """Make a promise from a function that tests it."""
    return lambda test: Promise(says, remedy, test)


def require(holds: bool, otherwise: str) -> None:
    """Raise an error with the message ``otherwise``, unless the promise holds."""
    if not holds:
        raise _SeenError(otherwise)


def require_close(
    value: torch.Tensor, expected: torch.Tensor, what: str, rtol: float | None = None, atol: float | None = None
) -> None:
    """Raise by how much two tensors differ, unless they are close; torch.testing has the default tolerances."""
    try:
        torch.testing.assert_close(value, expected, rtol=rtol, atol=rtol if atol is None else atol)
    except AssertionError as error:
        if value.shape != expected.shape:
            raise _SeenError(f"{what} have the shape {tuple(value.shape)}, not {tuple(expected.shape)}") from error
        raise _SeenError(f"{what} differ by up to {(value - expected).abs().max():.2g}") from error
