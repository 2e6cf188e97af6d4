"""From the values of sounds and images to those that a network takes."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from datamodules.networks._session import SettingError


class Values:
    """Turns a batch into numbers of a network's type and range.

    Args:
        kind: What the batch holds.
        dtype: The type of the network's numbers.
        channels: The channels of images.
        value_range: The numbers for -1 and 1 in sounds, and for 0 and 255 in images. If absent, sounds stay as they
            are, and images are in 0..1. Integers take their own range: all of int16, and 0..255 or -128..127.
        mean, std: What is subtracted then, and the divisor.
    """

    def __init__(
        self,
        kind: Literal["sounds", "images"],
        dtype: torch.dtype,
        channels: int,
        value_range: list[float] | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
    ) -> None:
        self.kind, self.dtype = kind, dtype
        lowest, highest = (-1.0, 1.0) if kind == "sounds" else (0.0, 255.0)
        low, high = value_range or ((-1.0, 1.0) if kind == "sounds" else (0.0, 1.0))
        self.factor = (high - low) / (highest - lowest)
        self.offset = low - self.factor * lowest
        sides = (-1,) if kind == "sounds" else (-1, 1, 1)
        self.mean = torch.tensor(mean or [0.0]).reshape(sides)
        self.std = torch.tensor(std or [1.0]).reshape(sides)

    def __call__(self, batch: Tensor) -> Tensor:
        if not self.dtype.is_floating_point:
            if self.kind == "images":
                return (batch.int() + (0 if self.dtype == torch.uint8 else -128)).to(self.dtype)
            limits = torch.iinfo(self.dtype)
            return (-limits.min * batch).round().clamp(limits.min, limits.max).to(self.dtype)
        values = batch.float()
        if (self.factor, self.offset) != (1.0, 0.0):
            values = values * self.factor + self.offset
        return ((values - self.mean) / self.std).to(self.dtype)


def checked_numbers(name: str, value: Any, channels: int) -> list[float]:
    """The numbers of a setting: one, or one for each channel; of a range, two.

    Raises:
        SettingError: If it is something else.
    """
    values = value if isinstance(value, list | tuple) else [value]
    are_numbers = all(isinstance(number, int | float) and math.isfinite(number) for number in values)
    if name == "value_range":
        if len(values) != 2 or not are_numbers or values[0] >= values[1]:
            raise SettingError(name, f"is {value!r}, not two numbers, the lower first; give [0, 1] or others")
    elif len(values) not in (1, channels) or not are_numbers or (name != "mean" and min(values) <= 0):
        what = "one number" if channels == 1 else f"one number, or one for each of {channels} channels"
        raise SettingError(name, f"is {value!r}, not {what}{'' if name == 'mean' else ', above 0'}; give another")
    return [float(number) for number in values]
