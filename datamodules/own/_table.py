"""A user's table of files and their labels."""

import os
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from datamodules.errors import DataError, counted, say
from datamodules.own._one_table import rows_of
from datamodules.own._recordings import Recordings
from datamodules.own._spelling import with_one_spelling
from datamodules.own.files import Item
from datamodules.own.scan import walk

SUFFIXES = frozenset({".csv", ".jsonl", ".parquet", ".tsv", ".txt"})


def read_table(
    path: Path,
    separator: str | None = None,
    groups: str | None = None,
    is_named: bool = True,
    folder: Path | None = None,
    sounds: frozenset[str] = frozenset(),
    amounts: Sequence[str] = (),
) -> list[Item]:
    """The rows of a table with the columns path, label and optionally start, end, fold and split.

    The columns may have the names of other programs (datamodules/own/_column_names.py). A table of sounds without a
    column of paths belongs to the recording with its name; without rows, that recording has no events. A folder of such
    tables is read as one table.

    Raven's begin and end times count from the start of the first recording, its file offset from the start of the
    event's own recording.

    Args:
        path: The table: .csv, .tsv, .txt (with tabs or commas, or Audacity's labels), .jsonl or .parquet; or a folder.
        separator: The text between the classes of a label; a list is possible too. Several rows of a clip then become
            one row with all their classes, and a label may be empty. Without it, a label is one class.
        groups: The column with each row's group, which is never in two splits.
        is_named: Whether the user gave the table's name. Otherwise the table may be about something else, so it has no
            rows if it lacks a column of labels or of paths.
        folder: The folder of the files; if absent, paths do not change.
        sounds: The suffixes of recordings; empty if the files are not sounds, and have no times.
        amounts: The columns whose numbers are the labels, instead of classes; a label has ";" between them.

    Raises:
        DataError: If the table cannot be read, or a row is invalid.
    """
    tables = sorted(walk(path, SUFFIXES)) if path.is_dir() else [path]
    if not tables:
        raise DataError(f"{path}: holds no table; give a folder with {', '.join(sorted(SUFFIXES))}")
    recordings = Recordings(folder, sounds, path) if folder is not None and sounds else None
    items, without_row = [], []
    named: dict[str, tuple[str, Path]] = {}
    for table in tables:
        rows = rows_of(table, separator, groups, is_named, folder, recordings, amounts, named)
        if rows is None:
            without_row.append(table)
        else:
            items += rows
    if recordings is not None and without_row and (items or separator is not None):
        if groups is not None:
            raise DataError(f"{without_row[0]}: holds no row, so no {groups}; add a row for its recording")
        what = "such a recording has no events"
        if separator is None:
            what = "left out, because without data.labels_separator a recording has a class"
        name = without_row[0].name
        say(f"{path}: {counted(len(without_row), 'table')} without a row, such as {name}: {what}")
        if separator is not None:
            heard = {item.path for item in items}
            silent = dict.fromkeys(map(recordings.of, without_row))
            items += [Item(name, "") for name in silent if name is not None and name not in heard]
    if not items and is_named:
        raise DataError(f"{path}: holds no row; give each clip a row")
    if folder is not None:
        items = with_one_spelling(folder, items)
    items = _together(items, separator) if separator is not None else _once(path, items)
    _refuse_contradictions(path, items, groups)
    return items


