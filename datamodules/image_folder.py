"""The user's own images: a folder of class folders."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import UInt8
from torch import Tensor

from datamodules.errors import DataError, require
from datamodules.files import FileDataModule, Item
from datamodules.image_files import examine_image, too_large
from datamodules.images import ImageDataModule
from datamodules.scan import Facts, leads_up, walk

SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
LONGEST_SIDE = 64  # the most if `size` is not given: 4096 tokens if each pixel is a token


class ImageFolder(FileDataModule, ImageDataModule):
    """Images in one folder for each class, or in such folders inside train, val and test: any size, mode and rotation.

    Without a test folder a share of the images is held out for the test. The same holds for validation.

    Args:
        root: Folder of the class folders, or of train, val (or valid) and test.
        size: Height and width of the inputs, or one number for both. If absent, the size of the images if all have the
            same one of at most 64 pixels a side; else a square with the median of their shorter sides, 64 at most.
        grayscale: Whether inputs are grey, of one channel.
        keep_aspect: Whether images are cut to the shape of the inputs, not stretched.
        common: Arguments of FileDataModule and ImageDataModule.

    Raises:
        DataError: From setup, if there is no class folder, or a file is broken.
    """

    named_by: ClassVar[str | None] = "root"
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

    def find(self) -> list[Item]:
        items = list(find_in_class_folders(self.folder, self.predict_suffixes))
        if not items:
            suffixes = ", ".join(sorted(self.predict_suffixes))
            raise DataError(f"{self.root}: holds no folder of images for each class; it may hold {suffixes}")
        return items

    def examine(self, path: Path) -> Facts:
        height, width = examine_image(path)
        return {"height": height, "width": width}

    def wrong_part(self, item: Item) -> str:
        facts = self.facts[item.path]
        return too_large(facts["height"], facts["width"], self.made_of)

    def read_item(self, item: Item) -> UInt8[Tensor, "c h w"]:
        return self.read(self.folder / item.path)

    def size_of(self, item: Item) -> int:
        channels, height, width = self.shape
        return channels * height * width


def find_in_class_folders(root: Path, suffixes: frozenset[str]) -> Iterator[Item]:
    """The rows of a folder of class folders, or of such folders inside train, val and test.

    Raises:
        DataError: If a class has no file or a name that is not UTF-8, or if there are splits but no train.
    """
    folders = [path for path in sorted(root.iterdir()) if _may_be_class(path)]
    named = [folder for folder in folders if folder.name.lower() in SPLITS]
    # a class may have the name of a split, but then its folder holds no folders
    parts = [folder for folder in named if any(map(_may_be_class, folder.iterdir()))]
    is_split = any(SPLITS[folder.name.lower()] == "train" for folder in parts)
    if not is_split and (parts or folders == named != []):
        names = " and ".join(folder.name for folder in parts or named)
        raise DataError(f"{root}: holds {names}, but no train with a folder for each class; add it")
    for part in parts if is_split else [root]:
        split = SPLITS[part.name.lower()] if is_split else ""
        for folder in sorted(filter(_may_be_class, part.iterdir())):
            name = os.fsencode(folder.name).decode(errors="backslashreplace")
            if name != folder.name:  # names of classes are drawn and written, so they must be text
                raise DataError(f"{part}/{name}: the name of a class is not UTF-8; rename the folder")
            files = list(walk(folder, suffixes))
            if not files:
                raise DataError(f"{folder}: class {folder.name} has no readable file; add some, or take the folder out")
            for path in files:
                yield Item(str(path.relative_to(root)), folder.name, split)


def _may_be_class(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".") and not leads_up(path)
