"""Sounds in shards."""

from typing import Any, ClassVar

from jaxtyping import Float32, Int64
from torch import Tensor

from datamodules.archives.shards import Shards
from datamodules.audio import SoundsOfAnyRate
from datamodules.decoding.packed import Packed
from datamodules.decoding.sound_files import SUFFIXES, change_rate, examine_sound, read_sound


class AudioShards(Shards, SoundsOfAnyRate):
    """Sounds in shards: WebDataset's .tar files, or .parquet files of Hugging Face's datasets.

    `python train.py shard` writes such shards.

    Args:
        common: Arguments of Shards and SoundsOfAnyRate.
    """

    kind: ClassVar[str] = "audio"
    suffixes: ClassVar[frozenset[str]] = SUFFIXES
    reading: ClassVar[tuple[str, ...]] = ("sample_rate_hz", "seconds")

    def rates_hz(self) -> Int64[Tensor, " n"]:
        return self._readable()[:, 1]

    def longest_seconds(self) -> float:
        frames, rates = self._readable().T
        return float((frames / rates.double()).max())

    def examine(self, file: Packed) -> tuple[int, int]:
        facts = examine_sound(file)
        return facts["frames"], facts["rate_hz"]

    def read_packed(self, file: Packed) -> Float32[Tensor, " s"]:
        return change_rate(*read_sound(file), self.sample_rate_hz)

    def bytes_of(self, numbers: Int64[Tensor, " m"]) -> int:
        return 4 * int(self._lengths(numbers).sum())

    def details(self, numbers: Int64[Tensor, " m"]) -> dict[str, Any]:
        return {"lengths": self._lengths(numbers)}

    def _lengths(self, numbers: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
        frames, rates = self.facts.values[numbers].T
        return (self.sample_rate_hz * (frames / rates.double())).round().long()
