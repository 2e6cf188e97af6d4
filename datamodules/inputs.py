"""What one input of a data module is."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class InputSpec:
    """What one input is: predictions from arrays, exported files, cards and pictures go by this alone.

    Attributes:
        kind: A word for people, in the plural: images, sounds, signals.
        dtype: Of its numbers.
        shape: None for an axis that varies from sample to sample. Inputs of the shape (None,) come in batches with
            their lengths, all others as tensors (b, *shape).
        low, high: The smallest and the largest number that an input may hold; None where there is no such bound.
        unit: Of its numbers, such as mV; None if they have none.
        channels: The names of the channels, the first axis; None if they have none.
        rate_hz: How many numbers there are in a second along the last axis; None if that is not time.
    """

    kind: str
    dtype: torch.dtype
    shape: tuple[int | None, ...]
    low: float | None = None
    high: float | None = None
    unit: str | None = None
    channels: tuple[str, ...] | None = None
    rate_hz: float | None = None
