"""The user's own images: a folder of class folders, or a table of paths and labels."""

from copy import copy
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from datamodules.decoding.image_files import (
    examine_image,
    facts_of,
    opened,
    remark_on_pages,
    remarks_on_depth,
    size_in_header,
    too_bright,
    too_large,
)
from datamodules.images import ImagesOfAnySize, sides_for
from datamodules.own.files import FileDataModule, Item
from datamodules.own.own_files import OwnFiles
from datamodules.own.scan import Facts

_FEW = 100  # headers that tell the size of the inputs before the scan


class ImageFiles(FileDataModule, ImagesOfAnySize):
    """A data set of image files, of any size, mode and rotation.

    Args:
        common: Arguments of FileDataModule and ImagesOfAnySize.
    """

    kind: ClassVar[str] = "image"

    def sizes(self) -> Int64[Tensor, "n 2"]:
        return torch.tensor([(facts["height"], facts["width"]) for facts in self._readable().values()])

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        self._decoded.clear()  # inputs of the scan that no split took
        self._reader = None

    @cached_property
    def _decoded(self) -> dict[Path, UInt8[Tensor, "c h w"]]:
        """Inputs that the scan made of the files that it decoded, until the splits take them."""
        return {}

    @cached_property
    def facts(self) -> dict[str, Facts]:
        self._reader = self._reader_in_scan()
        return super().facts

    def _reader_in_scan(self) -> "ImageFiles | None":
        """A copy that knows the size of its inputs before the scan; None if inputs do not stay in memory.

        A few headers tell the size. If the scan then finds another size, files are decoded again.
        """
        reader = copy(self)
        if self._sides is None:
            few = self.items[:: len(self.items) // _FEW + 1]
            sizes = [size for item in few if (size := size_in_header(self.folder / item.path))]
            if not sizes:
                return None
            reader._sides = sides_for(torch.tensor(sizes))
        return reader if reader.stay_in_memory(self.items) else None

    def examine(self, path: Path) -> Facts:
        reader = self._reader
        if reader is None:
            return examine_image(path)

        def made_of(height: int, width: int) -> tuple[int, int]:
            is_input = not too_large(height, width, reader.made_of)
            return reader.made_of(height, width) if is_input else (height, width)

        with opened(path, made_of) as image:
            facts = facts_of(image, path)
            if not (too_large(image.height, image.width, reader.made_of) or too_bright(facts, self.white)):
                self._decoded[path] = reader.input_of(image)
        return facts

    def wrong_part(self, item: Item) -> str:
        facts = self.facts[item.path]
        return too_large(facts["height"], facts["width"], self.made_of) or too_bright(facts, self.white)

    def _good_items(self) -> list[Item]:
        good = super()._good_items()
        facts = {item.path: self.facts[item.path] for item in good}
        for line in (*remarks_on_depth([*facts.values()], self.white), *remark_on_pages(facts)):
            self.remark(line)
        return good

    def read_item(self, item: Item) -> UInt8[Tensor, "c h w"]:
        path = self.folder / item.path
        decoded = self._decoded.pop(path, None)
        return self.read(path) if decoded is None or decoded.shape != self.shape else decoded


class ImageFolder(OwnFiles, ImageFiles):
    """Images in one folder for each class, or in such folders inside train, val and test, or listed in a table.

    Without a test folder, a share of the images is held out for the test, and likewise for validation.

    Args:
        common: Arguments of OwnFiles and ImageFiles.

    Raises:
        DataError: From setup, if there is no class folder, the table lacks a column, or a file is broken.
    """
