"""The base of data sets of many files: their table, and the scan for broken files."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from datamodules.errors import DataError
from datamodules.labels import Labels, labels_of
from datamodules.on_disk import OnDisk
from datamodules.own.scan import Facts, scan
from datamodules.samples import Samples
from datamodules.splits import Columns


@dataclass(frozen=True)
class Item:
    """One row of a data set's table.

    Attributes:
        path: The path of the file, relative to the root.
        label: The name of its class, or of its classes with a separator between them.
        split: "train", "val", "test", or "" if the split is not decided yet.
        fold: The fold of a cross-validation, or "".
        start, end: The part of a recording, in seconds; to its end if end is None.
        line: The line number in the user's table, or 0.
        group: Something that the file shares with others, such as a patient or a site, or "". All files of a group are
            in one split.
    """

    path: str
    label: str
    split: str = ""
    fold: str = ""
    start: float = 0.0
    end: float | None = None
    line: int = 0
    group: str = ""

    def classes(self, separator: str | None) -> list[str]:
        """The names of the classes in the label; without a separator the label is one class."""
        if separator is None:
            return [self.label]
        return [name.strip() for name in self.label.split(separator) if name.strip()]

    @property
    def name(self) -> str:
        if self.end is None and not self.start:
            return self.path
        end = "end" if self.end is None else f"{self.end:.10g}"
        return f"{self.path} {self.start:.10g}-{end}"


class FileDataModule(OnDisk):
    """A data set of files in a folder.

    Every file is opened once before training, in a scan whose result is cached (datamodules/own/scan.py).

    Args:
        test_fold: The fold to test on, if the data has folds.
        val_fold: The fold to validate on.
        common: Arguments of OnDisk.
    """

    noun: ClassVar[str] = "file"
    kind: ClassVar[str]  # image or sound, for messages
    has_times: ClassVar[bool] = False  # whether a row may be a part of its file, in seconds
    # Whether samples are held out by their position, as for published results, and not by the names of their files.
    splits_by_position: ClassVar[bool] = False

    def __init__(
        self, root: str, test_fold: str | int | None = None, val_fold: str | int | None = None, **common: Any
    ) -> None:
        super().__init__(root=root, **common)
        self.test_fold, self.val_fold = test_fold, val_fold

    # What a subclass defines

    @abstractmethod
    def find(self) -> list[Item]:
        """The table of the data set: a row for every file that it should have, or for every part of a file.

        Raises:
            DataError: If there is no table or no file.
        """

    @abstractmethod
    def examine(self, path: Path) -> Facts:
        """Read a whole file and return facts about it.

        Raises:
            DataError: If it is broken.
        """

    def examined_with(self) -> str:
        """The settings on which the facts of a file depend, as a text that is part of the cache's key."""
        return ""

    def other_files(self, path: Path) -> list[Path]:
        """The other files in which parts of a file are."""
        return []

    def wrong_part(self, item: Item) -> str:
        """The error of a row whose file is good, with a remedy; empty if there is none."""
        return ""

    # The table

    @cached_property
    def items(self) -> list[Item]:
        return self.find()

    @cached_property
    def facts(self) -> dict[str, Facts]:
        """The results of the scan, by path."""
        paths = dict.fromkeys(item.path for item in self.items)
        kind = type(self).examine.__qualname__ + self.examined_with()
        return scan(self.folder, paths, self.examine, kind, self.other_files)

    def _readable(self) -> dict[str, Facts]:
        """The facts of the files that can be read, by path.

        Raises:
            DataError: If there is none.
        """
        readable = {path: facts for path, facts in self.facts.items() if "error" not in facts}
        if not readable:
            what = f"no readable {self.kind}; python train.py check says what is wrong with each"
            raise DataError(f"{self.root}: {what}")
        return readable

    def classes_found(self) -> list[str]:
        return sorted({name for item in self.items for name in self._classes_of(item)})

    def _classes_of(self, item: Item) -> list[str]:
        return item.classes(self.labels_separator)

    def located(self, name: str) -> dict[str, Any]:
        item = self._item_of[name]
        parts = {"start": item.start, "end": "" if item.end is None else item.end} if self._has_parts else {}
        return {"path": item.path, **parts}

    def file_of(self, samples: Samples, index: int) -> tuple[str, bytes]:
        path = self.folder / self._item_of[samples.names[index]].path
        return path.suffix.lower(), path.read_bytes()

    @cached_property
    def _item_of(self) -> dict[str, Item]:
        return {item.name: item for item in self.items}

    @cached_property
    def _has_parts(self) -> bool:
        return any(item.name != item.path for item in self.items)

    def bad_files(self) -> dict[str, str]:
        """The errors with their remedies: of broken files by path, and of wrong parts of good files by name."""
        files = {path: facts["error"] for path, facts in self.facts.items() if "error" in facts}
        parts = {item.name: self.wrong_part(item) for item in self.items if item.path not in files}
        return files | {name: what for name, what in parts.items() if what}

    def _good_items(self) -> list[Item]:
        bad = self.bad_files()
        self.refuse_or_tell(bad)
        good = [item for item in self.items if item.path not in bad and item.name not in bad]
        unknown = {name for item in good for name in self._classes_of(item)} - set(self.class_names)
        if unknown:
            known = ", ".join(self.class_names[:20])
            raise DataError(f"{self.root}: class {min(unknown)} is not one of the model's ({known}); take it out")
        return good

    # Splits and samples

    def columns(self) -> Columns:
        items = self._good_items()
        return Columns(
            items,
            [item.name for item in items],
            self._labels_of(items),
            *([getattr(item, column) for item in items] for column in ("split", "fold", "group")),
        )

    def _labels_of(self, items: Sequence[Item]) -> Labels:
        number = {name: label for label, name in enumerate(self.class_names)}
        classes = [[number[name] for name in self._classes_of(item)] for item in items]
        return labels_of(classes, len(number), self.labels_separator is not None)

    def whole(self, names: Sequence[str]) -> list[str] | None:
        """The group of each sample, or its file if it has no group."""
        items = [self._item_of[name] for name in names]
        return None if self.splits_by_position else [item.group or item.path for item in items]

    def content_of(self, sources: Sequence[Item]) -> bytes:
        return str([f"{self.facts[item.path]['sha256']} {item.start} {item.end}" for item in sources]).encode()
