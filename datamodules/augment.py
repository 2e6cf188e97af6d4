"""Random changes of a sound in training that do not change its class. They use torch's generator."""

import math
from abc import ABC, abstractmethod

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from datamodules.errors import require


class SoundTransform(nn.Module, ABC):
    """A random change of a waveform (s,) or (channels, s) that keeps its length."""

    @abstractmethod
    def forward(self, waveform: Float32[Tensor, "*channels s"]) -> Float32[Tensor, "*channels s"]:
        """Change a waveform at random."""


class TimeShift(SoundTransform):
    """Shift the sound by up to a fraction of its length, to either side; it wraps around. All channels move together.

    Args:
        fraction: The largest shift as a fraction of the length, in 0..1 (0 excluded).
    """

    def __init__(self, fraction: float = 0.1) -> None:
        super().__init__()
        require(0 < fraction <= 1, "fraction", "in 0..1 (0 excluded)", fraction, "0.1 is a tenth of the clip")
        self.fraction = fraction

    def forward(self, waveform: Float32[Tensor, "*channels s"]) -> Float32[Tensor, "*channels s"]:
        most = round(self.fraction * waveform.shape[-1])
        return waveform.roll(int(torch.randint(-most, most + 1, ())), -1)


class Gain(SoundTransform):
    """Make the sound louder or softer, by decibels from a uniform distribution. All channels change by the same.

    Args:
        decibels: The largest change, up or down.
    """

    def __init__(self, decibels: float = 6.0) -> None:
        super().__init__()
        require(0 < decibels <= 60, "decibels", "in 0..60 (0 excluded)", decibels, "6 doubles or halves the amplitude")
        self.decibels = decibels

    def forward(self, waveform: Float32[Tensor, "*channels s"]) -> Float32[Tensor, "*channels s"]:
        decibels = self.decibels * (2 * torch.rand(()) - 1)
        return waveform * 10 ** (decibels / 20)


class Noise(SoundTransform):
    """Add white noise, at a signal-to-noise ratio in decibels from a uniform distribution. Silence stays silent,
    and a gap (NaN) stays one. Each channel gets noise of its own, at this ratio to its own power.

    Args:
        snr_db: The least and the greatest ratio, in decibels.
        probability: The probability that noise is added.
    """

    def __init__(self, snr_db: tuple[float, float] = (10.0, 40.0), probability: float = 0.5) -> None:
        super().__init__()
        is_range = len(snr_db) == 2 and snr_db[0] <= snr_db[1]
        require(is_range, "snr_db", "the least and the greatest", snr_db, "10 and 40")
        require(0 < probability <= 1, "probability", "in 0..1 (0 excluded)", probability, "0.5 is every other clip")
        self.snr_db = (float(snr_db[0]), float(snr_db[1]))
        self.probability = probability

    def forward(self, waveform: Float32[Tensor, "*channels s"]) -> Float32[Tensor, "*channels s"]:
        if torch.rand(()) >= self.probability:
            return waveform
        least, greatest = self.snr_db
        ratio = 10 ** ((least + (greatest - least) * torch.rand(())) / 10)
        channels = waveform.reshape(-1, waveform.shape[-1])
        powers = [float(channel.square().nanmean().nan_to_num()) for channel in channels]
        levels = torch.tensor([math.sqrt(power / float(ratio)) for power in powers])
        return waveform + levels.view(*waveform.shape[:-1], 1) * torch.randn(waveform.shape)
