"""What one input of a data module is."""

from dataclasses import dataclass

import torch

from datamodules.errors import require


@dataclass(frozen=True)
class InputSpec:
    """What one input is. Predictions from arrays, exported files, cards and pictures use this specification only.

    Attributes:
        kind: A word for messages, in the plural: images, sounds, signals.
        dtype: The type of its numbers.
        shape: (None,) for sounds, whose batches contain their lengths. Otherwise the size of each axis: all inputs have
            one shape, and batches are tensors (b, *shape).
        low, high: The smallest and the largest possible number; None if there is no bound.
        unit: The unit of its numbers, such as mV, or None.
        channels: The names of the channels, the first axis, or None.
        rate_hz: Numbers per second along the last axis; None if that axis is not time.
    """

    kind: str
    dtype: torch.dtype
    shape: tuple[int | None, ...]
    low: float | None = None
    high: float | None = None
    unit: str | None = None
    channels: tuple[str, ...] | None = None
    rate_hz: float | None = None

    def __post_init__(self) -> None:
        is_known = self.shape == (None,) or None not in self.shape
        require(is_known, "inputs.shape", "(None,) or a size for each axis", self.shape, "crop or pad inputs in `read`")
