"""Images in shards."""

import math
from typing import ClassVar

from jaxtyping import Int64, UInt8
from torch import Tensor

from datamodules.archives.shards import Shards
from datamodules.decoding.image_files import examine_image, too_bright, too_large
from datamodules.decoding.packed import Packed
from datamodules.errors import DataError
from datamodules.images import ImagesOfAnySize, kept_images


class ImageShards(Shards, ImagesOfAnySize):
    """Images in shards: WebDataset's .tar files, or .parquet files of Hugging Face's datasets.

    `python train.py shard` writes such shards.

    Args:
        common: Arguments of Shards and ImagesOfAnySize.
    """

    kind: ClassVar[str] = "image"
    suffixes: ClassVar[frozenset[str]] = ImagesOfAnySize.predict_suffixes
    reading: ClassVar[tuple[str, ...]] = ("shape", "keep_aspect", "white")

    def sizes(self) -> Int64[Tensor, "n 2"]:
        return self._readable()

    def examine(self, file: Packed) -> tuple[int, int]:
        facts = examine_image(file)
        if what := too_bright(facts, self.white):
            raise DataError(f"{file}: {what}")
        return facts["height"], facts["width"]

    def examined_with(self) -> str:
        return "" if self.white is None else f" white {self.white}"

    def wrong_values(self) -> dict[int, str]:
        sizes, at = self.facts.values.unique(dim=0, return_inverse=True)
        found = {
            position: too_large(height, width, self.made_of)
            for position, (height, width) in enumerate(sizes.tolist())
            if height  # broken ones have none
        }
        return {
            number: what
            for position, what in found.items()
            if what
            for number in (at == position).nonzero()[:, 0].tolist()
        }

    def read_packed(self, file: Packed) -> UInt8[Tensor, "c h w"]:
        return self.read(file)

    def read_all(self, numbers: Int64[Tensor, " m"], digest: str) -> UInt8[Tensor, "n c h w"]:
        read_all = super().read_all
        return kept_images(f"shards {digest}", lambda: read_all(numbers, digest))

    def bytes_of(self, numbers: Int64[Tensor, " m"]) -> int:
        return len(numbers) * math.prod(self.shape)
