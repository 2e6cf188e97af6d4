"""Sounds in shards."""

from typing import Any, ClassVar

from jaxtyping import Float32, Int64
from torch import Tensor

from datamodules.archives.shards import Shards
from datamodules.audio import SoundsOfAnyRate
from datamodules.decoding.packed import Packed
from datamodules.decoding.sound_files import SUFFIXES, examine_sound
from datamodules.errors import DataError


class AudioShards(Shards, SoundsOfAnyRate):
    """Sounds in shards: WebDataset's .tar files, or .parquet files of Hugging Face's datasets.

    `python train.py shard` writes such shards.

    Args:
        common: Arguments of Shards and SoundsOfAnyRate.
    """

    kind: ClassVar[str] = "audio"
    suffixes: ClassVar[frozenset[str]] = SUFFIXES

    def rates_hz(self) -> Int64[Tensor, " n"]:
        return self._readable()[:, 1]

    def longest_seconds(self) -> float:
        frames, rates = self._readable().T
        return float((frames / rates.double()).max())

    def examine(self, file: Packed) -> tuple[int, int]:
        facts = examine_sound(file)
        if what := self.wrong_channels(facts["channels"]):
            raise DataError(f"{file}: {what}")
        return facts["frames"], facts["rate_hz"]

    def examined_with(self) -> str:
        return "" if self.channels == "mean" else f" {self.channels} {self.num_channels}"

    def read_item(self, item: Any) -> Float32[Tensor, "*channels s"]:
        return self.read_whole(self.listed.packed(item))

    def lengths_of(self, sources: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
        frames, rates = self.facts.values[sources].T
        return (self.sample_rate_hz * (frames / rates.double())).round().long()
