"""The user's own images: a folder of class folders, or a table of paths and labels."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import UInt8
from torch import Tensor

from datamodules.cache import kept
from datamodules.errors import DataError, require
from datamodules.files import FileDataModule, Item
from datamodules.image_files import examine_image, too_large
from datamodules.images import ImageDataModule
from datamodules.own_files import OwnFiles
from datamodules.scan import Facts

_VERSION = 1  # goes up when images are read in another way
LONGEST_SIDE = 64  # the most if `size` is not given: 4096 tokens if each pixel is a token


class ImageFiles(FileDataModule, ImageDataModule):
    """A data set of image files, of any size, mode and rotation.

    Args:
        root: The folder.
        size: Height and width of the inputs, or one number for both. If absent, the size of the images if all have the
            same one of at most 64 pixels a side; else a square with the median of their shorter sides, 64 at most.
        grayscale: Whether inputs are grey, of one channel.
        keep_aspect: Whether images are cut to the shape of the inputs, not stretched.
        common: Arguments of FileDataModule and ImageDataModule.
    """

    reading: ClassVar[tuple[str, ...]] = ("shape", "keep_aspect")

    def __init__(
        self,
        root: str,
        size: int | list[int] | None = None,
        grayscale: bool = False,
        keep_aspect: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(root=root, **common)
        sides = [size, size] if isinstance(size, int) else size
        require(
            sides is None or (len(sides) == 2 and min(sides) >= 1),
            "size",
            "a side or height and width",
            size,
            "64 is a start",
        )
        self._sides = sides
        self.grayscale = grayscale
        self.keep_aspect = keep_aspect

    @property
    def size(self) -> list[int]:
        if self._sides is None:
            sizes = [(facts["height"], facts["width"]) for facts in self.facts.values() if "error" not in facts]
            if not sizes:
                raise DataError(f"{self.root}: no readable image; python train.py check says what is wrong with each")
            if len(set(sizes)) == 1 and max(sizes[0]) <= LONGEST_SIDE:
                self._sides = list(sizes[0])
            else:
                side = int(torch.tensor([min(size) for size in sizes]).median())
                self._sides = [min(side, LONGEST_SIDE)] * 2
        return self._sides

    @property
    def shape(self) -> tuple[int, int, int]:  # type: ignore[override]
        return (1 if self.grayscale else 3, *self.size)  # type: ignore[return-value]

    def examine(self, path: Path) -> Facts:
        height, width = examine_image(path)
        return {"height": height, "width": width}

    def wrong_part(self, item: Item) -> str:
        facts = self.facts[item.path]
        return too_large(facts["height"], facts["width"], self.made_of)

    def read_item(self, item: Item) -> UInt8[Tensor, "c h w"]:
        return self.read(self.folder / item.path)

    def read_all(self, items: list[Item], digest: str) -> UInt8[Tensor, "n c h w"]:
        read_all = super().read_all
        what = f"{type(self).read_item.__qualname__} {_VERSION} {digest}"
        return kept("images", what, lambda: torch.stack(list(read_all(items, digest))))

    def size_of(self, item: Item) -> int:
        channels, height, width = self.shape
        return channels * height * width


class ImageFolder(OwnFiles, ImageFiles):
    """Images in one folder for each class, or in such folders inside train, val and test, or listed in a table.

    Without a test folder a share of the images is held out for the test. The same holds for validation.

    Args:
        common: Arguments of OwnFiles and ImageFiles.

    Raises:
        DataError: From setup, if there is no class folder, the table lacks a column, or a file is broken.
    """

    kind: ClassVar[str] = "image"
