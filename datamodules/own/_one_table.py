"""Convert the rows of one table to rows of a data set."""

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from datamodules.errors import DataError, say
from datamodules.own._column_names import (
    BEGIN_TIME,
    END_TIME,
    FILE_OFFSET,
    FOLDERS,
    IN_FILE,
    OWN,
    columns_of,
    names_of,
    unread_time,
)
from datamodules.own._recordings import Recordings, below
from datamodules.own._rows import read_rows
from datamodules.own._spelling import with_one_spelling
from datamodules.own.files import Item
from datamodules.own.find import SPLITS

_CLOCK = re.compile(r"(\d+):([0-5]\d):([0-5]\d(?:\.\d*)?)")


def rows_of(
    path: Path,
    separator: str | None,
    groups: str | None,
    is_named: bool,
    folder: Path | None,
    recordings: Recordings | None,
    amounts: Sequence[str],
    named: dict[str, tuple[str, Path]],
) -> list[Item] | None:
    """The rows of one table; None if it has no rows, and is the table of a recording by its name.

    Args:
        path, separator, groups, is_named, folder, amounts: See `read_table`.
        recordings: Finds the recording of the table by its name; None if the files are not sounds, and have no times.
        named: See `below`.
    """
    names = names_of(recordings is not None, is_named)
    also = [*amounts] if groups is None else [groups, *amounts]
    numbers = {*itertools.chain(names["start"], names["end"], names.get("duration", ()))}
    table = read_rows(path, [*dict.fromkeys([*itertools.chain(*names.values()), *FOLDERS, *also])], numbers)
    column = columns_of(table.names, names)
    column |= {name: name for name in also if name in table.names}
    if column.get("start") == FILE_OFFSET and column.get("end") == END_TIME:
        column[BEGIN_TIME] = BEGIN_TIME
    name = None
    if is_named and recordings is not None and (not table.rows or "path" not in column):
        name = recordings.of(path)
    is_empty = not table.names and path.suffix.lower() == ".txt"  # Audacity writes this for a track without labels
    if name is not None and not table.rows and (is_empty or {"path", "start"} & column.keys()):
        return None
    own = name if "start" in column and "path" not in column else None
    needed = [*([] if own is not None else ["path"]), *([] if amounts else ["label"])]
    missing = sorted(name for name in (*needed, *also) if name not in column)
    if missing and not is_named:
        if "label" in column:
            say(f"{path}: not used, because it has no column file_name")
        return []
    if missing:
        by_name = ""
        if "path" in missing and recordings is not None:
            by_name = f", or give the table the name of its recording, such as {path.name.partition('.')[0]}.wav"
        known = [name for name in missing if name in OWN]
        what = f"no column {' and '.join(missing)}; name it in the first line{by_name}"
        raise DataError(f"{path}: {what}{_may_be(names, known) if known else ''}")
    twice = [name for name, count in Counter(table.names).items() if count > 1 and name in column.values()]
    if twice:
        raise DataError(f"{path}: two columns are called {twice[0]}; keep one")
    if not table.rows:
        or_name = ", and no recording has its name" if is_named and recordings is not None else ""
        raise DataError(f"{path}: holds no row{or_name}; give each clip a row")
    unread = unread_time(table.names, column) if recordings is not None else ""
    if unread:
        what = f"column {unread} looks like a time, and is none that longseq knows"
        remedy = "call it start or end if it is in seconds, or leave it out"
        raise DataError(f"{path}: {what}; {remedy}{_may_be(names, ('start', 'end'))}")
    items = []
    for line, row in table.rows:
        listed = [part for value in row.values() if isinstance(value, list) for part in value]
        if inside := [part for part in listed if separator is not None and separator in part]:
            what = f"{inside[0]!r} in a list has {separator!r} in it"
            raise DataError(f"{path}: line {line}: {what}; give another --data.labels_separator")
        texts = {name: _text(value, separator).strip() for name, value in row.items()}
        values = {name: texts.get(theirs, "") for name, theirs in column.items()}
        if amounts:
            values["label"] = ";".join(_amount(path, line, name, values[name]) for name in amounts)
        if own is not None:
            values["path"] = own
        elif column["path"] == IN_FILE and values["path"]:
            values["path"] = "/".join(filter(None, (*(texts.get(name, "") for name in FOLDERS), values["path"])))
        items.append(_item(path, line, values, separator is not None, groups))
    early = [item for item in items if item.start < 0]
    if early:
        what = "row begins before its recording" if len(early) == 1 else "rows begin before their recordings"
        where = f"line {early[0].line} at {early[0].start:g} s"
        say(f"{path}: {len(early)} {what} ({where}); cut there")
        items = [replace(item, start=max(item.start, 0.0)) for item in items]
    if folder is not None and column.get("path") not in (None, *OWN["path"]):
        items = below(folder, items, path, named)
    spelled = with_one_spelling(folder, items) if folder is not None and column.get("start") == BEGIN_TIME else items
    if column.get("start") == BEGIN_TIME and len({item.path for item in spelled}) > 1:
        what = "Begin Time (s) counts from the first of several recordings"
        raise DataError(f"{path}: {what}; have Raven write its column File Offset (s) too")
    return items


def _may_be(names: dict[str, tuple[str, ...]], columns: Sequence[str]) -> str:
    """For messages: the other names that columns may have, in parentheses."""
    known = [f"{name} may be {', '.join(names[name][1:])}" for name in columns]
    return f" ({'; '.join(known)})"


def _text(value: str | list[str], separator: str | None) -> str:
    """A cell as text. Without a separator, a list of one is a class, and a longer list stays a list, to be refused."""
    if isinstance(value, str) or (separator is None and len(value) > 1):
        return str(value)
    return (separator or "").join(value)


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
        start = _seconds(values.get("start") or "0")
        end = _seconds(values["end"]) if values.get("end") else None
        if BEGIN_TIME in values:
            end = round(start + _seconds(values["end"]) - _seconds(values[BEGIN_TIME]), 6)
        elif values.get("duration"):
            end = round(start + _seconds(values["duration"]), 6)
    except ValueError as error:
        raise wrong(f"start or end is not a number ({error}); give seconds") from error
    is_inside = start < math.inf if end is None else start <= end < math.inf and (end > 0 or start == 0)
    if not is_inside or (end is None and start < 0):
        what = f"from {start:g} to {'its end' if end is None else f'{end:g} s'}"
        raise wrong(f"{what}; give seconds from 0 on, the end after the start")
    file = values["path"]
    if file.startswith("file://"):
        file = unquote(urlsplit(file).path)
    file = os.path.normpath(file)  # one file with two spellings could get into two splits
    return Item(file, label, SPLITS.get(split, ""), values.get("fold", ""), start, end, line, group)


def _amount(path: Path, line: int, column: str, text: str) -> str:
    try:
        if math.isfinite(float(text)):
            return text
    except ValueError:
        pass
    raise DataError(f"{path}: line {line}: {column} {text!r} is not a number; give one, or leave the row out")


def _seconds(text: str) -> float:
    """A time in seconds, which may be written as hours:minutes:seconds.

    Raises:
        ValueError: If it is not a time.
    """
    if clock := _CLOCK.fullmatch(text):
        return round(3600 * int(clock[1]) + 60 * int(clock[2]) + float(clock[3]), 6)
    return float(text)
