"""Checks of the arguments that several reports take."""

from collections.abc import Sequence
from typing import Literal

import torch

from longseq.arguments import ArgumentError

Device = Literal["cpu", "cuda"]


def require_positive(**arguments: float | Sequence[int] | Sequence[float]) -> None:
    """Check numbers, and lists of lengths or durations. Errors name them by their keywords.

    Raises:
        ValueError: If a number is not positive, or a list is empty or holds a number twice.
    """
    for name, value in arguments.items():
        values = value if isinstance(value, Sequence) else [value]
        if not values:
            raise ArgumentError(name, "must hold one number or more, got []; the defaults are a start")
        if min(values) <= 0:
            raise ArgumentError(name, f"must be positive, got {min(values)}; the defaults are a start")
        if len(set(values)) < len(values):
            raise ArgumentError(name, f"must hold each number once, got {list(values)}; leave out the second one")


def require_device(device: Device) -> None:
    """Check that this machine has a device.

    Raises:
        ValueError: If it does not.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device", "must be available on this machine, got cuda; leave it out to measure the CPU")
