"""A promise: what a class must do, how to test it, and what to do where it is broken."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class BrokenPromise(Exception):  # noqa: N818  (it is no error of longseq)
    """What was seen, and the remedy, in one line."""


class _SeenError(Exception):
    """What was seen."""


@dataclass(frozen=True)
class Promise:
    """A test of an object, which raises BrokenPromise.

    Args:
        says: What is promised.
        remedy: What to do where it is broken.
        test: Raises an error, whose message says what was seen.
    """

    says: str
    remedy: str
    test: Callable[[Any], None]

    def __call__(self, subject: Any) -> None:
        try:
            torch.manual_seed(0)
            self.test(subject)
        except Exception as error:  # whatever the user's code raises
            if hasattr(error, "exit_code"):  # such as data that is missing
                raise
            seen = " ".join(str(error).split())
            seen = seen if isinstance(error, _SeenError) else f"{type(error).__name__} {seen}".strip()
            raise BrokenPromise(f"{seen}; {self.remedy}") from error


def promise(says: str, remedy: str) -> Callable[[Callable[[Any], None]], Promise]:
    """Make a promise of a function that tests it."""
    return lambda test: Promise(says, remedy, test)


def require(holds: bool, otherwise: str) -> None:
    """Raise what was seen, unless the promise holds."""
    if not holds:
        raise _SeenError(otherwise)


def require_close(
    value: torch.Tensor, expected: torch.Tensor, what: str, rtol: float | None = None, atol: float | None = None
) -> None:
    """Raise by how much two tensors differ, unless they are close: as ``torch.testing`` has it, unless it is given."""
    try:
        torch.testing.assert_close(value, expected, rtol=rtol, atol=rtol if atol is None else atol)
    except AssertionError as error:
        if value.shape != expected.shape:
            raise _SeenError(f"{what} have the shape {tuple(value.shape)}, not {tuple(expected.shape)}") from error
        raise _SeenError(f"{what} differ by up to {(value - expected).abs().max():.2g}") from error
