"""The user's own files: a folder of class folders, or a table of paths and labels."""

import os
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from datamodules.errors import DataError, counted, require, say
from datamodules.labels import Labels
from datamodules.own._column_names import OWN
from datamodules.own._copies import contradictions, lines_on, merged
from datamodules.own._table import read_table, refuse_other_tasks
from datamodules.own.files import FileDataModule, Item
from datamodules.own.find import SPLITS, find_in_class_folders
from datamodules.own.scan import LeftOut, walk

_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


class OwnFiles(FileDataModule):
    """Files in one folder for each class, or in such folders inside train, val and test, or listed in a table.

    A table (.csv, .tsv with tabs, .jsonl or .parquet) has the columns path and label, and optionally start and end (in
    seconds: a recording may have many clips), fold, and split (train, val or test). Without fold and split, the first
    folder of each path is its split, if all these folders are called train, val or test. A label is one class, and
    lists are refused, unless labels_separator is given: then a file may have any number of classes, or none. With
    amounts, the numbers in these columns are the labels. A label cannot be a file: there is no segmentation.
    A metadata.csv, .jsonl or .parquet with the columns file_name and label, in root or in train, val and test, is read
    even if table is absent.

    Args:
        root: Folder of the class folders, or of the files in the table.
        table: Path of the table, or of a folder of tables; it may be relative to root.
        labels_separator: The text between the classes of a label in the table, such as ";".
        amounts: The columns of the table with the numbers to predict, such as age, instead of classes; for longseq's
            task Regression.
        class_names: See OnDisk; with amounts, these are the names.
        groups: Something that files share and that must not be in two splits, such as a patient, a recording or a site.
            With a table it is the name of a column. Without a table it is a regular expression that finds the group in
            each path below root, such as "patient[0-9]+"; a part in parentheses is the group.
        common: Arguments of FileDataModule.
    """

    named_by: ClassVar[str | None] = "root"
    companions: ClassVar[frozenset[str]] = frozenset()  # suffixes of files that belong to those of the samples

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
            for suffix in self.companions:
                left_out.kinds.pop(suffix, None)
            for line in left_out.lines():
                self.remark(line)
            if not items:
                suffixes = ", ".join(sorted(self.predict_suffixes))
                raise DataError(f"{self.root}: holds no folder of {self.kind}s for each class; it may hold {suffixes}")
            pattern = self.groups
            if pattern is None:
                return items
            return [replace(item, group=group_in(pattern, item.path)) for item in items]
        path = Path(self.table).expanduser()
        path = path if path.exists() else self.folder / path
        options = {"folder": self.folder, "sounds": self._sounds, "amounts": self.amounts or ()}
        items = read_table(path, self.labels_separator, self.groups, **options)
        if self.amounts is None:
            refuse_other_tasks(path, items, self.folder, self._classes_given or (), self.labels_separator)
        parts = [item.line for item in items if not self.has_times and (item.start or item.end is not None)]
        if parts:
            raise DataError(f"{path}: line {parts[0]}: start and end are of sounds; leave them out")
        self._tell_of_others(items, self.table)
        return items if _is_divided(items) else _divided_by_folders(items)

    def _classes_of(self, item: Item) -> list[str]:
        return self.amounts or super()._classes_of(item)  # every file has every amount

    def _labels_of(self, items: Sequence[Item]) -> Labels:
        if self.amounts is None:
            return super()._labels_of(items)
        amounts = [[float(number) for number in item.label.split(";")] for item in items]
        return torch.tensor(amounts, dtype=torch.float32).reshape(-1, len(self.amounts))

    @property
    def _sounds(self) -> frozenset[str]:
        """The suffixes of recordings, for which tables may give times; empty for images."""
        return self.predict_suffixes if self.has_times else frozenset()

    def _tell_of_others(self, items: list[Item], table: str) -> None:
        """Tell the user how many files of the folder have no row."""
        named = {os.path.realpath(self.folder / item.path) for item in items}
        named |= {os.path.realpath(folder / table) for folder in (self.folder, Path())}  # a table may be a .csv
        left_out = LeftOut()
        files = walk(self.folder, self.predict_suffixes, left_out)
        others = [path for path in files if os.path.realpath(path) not in named]
        left_out.kinds.clear()  # the table decides which files are samples
        for line in left_out.lines():
            self.remark(line)
        if others:
            count = counted(len(others), self.kind)
            say(f"{self.root}: {count} without a row in {table}, such as {others[0].name}")

    def _of_metadata(self) -> list[Item]:
        """The rows of metadata.csv, .jsonl or .parquet in the folder, or in its train, val and test.

        These are the tables of Hugging Face's imagefolder and audiofolder. Without a table with labels there is no row.

        Raises:
            DataError: If a file has rows in two tables; or if train, val or test has files but none with a row, because
                another split would then be drawn instead.
        """
        parts = [path for path in sorted(self.folder.iterdir()) if path.is_dir() and path.name.lower() in SPLITS]
        items, has_own = [], False
        table_of: dict[str, Path] = {}
        for folder in (self.folder, *parts):
            paths = [folder / name for name in _METADATA if (folder / name).is_file()]
            if len(paths) > 1:
                raise DataError(f"{folder}: holds {paths[0].name} and {paths[1].name}; keep one")
            for path in paths:
                split = "" if folder == self.folder else SPLITS[folder.name.lower()]
                rows = read_table(path, is_named=False, folder=folder, sounds=self._sounds)
                refuse_other_tasks(path, rows, folder, self._classes_given or ())
                has_own = has_own or _is_divided(rows)
                prefix = folder.relative_to(self.folder)
                for row in rows:
                    name = str(prefix / row.path)
                    if (other := table_of.setdefault(name, path)) != path:
                        raise DataError(f"{path}: line {row.line}: {name} has a row in {other} too; keep one")
                    items.append(replace(row, path=name, split=row.split or split))
        first_parts = {item.path.split("/")[0] for item in items}
        for folder in parts:
            if items and folder.name not in first_parts and any(walk(folder, self.predict_suffixes)):
                what = f"holds {self.kind}s, but no row of a {_METADATA[0]} gives one of them a label"
                raise DataError(f"{folder}: {what}; add the rows, or move the folder out")
        if items:
            self._tell_of_others(items, "a metadata file")
        return items if has_own else _divided_by_folders(items)

    # Copies

    @cached_property
    def _copies(self) -> list[list[str]]:
        """Lists of paths with the same content."""
        paths: dict[str, list[str]] = {}
        for path, facts in self.facts.items():
            if "error" not in facts:
                paths.setdefault(facts["sha256"], []).append(path)
        return [same for same in paths.values() if len(same) > 1]

    def bad_files(self) -> dict[str, str]:
        """Also the errors of files, or parts of files, with the same content and different classes."""
        bad, copied = super().bad_files(), {path for paths in self._copies for path in paths}
        places = {
            item.name: ((self.facts[item.path]["sha256"], item.start, item.end), frozenset(self._classes_of(item)))
            for item in self.items
            if item.path in copied
        }
        return contradictions(places) | bad

    def whole(self, names: Sequence[str]) -> list[str] | None:
        """Copies are in the same group, so that no model is tested on a copy of a training sample."""
        whole = super().whole(names)
        return whole and merged(whole, [self.facts[self._item_of[name].path]["sha256"] for name in names])

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        if not hasattr(self, "test_set"):  # for predictions
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
        for line in lines_on([paths for paths in used if len(paths) > 1], split_of):
            self.remark(line)

    def group_of(self, path: str) -> str:
        """The group that ``groups`` finds in a path below root, of any file; empty if it finds none, or is a column."""
        if self.groups is None or self.table is not None:
            return ""
        try:
            return group_in(self.groups, path)
        except DataError:
            return ""

    def located(self, name: str) -> dict[str, Any]:
        if self.groups is None:
            return super().located(name)
        return {**super().located(name), self.groups if self.table else "group": self._item_of[name].group}


