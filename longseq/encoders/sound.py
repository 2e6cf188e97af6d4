"""What all encoders of sound have in common: batches of waveforms, each of its own length."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from longseq.arguments import ArgumentError
from longseq.encoders.encoder import Encoder


class SoundEncoder(Encoder):
    """An encoder of waveforms (b, samples), or of a dictionary of ``waveforms``, where silence follows the shorter
    ones, and their ``lengths`` in samples.

    A subclass calls ``refuse_no_sound`` first, and keeps ``sample_rate_hz`` and ``seconds`` as attributes.

    Attributes:
        num_samples: The samples of the longest clip; with any_length of a usual one.
    """

    takes_sounds = True
    sample_rate_hz: int
    seconds: float

    @property
    def num_samples(self) -> int:
        return round(self.sample_rate_hz * self.seconds)

    @abstractmethod
    def count_rows(self, num_samples: Any) -> Any:
        """How many rows of a picture so many samples make: a number, or a tensor of numbers."""

    def waveforms_of(self, inputs: Float[Tensor, "b samples"] | Mapping[str, Tensor]) -> Float[Tensor, "b samples"]:
        """The waveforms of a batch, with silence after the shorter ones.

        Raises:
            ValueError: If they are longer than the longest clip.
        """
        waveforms = inputs["waveforms"] if isinstance(inputs, Mapping) else inputs
        if not self.any_length and waveforms.shape[-1] > self.num_samples:
            raise ArgumentError(
                "seconds",
                f"must cover the longest clip, but {self.num_samples} samples ({self.seconds} s) are the most "
                f"that fit, got {waveforms.shape[-1]}; crop the clips",
            )
        return waveforms

    def sounds(self, inputs: Float[Tensor, "b samples"] | Mapping[str, Tensor]) -> list[Float[Tensor, " samples"]]:
        if not isinstance(inputs, Mapping):
            return list(inputs)
        return [clip[:length] for clip, length in zip(inputs["waveforms"], inputs["lengths"], strict=True)]

    def rows(self, inputs: Float[Tensor, "b samples"] | Mapping[str, Tensor]) -> Int64[Tensor, " b"] | None:
        """The number of rows of each clip."""
        if isinstance(inputs, Mapping):
            return self.count_rows(inputs["lengths"])
        rows = self.count_rows(inputs.shape[-1])
        if rows == self.picture_shape[1] and not self.any_length:
            return None
        return torch.full((len(inputs),), rows, device=inputs.device)


def refuse_no_sound(**sizes: int | float) -> None:
    """Check that numbers of an encoder's constructor are positive.

    Raises:
        ValueError: If one is not.
    """
    for name, value in sizes.items():
        if not value > 0:
            raise ArgumentError(name, f"must be positive, got {value}; the README's configs have values that work")


def patches_down(rows: int, patch: int) -> int:
    """As many rows as whole patches need: the last patch is filled with the mean."""
    return -(-rows // patch) * patch
