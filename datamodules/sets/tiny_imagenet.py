"""Tiny ImageNet: 200 classes of 64x64 photographs, in its own layout."""

from pathlib import Path
from typing import Any

from datamodules.errors import DataError
from datamodules.own.files import Item
from datamodules.own.image_folder import ImageFiles
from datamodules.own.scan import walk
from datamodules.sets.fetch import fetch_and_unpack, folder_with

URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
FOLDER = "tiny-imagenet-200"
LABELS = "val/val_annotations.txt"


class TinyImageNet(ImageFiles):
    """100,000 + 10,000 photographs of 64x64 pixels, some of them grey; the official validation split is the test.

    The official test split has no labels. Source: Stanford's CS231n, from ImageNet, for research and education.

    Args:
        root: Folder that holds tiny-imagenet-200, or this folder itself.
        download: Fetch the archive if it is missing.
        size: See ImageFiles.
        common: Arguments of ImageFiles.

    Raises:
        DataError: From setup, if files are missing or broken, or cannot be fetched.
    """

    splits_by_position = True

    def __init__(self, root: str, download: bool = False, size: int | list[int] = 64, **common: Any) -> None:
        super().__init__(root=root, size=size, **common)
        self.download = download

    def find(self) -> list[Item]:
        if self.download:
            root = Path(self.root).expanduser()
            fetch_and_unpack(URL, root, FOLDER, lambda: self._base() is not None)
        base = self._base()
        if base is None:
            raise DataError(
                f"{self.root}: no {FOLDER} with train and {LABELS}; unpack {URL} there, or set data.download to true"
            )
        names = self._names(base)
        items = []
        for path in walk(base / "train", self.predict_suffixes):
            items.append(Item(str(path.relative_to(self.folder)), names(path.parent.parent.name)))
        for line in (base / LABELS).read_text().splitlines():
            name, label, *_ = line.split("\t")
            items.append(Item(str((base / "val/images" / name).relative_to(self.folder)), names(label), "test"))
        return items

    def _base(self) -> Path | None:
        return folder_with(self.root, FOLDER, LABELS, "train")

    def _names(self, base: Path) -> Any:
        """A function from a WordNet number to its first word; if two classes share that word, the number is added."""
        words = base / "words.txt"
        lines = words.read_text().splitlines() if words.is_file() else []
        named = {number: word.split(",")[0] for number, word in (line.split("\t") for line in lines)}
        names = {folder.name: named.get(folder.name, folder.name) for folder in sorted((base / "train").iterdir())}
        twice = {name for name in names.values() if list(names.values()).count(name) > 1}
        return lambda number: f"{names[number]} ({number})" if names.get(number) in twice else names.get(number, number)
