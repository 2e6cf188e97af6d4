"""A user's own files: a folder of class folders, or a table of paths and labels."""

import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from datamodules.errors import DataError, counted, require, say
from datamodules.labels import Labels
from datamodules.own.column_names import OWN
from datamodules.own.copies import contradictions, merged, several, told
from datamodules.own.files import FileDataModule, Item
from datamodules.own.find import SPLITS, find_in_class_folders
from datamodules.own.scan import LeftOut, walk
from datamodules.own.table import read_table, refuse_other_tasks

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


class OwnFiles(FileDataModule):
    """Files in one folder for each class, or in such folders inside train, val and test, or listed in a table.

    A table (.csv, .tsv with tabs, .jsonl or .parquet) has the columns path and label, and optionally start and end (in
    seconds: one recording may hold many clips), fold, and split (train, val or test). Without the last two the first
    folder of each path is its split, if all are called train, val or test. A label is one class, and lists are refused,
    unless labels_separator is given. Then each file may have any number of classes, or none. With amounts, the numbers
    of these columns are the labels. Files are no labels: there is no segmentation.
    A metadata.csv, .jsonl or .parquet with the columns file_name and label, in root or in train, val and test, is read
    without being named.

    Args:
        root: Folder of the class folders, or of the files that the table names.
        table: Path of the table, or of a folder of tables; it may be relative to root.
        labels_separator: What stands between the classes of a label in the table, such as ";".
        amounts: The columns of the table whose numbers are to be predicted, such as age, in place of classes; for
            longseq's task Regression.
        class_names: As in OnDisk; with amounts, these are the names.
        groups: What files have in common that must not be in two splits, such as a patient, a recording or a site: the
            name of a column of the table; without a table a regular expression that finds it in each path below root,
            such as "patient[0-9]+". If it has a part in parentheses, that part is the group.
        common: Arguments of FileDataModule.
    """

    named_by: ClassVar[str | None] = "root"
    kind: ClassVar[str]  # what a file is, for messages

    def __init__(
        self,
        root: str,
        table: str | None = None,
        labels_separator: str | None = None,
        groups: str | None = None,
        amounts: list[str] | None = None,
        class_names: list[str] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(root=root, class_names=None if amounts else class_names, **common)
        self.table, self.labels_separator, self.groups, self.amounts = table, labels_separator, groups, amounts
        if amounts is not None:
            is_alone = table is not None and labels_separator is None
            require(is_alone, "amounts", "of a table, without labels_separator", amounts, "name columns of data.table")
            is_list = len(set(amounts)) == len(amounts) > 0 and not {*amounts} & {*OWN, groups}
            require(is_list, "amounts", "columns of their own, each once", amounts, "such as [age]")
            self._classes_given = amounts
        if groups is not None and table is None:
            refuse_wrong_pattern(groups, ", or a column of data.table")
        is_other = table is None or groups not in OWN
        require(is_other, "groups", "a column of its own", groups, "the rows of a file stay together without it")
        require(labels_separator != "", "labels_separator", "a text", labels_separator, "';' is usual")
        is_of_table = table is not None or labels_separator is None
        require(is_of_table, "table", "given with labels_separator", table, "a folder is of one class")

    def find(self) -> list[Item]:
        if self.table is None:
            left_out = LeftOut()
            items = self._of_metadata() or list(find_in_class_folders(self.folder, self.predict_suffixes, left_out))
            for line in left_out.lines():
                self.remark(line)
            if not items:
                suffixes = ", ".join(sorted(self.predict_suffixes))
                raise DataError(f"{self.root}: holds no folder of {self.kind}s for each class; it may hold {suffixes}")
            return items if self.groups is None else list(self._grouped(items, self.groups))
        path = Path(self.table).expanduser()
        path = path if path.exists() else self.folder / path
        options = {"folder": self.folder, "sounds": self._sounds, "amounts": self.amounts or ()}
        items = read_table(path, self.labels_separator, self.groups, **options)
        if self.amounts is None:
            refuse_other_tasks(path, items, self.folder, self._classes_given or (), self.labels_separator)
        parts = [item.line for item in items if self.kind == "image" and (item.start or item.end is not None)]
        if parts:
            raise DataError(f"{path}: line {parts[0]}: start and end are of sounds; leave them out")
        self._tell_of_others(items, self.table)
        return items if is_divided(items) else divided_by_folders(items)

    def _classes_of(self, item: Item) -> list[str]:
        return self.amounts or super()._classes_of(item)  # every file has every amount

    def _labels_of(self, items: Sequence[Item]) -> Labels:
        if self.amounts is None:
            return super()._labels_of(items)
        amounts = [[float(number) for number in item.label.split(";")] for item in items]
        return torch.tensor(amounts, dtype=torch.float32).reshape(-1, len(self.amounts))

    @property
    def _sounds(self) -> frozenset[str]:
        """The suffixes of recordings, which tables may say times of; empty for images."""
        return self.predict_suffixes if self.kind == "sound" else frozenset()

    def _tell_of_others(self, items: list[Item], table: str) -> None:
        """Say how many files of the folder have no row."""
        named = {os.path.realpath(self.folder / item.path) for item in items}
        left_out = LeftOut()
        found = walk(self.folder, self.predict_suffixes, left_out)
        others = [path for path in found if os.path.realpath(path) not in named]
        left_out.kinds.clear()  # the table says which files are samples
        for line in left_out.lines():
            self.remark(line)
        if others:
            count = counted(len(others), self.kind)
            say(f"{self.root}: {count} without a row in {table}, such as {others[0].name}")

    def _of_metadata(self) -> list[Item]:
        """The rows of metadata.csv, .jsonl or .parquet in the folder, or in its train, val and test, as Hugging Face's
        imagefolder and audiofolder have them. None if there is no such table with labels.

        Raises:
            DataError: If train, val or test holds files but none with a row: another split would be drawn in its place;
                or if a file has rows in two tables.
        """
        parts = [path for path in sorted(self.folder.iterdir()) if path.is_dir() and path.name.lower() in SPLITS]
        items, has_own = [], False
        table_of: dict[str, Path] = {}
        for folder in (self.folder, *parts):
            paths = [folder / name for name in METADATA if (folder / name).is_file()]
            if len(paths) > 1:
                raise DataError(f"{folder}: holds {paths[0].name} and {paths[1].name}; keep one")
            for path in paths:
                split = "" if folder == self.folder else SPLITS[folder.name.lower()]
                rows = read_table(path, is_named=False, folder=folder, sounds=self._sounds)
                refuse_other_tasks(path, rows, folder, self._classes_given or ())
                has_own = has_own or is_divided(rows)
                prefix = folder.relative_to(self.folder)
                for row in rows:
                    name = str(prefix / row.path)
                    if (other := table_of.setdefault(name, path)) != path:
                        raise DataError(f"{path}: line {row.line}: {name} has a row in {other} too; keep one")
                    items.append(replace(row, path=name, split=row.split or split))
        first_parts = {item.path.split("/")[0] for item in items}
        for folder in parts:
            if items and folder.name not in first_parts and any(walk(folder, self.predict_suffixes)):
                what = f"holds {self.kind}s, but no row of a {METADATA[0]} gives one of them a label"
                raise DataError(f"{folder}: {what}; add the rows, or move the folder out")
        if items:
            self._tell_of_others(items, "a metadata file")
        return items if has_own else divided_by_folders(items)

    # Copies

    @cached_property
    def _copies(self) -> list[list[str]]:
        """The paths of each content that several files have."""
        return list(
            several({path: found["sha256"] for path, found in self.facts.items() if "error" not in found}).values()
        )

    def bad_files(self) -> dict[str, str]:
        """As FileDataModule has it, and files, or parts of files, with the same content and other classes: nobody but
        the user knows which of them is right."""
        bad, copied = super().bad_files(), {path for paths in self._copies for path in paths}
        places = {
            item.name: ((self.facts[item.path]["sha256"], item.start, item.end), frozenset(self._classes_of(item)))
            for item in self.items
            if item.path in copied
        }
        return contradictions(places) | bad

    def whole(self, names: Sequence[str]) -> list[str] | None:
        """The same for copies, so that no model is tested on a copy of what it was trained on."""
        whole = super().whole(names)
        return whole and merged(whole, [self.facts[self._item_of[name].path]["sha256"] for name in names])

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        if not hasattr(self, "test_set"):  # to predict
            return
        spellings: dict[str, str] = {}
        for name in self.class_names:
            plain = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
            if (other := spellings.setdefault(plain, name)) != name:
                self.remark(
                    f"classes {other} and {name} differ in capitals or blanks alone; if they are one, rename one"
                )
        split_of = {
            self._item_of[name].path: split for split, samples in self.splits().items() for name in samples.names
        }
        used = [[path for path in paths if path in split_of] for paths in self._copies]
        for line in told([paths for paths in used if len(paths) > 1], split_of):
            self.remark(line)

    def _grouped(self, items: list[Item], groups: str) -> Iterator[Item]:
        for item in items:
            yield replace(item, group=group_in(groups, item.path))

    def located(self, name: str) -> dict[str, Any]:
        if self.groups is None:
            return super().located(name)
        return {**super().located(name), self.groups if self.table else "group": self._item_of[name].group}


def is_divided(items: Sequence[Item]) -> bool:
    """Whether any row has a split or a fold."""
    return any(item.split or item.fold for item in items)


def divided_by_folders(items: list[Item]) -> list[Item]:
    """The rows, each with the split that the first folder of its path names.

    If a path begins with no such folder, or none begins with train, the rows stay as they are.
    """
    first_folders = [item.path.split("/")[0] if "/" in item.path else "" for item in items]
    splits = [SPLITS.get(name.lower(), "") for name in first_folders]
    if "" in splits or "train" not in splits:
        return items
    return [replace(item, split=split) for item, split in zip(items, splits, strict=True)]


def refuse_wrong_pattern(groups: str, or_what: str = "") -> None:
    """Check a regular expression.

    Raises:
        ArgumentError: If it is none.
    """
    try:
        re.compile(groups)
    except re.error as error:
        require(False, "groups", f"a regular expression ({error}){or_what}", groups, "'patient[0-9]+' is one")


def group_in(groups: str, path: str) -> str:
    """The group that a regular expression finds in a path: its first part in parentheses, or all of it.

    Raises:
        DataError: If it finds none.
    """
    found = re.search(groups, path)
    name = found and found[1 if found.re.groups else 0]
    if not name:
        raise DataError(f"data.groups: {groups} finds nothing in {path}; it must match every path")
    return name
