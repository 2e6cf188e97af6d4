"""What several reports are asked for: lists of numbers along which they measure, and the device."""

from collections.abc import Sequence
from typing import Literal

import torch

from longseq.arguments import ArgumentError

Device = Literal["cpu", "cuda"]


def refuse_wrong_lists(**lists: Sequence[int] | Sequence[float]) -> None:
    """Check lists of lengths or durations, by their names.

    Raises:
        ValueError: If one is empty, or holds a number that is not positive, or one twice.
    """
    for name, values in lists.items():
        if not values:
            raise ArgumentError(name, "must hold one number or more, got []; the defaults are a start")
        if min(values) <= 0:
            raise ArgumentError(name, f"must be positive, got {min(values)}; the defaults are a start")
        if len(set(values)) < len(values):
            raise ArgumentError(name, f"must hold each number once, got {list(values)}; leave out the second one")


def refuse_absent(device: Device) -> None:
    """Check that this machine has a device.

    Raises:
        ValueError: If it has not.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device", "must be available on this machine, got cuda; leave it out to measure the CPU")
