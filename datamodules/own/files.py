"""The base of data sets of many files: their table, their splits, and what happens to broken files."""

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Int64
from torch import Tensor

from datamodules.base import DataModule
from datamodules.errors import DataError, counted, require, say
from datamodules.hold_out import Split, hold_out
from datamodules.labels import Labels, counts, labels_of
from datamodules.own.scan import Facts, in_threads, scan
from datamodules.samples import Files, Samples, chosen
from datamodules.splits import Columns, divided

IN_MEMORY_BYTES = 2**30  # inputs of up to this size are decoded once and kept


@dataclass(frozen=True)
class Item:
    """One row of a data set's table.

    Attributes:
        path: The path of the file, relative to the root.
        label: The name of its class, or of its classes with a separator between them.
        split: "train", "val", "test", or "" if it is still to be drawn.
        fold: The fold of a cross-validation, or "".
        group: What it has in common with other files, such as a patient or a site: a group is in one split. "" if it
            has no group.
        start, end: The part of a recording, in seconds; to its end if end is None.
        line: The line in the table that a user wrote, or 0.
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
        """The names of the classes of its label, which is one class if there is no separator."""
        if separator is None:
            return [self.label]
        return [name.strip() for name in self.label.split(separator) if name.strip()]

    @property
    def name(self) -> str:
        if self.end is None and not self.start:
            return self.path
        end = "end" if self.end is None else f"{self.end:.10g}"
        return f"{self.path} {self.start:.10g}-{end}"


class OnDisk(DataModule):
    """A data set in a folder.

    Args:
        root: The folder.
        on_error: What a broken file does: "raise" ends the run before training, "skip" leaves it out.
        in_memory: Whether inputs are decoded once and kept in memory, or decoded by workers each time they are needed;
            if absent, their size decides.
        class_names: The classes, in the order of their labels; if absent, those in the data.
        test_fraction: Share that is held out for the test if the data has no test split, in (0, 1).
        common: Arguments of every data module.
    """

    reading: ClassVar[tuple[str, ...]] = ()  # the settings that decide what is read from a file
    noun: ClassVar[str]  # what a sample is, for messages
    test_fold: str | int | None = None
    val_fold: str | int | None = None

    def __init__(
        self,
        root: str,
        on_error: Literal["raise", "skip"] = "raise",
        in_memory: bool | None = None,
        class_names: list[str] | None = None,
        test_fraction: float = 0.2,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        require(on_error in ("raise", "skip"), "on_error", "raise or skip", on_error, "skip leaves broken files out")
        require(0 < test_fraction < 1, "test_fraction", "between 0 and 1", test_fraction, "0.2 is a fifth")
        is_list = class_names is None or len(set(class_names)) == len(class_names) >= 2
        require(is_list, "class_names", "two or more, each once", class_names, "leave it out to take those of the data")
        self.root = root
        self.on_error = on_error
        self.in_memory = in_memory
        self.test_fraction = test_fraction
        self._classes_given = class_names

    def settings_of_reading(self) -> list[Any]:
        """The values of the settings that decide what is read; one that is not given changes no digest of before."""
        return [value for name in self.reading if (value := getattr(self, name)) is not None]

    @property
    def folder(self) -> Path:
        folder = Path(self.root).expanduser()
        if not self.root or not folder.is_dir():
            raise DataError(f"{self.root}: no such folder; set data.root to the one that holds the data")
        return folder

    # What a data set on a disk defines

    @abstractmethod
    def columns(self) -> Columns:
        """The table of the samples that can be read.

        Raises:
            DataError: If samples are missing, or broken and not to be left out.
        """

    @abstractmethod
    def whole(self, names: Sequence[str]) -> Sequence[str] | None:
        """What of each sample must not be divided; None if positions, and not names, decide what is held out."""

    @abstractmethod
    def classes_found(self) -> list[str]:
        """The classes in the data, in the order of their labels."""

    @abstractmethod
    def read_item(self, item: Any) -> Tensor:
        """The input that is read from a source."""

    @abstractmethod
    def bytes_of(self, sources: Any) -> int:
        """How many bytes the inputs from these sources take in memory."""

    @abstractmethod
    def content_of(self, sources: Any) -> bytes:
        """What stands for the content of these sources, on any machine."""

    def read_all(self, sources: Any, digest: str) -> Sequence[Tensor] | Tensor:
        """The inputs that are kept in memory. The digest stands for their content and how it is read."""
        return in_threads(self.read_item, list(sources), f"reading {self.root}")

    def details(self, sources: Any) -> dict[str, Any]:
        """Further arguments of samples_of for these sources, by name."""
        return {}

    @property
    def class_names(self) -> list[str]:  # type: ignore[override]
        if self._classes_given is None:
            names = self.classes_found()
            if len(names) < 2:
                raise DataError(f"{self.root}: one class only ({', '.join(names) or 'none'}); give two or more")
            self._classes_given = names
        return self._classes_given

    def load(self) -> tuple[Samples, Samples | None, Samples]:
        table = self.columns()
        train, val, test = (None if rows is None else self.samples_at(table, rows) for rows in divided(self, table))
        assert test is not None
        if train is not None:
            return train, val, test
        nothing = test.subset(torch.zeros(0, dtype=torch.int64))
        return nothing, nothing, test

    load_fold = load

    def split_validation(self, train: Samples) -> Split:
        return hold_out(train.labels, self.val_fraction, self.seed, self.whole(train.names))

    def samples_at(self, table: Columns, rows: Int64[Tensor, " m"]) -> Samples:
        """The samples of these rows."""
        sources = chosen(table.sources, rows)
        content = f"{self.settings_of_reading()} ".encode() + self.content_of(sources)
        digest = hashlib.sha256(content).hexdigest()
        keep = self.bytes_of(sources) <= IN_MEMORY_BYTES if self.in_memory is None else self.in_memory
        inputs = self.read_all(sources, digest) if keep else Files(sources, self.read_item)
        return self.samples_of(inputs, table.labels[rows], chosen(table.names, rows), digest, **self.details(sources))

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        if not hasattr(self, "test_set") or not len(self.train_set):  # to predict, or a set to test on
            return
        tested = counts(self.test_set.labels, self.num_classes).tolist()
        absent = [name for name, number in zip(self.class_names, tested, strict=True) if not number]
        if absent:
            others = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
            what = f"no sample to test of class {', '.join(absent[:5])}{others}"
            self.remark(f"{what}, so no figure says how well it is known; add some")

    def refuse_or_tell(self, bad: dict[str, str]) -> None:
        """Say how many broken files are left out.

        Args:
            bad: What is wrong with each broken file, by path.

        Raises:
            DataError: If there is one, unless they are to be left out.
        """
        if bad and self.on_error == "raise":
            path, what = next(iter(bad.items()))
            others = f"; {counted(len(bad) - 1, 'more broken file')}" if len(bad) > 1 else ""
            raise DataError(
                f"{self.folder / path}: {what}{others}: python train.py check lists all, --data.on_error skip leaves "
                "them out"
            )
        if bad:
            say(f"{self.root}: {counted(len(bad), 'broken file')} left out; python train.py check lists all")


class FileDataModule(OnDisk):
    """A data set of files in a folder.

    Every file is opened once before training, in a scan whose result is kept (datamodules/own/scan.py).

    Args:
        test_fold: The fold to test on, where the data has folds.
        val_fold: The fold to validate on.
        common: Arguments of OnDisk.
    """

    noun: ClassVar[str] = "file"
    # Whether samples are held out by their position, as in published results, and not by the names of their files.
    splits_by_position: ClassVar[bool] = False

    def __init__(
        self, root: str, test_fold: str | int | None = None, val_fold: str | int | None = None, **common: Any
    ) -> None:
        super().__init__(root=root, **common)
        self.test_fold, self.val_fold = test_fold, val_fold

    # What a data set of files defines

    @abstractmethod
    def find(self) -> list[Item]:
        """The table of the data set: a row for every file that it should have, or for every part of one.

        Raises:
            DataError: If there is no table or no file.
        """

    @abstractmethod
    def examine(self, path: Path) -> Facts:
        """Read a whole file and return its facts.

        Raises:
            DataError: If it is broken.
        """

    def wrong_part(self, item: Item) -> str:
        """What is wrong with a row of a good file, and its remedy; empty if nothing is wrong."""
        return ""

    # The table

    @cached_property
    def items(self) -> list[Item]:
        return self.find()

    @cached_property
    def facts(self) -> dict[str, Facts]:
        """What the scan found, by path."""
        paths = dict.fromkeys(item.path for item in self.items)
        return scan(self.folder, paths, self.examine, type(self).examine.__qualname__)

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
        """What is wrong, and its remedy: for each broken file by path, for each wrong part of a good file by name."""
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
        """Its group, or its file if it has none."""
        items = [self._item_of[name] for name in names]
        return None if self.splits_by_position else [item.group or item.path for item in items]

    def content_of(self, sources: Sequence[Item]) -> bytes:
        return str([f"{self.facts[item.path]['sha256']} {item.start} {item.end}" for item in sources]).encode()
