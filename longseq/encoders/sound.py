"""What all encoders of sounds and signals have in common: batches of waveforms of different lengths."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.encoders.encoder import Encoder

_SLOWEST_HZ = 1000  # the lowest rate of sounds


class SoundEncoder(Encoder):
    """An encoder of waveforms (b, samples), or of a dictionary of ``waveforms``, where shorter ones are followed by
    silence, and their ``lengths`` in samples. Waveforms of several channels are (b, channels, samples).

    A subclass checks that ``sample_rate_hz`` and ``seconds`` are positive, and keeps them as attributes.

    Attributes:
        num_samples: Samples of the longest clip; with any_length those of a typical one.
        channels: The number of channels; 1 unless the subclass takes it as an argument.
        gaps: Whether NaN stands for a missing sample. A token all of whose samples are missing in all channels is
            masked as padding is; other missing samples have the mean of their channel. So what stands in a gap, and
            whether a signal ends there, changes nothing.
    """

    kind, varying = "sounds", ("waveforms", -1)
    channels = 1
    sample_rate_hz: int
    seconds: float

    @property
    def num_samples(self) -> int:
        return round(self.sample_rate_hz * self.seconds)

    @property
    def longest(self) -> int:
        return self.num_samples

    @abstractmethod
    def count_rows(self, num_samples: Any) -> Any:
        """The number of rows of an input of this many samples: a number, or a tensor of numbers."""

    def waveforms_of(
        self, inputs: Float[Tensor, "b *channels samples"] | Mapping[str, Tensor]
    ) -> Float[Tensor, "b *channels samples"]:
        """The waveforms of a batch, with silence after the shorter ones: (b, samples) for one channel.

        Raises:
            ValueError: If they are longer than ``seconds``, and any_length is False; or if they have other channels.
        """
        waveforms = inputs["waveforms"] if isinstance(inputs, Mapping) else inputs
        if tuple(waveforms.shape[1:-1]) != ((self.channels,) if self.channels > 1 else ()):
            what = f"must have {self.channels} for {type(self).__name__}, got inputs of {tuple(waveforms.shape[1:])}"
            remedy = "choose them with --data.channels (mean is one)"
            raise ArgumentError("channels", f"{what}; {remedy}")
        if not self.any_length and waveforms.shape[-1] > self.num_samples:
            what = f"must cover the longest clip, but {self.num_samples} samples ({self.seconds} s) are the most"
            raise ArgumentError("seconds", f"{what} that fit, got {waveforms.shape[-1]}; crop the clips")
        return waveforms

    def sounds(
        self, inputs: Float[Tensor, "b *channels samples"] | Mapping[str, Tensor]
    ) -> list[Float[Tensor, " samples"]]:
        """The first channel of each clip; none at a rate too low to listen to."""
        if self.sample_rate_hz < _SLOWEST_HZ:
            return []
        if self.gaps and isinstance(inputs, Mapping):
            inputs = {**inputs, "waveforms": inputs["waveforms"].nan_to_num()}
        if not isinstance(inputs, Mapping):
            return list(inputs if self.channels == 1 else inputs[:, 0])
        clips = inputs["waveforms"] if self.channels == 1 else inputs["waveforms"][:, 0]
        return [clip[:length] for clip, length in zip(clips, inputs["lengths"], strict=True)]

    def rows(self, inputs: Float[Tensor, "b *channels samples"] | Mapping[str, Tensor]) -> Int64[Tensor, " b"] | None:
        """The number of rows of each clip."""
        if isinstance(inputs, Mapping):
            return self.count_rows(inputs["lengths"])
        rows = self.count_rows(inputs.shape[-1])
        if rows == self.picture_shape[1] and not self.any_length:
            return None
        return torch.full((len(inputs),), rows, device=inputs.device)


def rows_of_patches(rows: int, patch: int) -> int:
    """The number of rows, rounded up to whole patches; the last patch is filled with the mean."""
    return -(-rows // patch) * patch


def padded_clips(*lengths: int, channels: int = 1) -> dict[str, Tensor]:
    """A batch of noise for examples: clips of these lengths in samples, the first of which is the longest."""
    is_present = torch.arange(lengths[0]) < torch.tensor(lengths)[:, None]
    if channels == 1:
        return {"waveforms": torch.randn(len(lengths), lengths[0]) * is_present, "lengths": torch.tensor(lengths)}
    noise = torch.randn(len(lengths), channels, lengths[0])
    return {"waveforms": noise * is_present[:, None], "lengths": torch.tensor(lengths)}
