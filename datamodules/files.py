"""The base of data sets of many files: their table, their splits, and what happens to broken files."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from datamodules.base import DataModule
from datamodules.errors import DataError, counted, require, say
from datamodules.hold_out import Split, hold_out, hold_out_files
from datamodules.labels import Labels, counts, labels_of
from datamodules.samples import Files, Samples
from datamodules.scan import Facts, in_threads, scan

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

    Every file is opened once before training, in a scan whose result is kept (datamodules/scan.py).

    Args:
        test_fold: The fold to test on, where the data has folds.
        val_fold: The fold to validate on.
        common: Arguments of OnDisk.
    """

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

    @abstractmethod
    def read_item(self, item: Item) -> Tensor:
        """The input of a row."""

    @abstractmethod
    def size_of(self, item: Item) -> int:
        """How many bytes the input of a row takes in memory."""

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

    @property
    def class_names(self) -> list[str]:  # type: ignore[override]
        if self._classes_given is None:
            self._classes_given = sorted({name for item in self.items for name in self._classes_of(item)})
            if len(self._classes_given) < 2:
                only = ", ".join(self._classes_given) or "none"
                raise DataError(f"{self.root}: one class only ({only}); give two or more")
        return self._classes_given

    def _classes_of(self, item: Item) -> list[str]:
        return item.classes(self.labels_separator)

    def _labels_of(self, items: Sequence[Item]) -> Labels:
        number = {name: label for label, name in enumerate(self.class_names)}
        classes = [[number[name] for name in self._classes_of(item)] for item in items]
        return labels_of(classes, len(number), self.labels_separator is not None)

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

    # Splits

    def load(self) -> tuple[Samples, Samples | None, Samples]:
        items = self._good_items()
        self._refuse_contradictions(items)
        if items and all(item.split == "test" for item in items):  # a set to test on, with no training of its own
            test = self._samples(items)
            nothing = test.subset(torch.zeros(0, dtype=torch.int64))
            return nothing, nothing, test
        is_test, is_val = self._part(items, "test", self.test_fold), self._part(items, "val", self.val_fold)
        if is_test is None:
            is_test = self._drawn(items, is_val, partial(self._hold_out, fraction=self.test_fraction))
        return self._divided(items, is_test, is_val)

    def load_fold(self) -> tuple[Samples, Samples | None, Samples]:
        """The splits of a fold. Folds that the data has itself are taken in the order of their names, and the fold
        before the test is the validation. Without a test split of its own, all files are divided into folds."""
        assert self.folds is not None and self.fold is not None
        items = self._good_items()
        self._refuse_contradictions(items)
        own = sorted({item.fold for item in items if item.fold}, key=lambda name: (len(name), name))
        if own:
            if len(own) != self.folds:
                what = f"{self.root} has {len(own)} folds of its own ({', '.join(own)}), got {self.folds}"
                raise DataError(f"data.folds: {what}; give {len(own)}, or leave out the column fold")
            self._refuse_divided_groups(items, [f"fold {item.fold}" for item in items])
            is_test = self._part(items, "test", own[self.fold - 1])
            assert is_test is not None
            return self._divided(items, is_test, self._part(items, "val", own[self.fold - 2]) if len(own) > 2 else None)
        is_test, is_val = self._part(items, "test", self.test_fold), self._part(items, "val", self.val_fold)
        in_fold = self._drawn(items, is_test, self.hold_out_fold)
        return self._divided(items, in_fold, is_val) if is_test is None else self._divided(items, is_test, in_fold)

    def _drawn(
        self, items: Sequence[Item], taken: Tensor | None, draw: Callable[[Labels, Sequence[str]], Split]
    ) -> Tensor:
        """Which rows are held out by a draw from those that no other split has taken."""
        free = torch.arange(len(items)) if taken is None else (~taken).nonzero()[:, 0]
        rest = [items[index] for index in free.tolist()]
        drawn = torch.zeros(len(items), dtype=torch.bool)
        drawn[free[draw(self._labels_of(rest), self._whole(rest))[1]]] = True
        return drawn

    def _divided(
        self, items: Sequence[Item], is_test: Tensor, is_val: Tensor | None
    ) -> tuple[Samples, Samples | None, Samples]:
        """The splits of these rows; a row of the test is in no other split.

        Raises:
            DataError: If a split has no row, if the training lacks a class, or if a group is in two splits.
        """
        is_train = ~is_test if is_val is None else ~is_test & ~is_val
        train = [item for item, chosen in zip(items, is_train.tolist(), strict=True) if chosen]
        present = {name for item in train for name in self._classes_of(item)}
        for name in self.class_names:
            if name not in present:
                raise DataError(f"{self.root}: no readable file of class {name} to train on; add some, or take it out")
        in_val = torch.zeros_like(is_test) if is_val is None else is_val
        both = zip(is_test.tolist(), in_val.tolist(), strict=True)
        self._refuse_divided_groups(items, ["test" if test else "val" if val else "train" for test, val in both])
        test = [item for item, chosen in zip(items, is_test.tolist(), strict=True) if chosen]
        if not test:
            raise DataError(f"{self.root}: no readable file to test on; add some, or leave the test split out")
        if is_val is None:
            return self._samples(train), None, self._samples(test)
        val = [item for item, chosen in zip(items, (is_val & ~is_test).tolist(), strict=True) if chosen]
        if not val:
            raise DataError(f"{self.root}: no readable file to validate on; add some, or leave the split out")
        return self._samples(train), self._samples(val), self._samples(test)

    def _refuse_divided_groups(self, items: Sequence[Item], places: Sequence[str]) -> None:
        first: dict[str, str] = {}
        for item, place in zip(items, places, strict=True):
            if item.group and first.setdefault(item.group, place) != place:
                what = f"group {item.group} is in {first[item.group]} and in {place} ({item.path})"
                raise DataError(f"{self.root}: {what}; give all files of a group one split or fold")

    def _refuse_contradictions(self, items: Sequence[Item]) -> None:
        given = [name for name in ("test_fold", "val_fold", "folds") if getattr(self, name) is not None]
        if given and any(item.split for item in items) and any(item.fold for item in items):
            what = f"the table has both split and fold; choose: leave out its column split, or data.{given[0]}"
            raise DataError(f"{self.root}: {what}")
        if self.folds is None and len(given) == 2 and str(self.test_fold) == str(self.val_fold):
            raise DataError(f"data.val_fold: {self.val_fold} is the fold of the test too; choose another, or null")

    def _whole(self, items: Sequence[Item]) -> list[str]:
        """What of each row must not be divided: its group, or its file if it has none."""
        return [item.group or item.path for item in items]

    def _hold_out(self, labels: Tensor, files: Sequence[str], fraction: float) -> Split:
        if self.splits_by_position:
            return hold_out(labels, fraction, self.seed)
        return hold_out_files(labels, files, fraction, self.seed)

    def split_validation(self, train: Samples) -> Split:
        return self._hold_out(
            train.labels, self._whole([self._item_of[name] for name in train.names]), self.val_fraction
        )

    def _part(self, items: Sequence[Item], split: str, fold: str | int | None) -> Tensor | None:
        """Which rows belong to a split that the data or a fold decides; None if neither decides it."""
        if fold is not None:
            chosen = [item.fold == str(fold) for item in items]
            if not any(chosen):
                folds = ", ".join(sorted({item.fold for item in items if item.fold})) or "none"
                raise DataError(f"data.{split}_fold: no fold {fold} in {self.root}; it has {folds}")
        else:
            chosen = [item.split == split for item in items]
        return torch.tensor(chosen) if any(chosen) else None

    def _samples(self, items: list[Item]) -> Samples:
        labels = self._labels_of(items)
        digests = [f"{self.facts[item.path]['sha256']} {item.start} {item.end}" for item in items]
        settings = self.settings_of_reading()
        digest = hashlib.sha256(f"{settings} {digests}".encode()).hexdigest()
        keep = self.in_memory
        if keep is None:
            keep = sum(map(self.size_of, items)) <= IN_MEMORY_BYTES
        inputs = self.read_all(items, digest) if keep else Files(items, self.read_item)
        names = [item.name for item in items]
        return self.samples_of(inputs, labels, names, digest, **self.details(items))

    def read_all(self, items: list[Item], digest: str) -> Sequence[Tensor] | Tensor:
        """The inputs of rows that are kept in memory. The digest stands for the files' content and how it is read."""
        return in_threads(self.read_item, items, f"reading {self.root}")

    def details(self, items: Sequence[Item]) -> dict[str, Any]:
        """Further arguments of samples_of for these rows, by name."""
        return {}