def _refuse_contradictions(path: Path, items: Sequence[Item], groups: str | None) -> None:
    """Check that the rows of a clip have one label, and the rows of a file one split, fold and group.

    Raises:
        DataError: If they do not.
    """
    splits: dict[str, str] = {}
    folds: dict[str, str] = {}
    labels: dict[str, str] = {}
    group_of: dict[str, str] = {}
    for item in items:
        group = group_of.setdefault(item.path, item.group)
        if group != item.group:
            raise DataError(f"{path}: {item.path} has {groups} {group} and {item.group}; give all rows of a file one")
        label = labels.setdefault(item.name, item.label)
        if label != item.label:
            what = f"line {item.line}: {item.name} is {item.label} here and {label} before"
            raise DataError(f"{path}: {what}; choose one, or give data.labels_separator for several classes")
        for what, of_path, place in (("split", splits, item.split), ("fold", folds, item.fold and f"fold {item.fold}")):
            first = of_path.setdefault(item.path, place)
            if first != place:
                both = f"{first or f'no {what}'} and {place or f'no {what}'}"
                raise DataError(f"{path}: {item.path} is in {both}; give all rows of a file one {what}")


# A bar, a semicolon, or a comma directly before a word makes a list; "Rock, Paper" and "1,000 Hz" are class names.
_LIST = re.compile(r"[;|]|,(?=[^\s\d])|^\[.*\]$")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def refuse_other_tasks(
    path: Path, items: Sequence[Item], folder: Path, known: Collection[str] = (), separator: str | None = None
) -> None:
    """Check that each label of a table is a class, not a list of classes, an amount or a file.

    A label is a list of classes if it looks like a list, or if each of its parts between commas is in another label
    too. If the separator occurs in any label, the text between separators is always a class name.

    Args:
        path: The table.
        items: Its rows.
        folder: The folder for labels that are files.
        known: Names that are always classes.
        separator: The text between the classes of a label; None if a label is one class.

    Raises:
        DataError: If a label is not a class; the message names the line.
    """
    is_used = separator is not None and any(separator in item.label for item in items)
    items = [replace(item, label=name) for item in items for name in item.classes(separator) if name not in known]
    parts = {item.label: {part.strip(" []'\"") for part in re.split("[,;|]", item.label)} - {""} for item in items}
    occurrences = Counter(part for label in parts for part in parts[label])
    are_numbers = all(_NUMBER.fullmatch(label) for label in parts)
    files = {label for label in parts if "." in label and os.path.isfile(folder / label)}
    for item in items:
        if item.label in files:
            raise DataError(
                f"{path}: line {item.line}: label {item.label} is a file, and there is no segmentation; give each file "
                "the name of a class, or put it into data.class_names if it is one"
            )
        is_in_others = all(occurrences[part] > 1 for part in parts[item.label])
        is_list = len(parts[item.label]) > 1 and (is_in_others or _LIST.search(item.label))
        if is_list and not is_used:
            remedy = "and a clip has one class; give --data.labels_separator and --model.task MultiLabel"
            if separator is not None:
                remedy = f"and no label has {separator!r} in it; give another --data.labels_separator"
            what = f"label {item.label!r} is a list, {remedy}, or put it into data.class_names if it is a name"
            raise DataError(f"{path}: line {item.line}: {what}")
        if are_numbers and not float(item.label).is_integer():
            raise DataError(
                f"{path}: line {item.line}: label {item.label} is an amount; name its column with --data.amounts "
                "for --model.task Regression, or put it into data.class_names if it is a class"
            )


def _together(items: Sequence[Item], separator: str) -> list[Item]:
    """One row for all rows of a clip, with the classes of all of them."""
    clips: dict[tuple[str, ...], Item] = {}
    for item in items:
        key = (item.name, item.split, item.fold, item.group)
        first = clips.setdefault(key, item)
        if first is not item:
            names = dict.fromkeys((*first.classes(separator), *item.classes(separator)))
            clips[key] = replace(first, label=separator.join(names))
    return list(clips.values())


def _once(path: Path, items: Sequence[Item]) -> list[Item]:
    """The rows without repetitions: Raven may write a row for each view of a selection."""
    rows: dict[Item, Item] = {}
    for item in items:
        rows.setdefault(replace(item, line=0), item)
    if len(rows) < len(items):
        say(f"{path}: {counted(len(items) - len(rows), 'row')} left out, equal to others before")
    return list(rows.values())