def _is_divided(items: Sequence[Item]) -> bool:
    """Whether any row has a split or a fold."""
    return any(item.split or item.fold for item in items)


def _divided_by_folders(items: list[Item]) -> list[Item]:
    """The rows with the split that the first folder of their paths names.

    The rows do not change if a path does not begin with such a folder, or if no path begins with train.
    """
    first_folders = [item.path.split("/")[0] if "/" in item.path else "" for item in items]
    splits = [SPLITS.get(name.lower(), "") for name in first_folders]
    if "" in splits or "train" not in splits:
        return items
    return [replace(item, split=split) for item, split in zip(items, splits, strict=True)]


def refuse_wrong_pattern(groups: str, or_what: str = "") -> None:
    """Check a regular expression for groups.

    Raises:
        ArgumentError: If it is invalid.
    """
    try:
        re.compile(groups)
    except re.error as error:
        require(False, "groups", f"a regular expression ({error}){or_what}", groups, "'patient[0-9]+' is one")


def group_in(groups: str, path: str) -> str:
    """The group that a regular expression finds in a path: its first part in parentheses, or else the whole match.

    Raises:
        DataError: If it finds no group.
    """
    match = re.search(groups, path)
    name = match and match[1 if match.re.groups else 0]
    if not name:
        raise DataError(f"data.groups: {groups} finds nothing in {path}; it must match every path")
    return name
