"""Images in shards."""

from typing import Any, ClassVar

from jaxtyping import Int64, UInt8
from torch import Tensor

from datamodules.archives.shards import Shards
from datamodules.decoding.image_files import examine_image, too_bright, too_large
from datamodules.decoding.packed import Packed
from datamodules.errors import DataError
from datamodules.images import ImagesOfAnySize


class ImageShards(Shards, ImagesOfAnySize):
    """Images in shards: WebDataset's .tar files, or .parquet files of Hugging Face's datasets.

    `python train.py shard` writes such shards.

    Args:
        common: Arguments of Shards and ImagesOfAnySize.
    """

    kind: ClassVar[str] = "image"
    suffixes: ClassVar[frozenset[str]] = ImagesOfAnySize.predict_suffixes

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
        return {
            number: what
            for position, (height, width) in enumerate(sizes.tolist())
            if height and (what := too_large(height, width, self.made_of))  # broken images have no height
            for number in (at == position).nonzero()[:, 0].tolist()
        }

    def read_item(self, item: Any) -> UInt8[Tensor, "c h w"]:
        return self.read(self.listed.packed(item))
