"""The user's own images: a folder of class folders, or a table of paths and labels."""

from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from datamodules.decoding.image_files import examine_image, remark_on_pages, remarks_on_depth, too_bright, too_large
from datamodules.images import ImagesOfAnySize
from datamodules.own.files import FileDataModule, Item
from datamodules.own.own_files import OwnFiles
from datamodules.own.scan import Facts


class ImageFiles(FileDataModule, ImagesOfAnySize):
    """A data set of image files, of any size, mode and rotation.

    Args:
        common: Arguments of FileDataModule and ImagesOfAnySize.
    """

    kind: ClassVar[str] = "image"

    def sizes(self) -> Int64[Tensor, "n 2"]:
        return torch.tensor([(facts["height"], facts["width"]) for facts in self._readable().values()])

    def examine(self, path: Path) -> Facts:
        return examine_image(path)

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
        return self.read(self.folder / item.path)


class ImageFolder(OwnFiles, ImageFiles):
    """Images in one folder for each class, or in such folders inside train, val and test, or listed in a table.

    Without a test folder, a share of the images is held out for the test, and likewise for validation.

    Args:
        common: Arguments of OwnFiles and ImageFiles.

    Raises:
        DataError: From setup, if there is no class folder, the table lacks a column, or a file is broken.
    """
