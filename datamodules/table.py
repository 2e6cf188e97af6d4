"""A user's table of files and their labels."""

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from datamodules.errors import DataError, counted, say
from datamodules.files import Item
from datamodules.find import SPLITS
from datamodules.raven import BEGIN_PATH, BEGIN_TIME, BIRDNETS_PATH, below
from datamodules.rows import read_rows
from datamodules.spelling import with_one_spelling
from datamodules.windows import starts_of_windows

COLUMNS = ("path", "label", "start", "end", "fold", "split")  # other columns are ignored
# The same in tables of Hugging Face, Raven, BirdNET and our own predict --events; the first that is there counts.
OTHER_NAMES = {
    "path": ("file_name", BEGIN_PATH, "Begin File", BIRDNETS_PATH),  # files of several sites may have one name
    "label": ("class", "Species", "Common name", "Common Name", "Annotation"),
    "start": ("File Offset (s)", BEGIN_TIME, "Start (s)"),
    "end": ("End Time (s)", "End (s)"),
}


def read_table(
    path: Path,
    separator: str | None = None,
    groups: str | None = None,
    is_named: bool = True,
    folder: Path | None = None,
) -> list[Item]:
    """The rows of a table of path, label and optionally start, end, fold and split, which may have other names too.

    Raven counts begin and end times from the start of the first recording, and the file offset from that of the event's
    own.

    Args:
        path: The table: .csv, .tsv, .txt (with tabs or commas), .jsonl or .parquet.
        separator: What stands between the classes of a label, which may also be a list. A clip may then have several
            rows, which become one row of all their classes, and a label may be empty. Without it a label is one class.
        groups: The column that names each row's group, which is never in two splits.
        is_named: Whether the user gave its name. Otherwise it has no rows if it lacks a column of labels or of paths,
            because it may be about something else.
        folder: Where the files are, also those of Raven's Begin Path and BirdNET's File; if absent, the paths stay as
            they are.

    Raises:
        DataError: If the table cannot be read, or a row is invalid.
    """
    named = {name: (name, *OTHER_NAMES.get(name, ())) for name in COLUMNS}
    table = read_rows(path, {*itertools.chain(*named.values()), *([] if groups is None else [groups])})
    found = {name: [each for each in names if each in table.names] for name, names in named.items()}
    column = {name: names[0] for name, names in found.items() if names}
    if groups is not None:
        column |= {groups: groups} if groups in table.names else {}
    if column.get("start") == "File Offset (s)" and column.get("end") == "End Time (s)":
        column[BEGIN_TIME] = BEGIN_TIME
    missing = [name for name in ("path", "label", *([] if groups is None else [groups])) if name not in column]
    if missing and not is_named:
        if "label" in column:
            say(f"{path}: not used, because it has no column file_name")
        return []
    if missing:
        raise DataError(f"{path}: no column {' and '.join(sorted(missing))}; name it in the first line")
    twice = [name for name, count in Counter(table.names).items() if count > 1 and name in column.values()]
    if twice:
        raise DataError(f"{path}: two columns are called {twice[0]}; keep one")
    items = []
    for line, row in table.rows:
        listed = [part for value in row.values() if isinstance(value, list) for part in value]
        if inside := [part for part in listed if separator is not None and separator in part]:
            what = f"{inside[0]!r} in a list has {separator!r} in it"
            raise DataError(f"{path}: line {line}: {what}; give another --data.labels_separator")
        texts = {name: _text(value, separator).strip() for name, value in row.items()}
        values = {name: texts.get(theirs, "") for name, theirs in column.items()}
        items.append(_item(path, line, values, separator is not None, groups))
    if folder is not None:
        items = below(folder, items, path) if column["path"] in (BEGIN_PATH, BIRDNETS_PATH) else items
        items = with_one_spelling(folder, items)
    if column.get("start") == BEGIN_TIME and len({item.path for item in items}) > 1:
        what = "Begin Time (s) counts from the first of several recordings"
        raise DataError(f"{path}: {what}; have Raven write its column File Offset (s) too")
    if not items:
        raise DataError(f"{path}: holds no row; give each clip a row")
    items = _together(items, separator) if separator is not None else _once(path, items)
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
    return items


