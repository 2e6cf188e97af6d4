"""A user's table of files and their labels."""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from datamodules.errors import DataError, counted, say
from datamodules.own.files import Item
from datamodules.own.one_table import rows_of
from datamodules.own.recordings import Recordings
from datamodules.own.scan import walk
from datamodules.own.spelling import with_one_spelling

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
    """The rows of a table of path, label and optionally start, end, fold and split, which may have the names that other
    programs give them (datamodules/own/column_names.py).

    A table of sounds without a column of paths is of the recording that has its name; without a row, nothing is heard
    there. A folder of such tables is read as one table.

    Raven counts begin and end times from the start of the first recording, and the file offset from that of the event's
    own.

    Args:
        path: The table: .csv, .tsv, .txt (with tabs or commas, or labels of Audacity), .jsonl or .parquet; or a folder.
        separator: What stands between the classes of a label, which may also be a list. A clip may then have several
            rows, which become one row of all their classes, and a label may be empty. Without it a label is one class.
        groups: The column that names each row's group, which is never in two splits.
        is_named: Whether the user gave its name. Otherwise it has no rows if it lacks a column of labels or of paths,
            because it may be about something else.
        folder: Where the files are, also those that tables of other programs name; if absent, the paths stay as they
            are.
        sounds: The suffixes of recordings; empty if the files are none, and have no times.
        amounts: The columns whose numbers are the labels, in place of classes; an item's label has ";" between them.

    Raises:
        DataError: If the table cannot be read, or a row is invalid.
    """
    tables = sorted(walk(path, SUFFIXES)) if path.is_dir() else [path]
    if not tables:
        raise DataError(f"{path}: holds no table; give a folder with {', '.join(sorted(SUFFIXES))}")
    recordings = Recordings(folder, sounds, path) if folder is not None and sounds else None
    items, without_row = [], []
    for table in tables:
        rows = rows_of(table, separator, groups, is_named, folder, recordings, amounts)
        if rows is None:
            without_row.append(table)
        else:
            items += rows
    if recordings is not None and without_row and (items or separator is not None):
        if groups is not None:
            raise DataError(f"{without_row[0]}: holds no row, so no {groups}; add a row for its recording")
        what = "nothing is heard in such a recording"
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
    if not amounts:
        _tell_of_alike(path, items, separator)
    return items


def _refuse_contradictions(path: Path, items: Sequence[Item], groups: str | None) -> None:
    """Check that rows of one clip have one label, and rows of one file one split, fold and group.

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


def _tell_of_alike(path: Path, items: Sequence[Item], separator: str | None) -> None:
    """Say which classes have names that look the same but for capitals."""
    first: dict[str, str] = {}
    names = dict.fromkeys(name for item in items for name in item.classes(separator))
    both = [(name, first.setdefault(unicodedata.normalize("NFC", name).casefold(), name)) for name in names]
    alike = [f"{other} and {name}" for name, other in both if name != other]
    if alike:
        more = f", and {len(alike) - 1} more" if len(alike) > 1 else ""
        say(f"{path}: {alike[0]}{more} differ in capitals alone, and are classes of their own")


# A bar, a semicolon, or a comma right before a word makes a list; "Rock, Paper" and "1,000 Hz" are names of classes.
_LIST = re.compile(r"[;|]|,(?=[^\s\d])|^\[.*\]$")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def refuse_other_tasks(
    path: Path, items: Sequence[Item], folder: Path, known: Collection[str] = (), separator: str | None = None
) -> None:
    """Check that each label of a table names a class, not several classes, an amount or a file.

    A label names several classes if it looks like a list, or if each of its parts between commas is in another label
    too; where the separator is in some label, what is between separators is a name, whatever it looks like.

    Args:
        path: The table.
        items: Its rows.
        folder: Where a label could be a file.
        known: Names that are classes, whatever they look like.
        separator: What stands between the classes of a label; None where a label is one class.

    Raises:
        DataError: If a label does not; the message names the line.
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
    """One row for all rows of the same clip, with the classes of all."""
    clips: dict[tuple[str, ...], Item] = {}
    for item in items:
        key = (item.name, item.split, item.fold, item.group)
        first = clips.setdefault(key, item)
        if first is not item:
            names = dict.fromkeys((*first.classes(separator), *item.classes(separator)))
            clips[key] = replace(first, label=separator.join(names))
    return list(clips.values())


def _once(path: Path, items: Sequence[Item]) -> list[Item]:
    """The first of equal rows: Raven may write a row for each view of a selection."""
    rows: dict[Item, Item] = {}
    for item in items:
        rows.setdefault(replace(item, line=0), item)
    if len(rows) < len(items):
        say(f"{path}: {counted(len(items) - len(rows), 'row')} left out, equal to others before")
    return list(rows.values())
