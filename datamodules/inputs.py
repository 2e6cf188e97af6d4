"""What one input of a data module is."""

from dataclasses import dataclass

import torch

from datamodules.errors import require


@dataclass(frozen=True)
class InputSpec:
    """What one input is. Predictions from arrays, exported files, cards and pictures use this specification only.

    Attributes:
        kind: A word for messages, in the plural: images, sounds, signals, features.
        dtype: The type of its numbers.
        shape: The size of each axis. None is the axis whose size varies from input to input, as in sounds (None,) or
            (channels, None), and in features (None, f): their batches contain their lengths. Without it all inputs have
            one shape, and batches are tensors (b, *shape).
        low, high: The smallest and the largest possible number; None if there is no bound.
        unit: The unit of its numbers, such as mV, or None.
        channels: The names of the channels, the first axis, or None.
        rate_hz: Numbers per second along the last axis; None if that axis is not time.
        has_gaps: Whether NaN stands for a missing number.
    """

    kind: str
    dtype: torch.dtype
    shape: tuple[int | None, ...]
    low: float | None = None
    high: float | None = None
    unit: str | None = None
    channels: tuple[str, ...] | None = None
    rate_hz: float | None = None
    has_gaps: bool = False

    def __post_init__(self) -> None:
        is_known = self.shape.count(None) <= 1
        require(is_known, "inputs.shape", "one that varies along one axis", self.shape, "crop or pad inputs in `read`")