def _text(value: str | list[str], separator: str | None) -> str:
    """A cell as text. Without a separator only a list of one is a class: a longer one stays a list, to be refused."""
    if isinstance(value, str) or (separator is None and len(value) > 1):
        return str(value)
    return (separator or "").join(value)


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
                f"{path}: line {item.line}: label {item.label} is an amount, and there is no regression; give each "
                "clip the name of a class, or put it into data.class_names if it is one"
            )


def _together(items: Sequence[Item], separator: str) -> list[Item]:
    """One row for all rows of the same clip, with the classes of all."""
    clips: dict[tuple[str, ...], Item] = {}
    for item in items:
        key = (item.name, item.split, item.fold, item.group)
        first = clips.setdefault(key, item)
        if first is not item:
            clips[key] = replace(first, label=separator.join((first.label, item.label)))
    return list(clips.values())


def _once(path: Path, items: Sequence[Item]) -> list[Item]:
    """The first of equal rows: Raven may write a row for each view of a selection."""
    rows: dict[Item, Item] = {}
    for item in items:
        rows.setdefault(replace(item, line=0), item)
    if len(rows) < len(items):
        say(f"{path}: {counted(len(items) - len(rows), 'row')} left out, equal to others before")
    return list(rows.values())


def cut_into_clips(
    items: Sequence[Item], seconds: float, length_of: Callable[[str], float], separator: str
) -> list[Item]:
    """Clips of one length that cover the recordings of a table, each with the classes of all rows that overlap it.

    The last clip ends with the recording, and may overlap the one before it. A shorter recording is one clip. Rows that
    begin behind the end of their recording, or of one that cannot be read, come back as they are: the scan of all files
    says what is wrong with them.

    Args:
        items: Rows with the times at which something is heard; a row without times is of the whole recording.
        seconds: The length of a clip.
        length_of: The length of a recording, in seconds, from its path; 0 if it cannot be read.
        separator: What stands between the classes of a label.
    """
    by_path: dict[str, list[Item]] = {}
    for item in items:
        by_path.setdefault(item.path, []).append(item)
    clips = []
    for path, rows in by_path.items():
        length = length_of(path)
        waiting = sorted(rows, key=lambda row: row.start, reverse=True)  # the next row is the last
        going_on: list[Item] = []
        for start in starts_of_windows(length, seconds, seconds, least=1e-6 * seconds):
            start, end = round(start, 6), round(min(start + seconds, length), 6)  # as tables write them
            while waiting and waiting[-1].start < end:
                going_on.append(waiting.pop())
            going_on = [row for row in going_on if row.end is None or row.end > start]
            heard = sorted(going_on, key=lambda row: row.line)
            label = separator.join(dict.fromkeys(name for row in heard for name in row.classes(separator)))
            clips.append(replace(rows[0], label=label, start=start, end=end))
        clips += waiting
    return clips


def _item(path: Path, line: int, values: dict[str, str], may_have_no_class: bool, groups: str | None) -> Item:
    def wrong(what: str) -> DataError:
        return DataError(f"{path}: line {line}: {what}")

    label = values.get("label", "")
    if not values["path"] or not (label or may_have_no_class):
        raise wrong("no path or no label; give both")
    if "\0" in values["path"]:
        raise wrong("a NUL in the path; write the table again as UTF-8")
    group = "" if groups is None else values.get(groups, "")
    if groups is not None and not group:
        raise wrong(f"no {groups}; give each row one, or it could get into two splits")
    split = values.get("split", "").lower()
    if split and split not in SPLITS:
        raise wrong(f"split {split}; give train, val or test")
    try:
        if BEGIN_TIME in values:
            start, begin, end = (float(values[name]) for name in ("start", BEGIN_TIME, "end"))
            end = round(start + end - begin, 6)
        else:
            start = float(values.get("start") or 0)
            end = float(values["end"]) if values.get("end") else None
    except ValueError as error:
        raise wrong(f"start or end is no number ({error}); give seconds") from error
    if not 0 <= start < (math.inf if end is None else end) or end == math.inf:
        what = f"from {start:g} to {'its end' if end is None else f'{end:g} s'}"
        raise wrong(f"{what}; give seconds from 0 on, the end after the start")
    file = os.path.normpath(values["path"])  # one file with two spellings could get into two splits
    return Item(file, label, SPLITS.get(split, ""), values.get("fold", ""), start, end, line, group)
