"""The rows of a table, as texts: CSV, TSV, JSON Lines or Parquet."""

import csv
import itertools
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from datamodules.errors import DataError
from datamodules.parquet import classes_of, features_of, opened_parquet, rows_of
from datamodules.raven import BEGIN_TIME


@dataclass(frozen=True)
class Rows:
    """A table.

    Attributes:
        names: Of all its columns.
        rows: The line of each row (of Parquet the number of the row), from 1, and the values of the wanted columns that
            it has: a list of texts, or a text, which is empty where there is no value.
    """

    names: list[str]
    rows: list[tuple[int, dict[str, str | list[str]]]]


def read_rows(path: Path, wanted: Collection[str]) -> Rows:
    """Read a table; its suffix says of which form it is (.txt may be both of two), and other suffixes are CSV.

    Args:
        path: The table.
        wanted: The columns to read, if they are there.

    Raises:
        DataError: If it cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _rows_of_parquet(path, wanted)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            if suffix == ".jsonl":
                return _rows_of_json(path, file, wanted)
            return _rows_of_csv(path, file, wanted)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check the path") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path}: not a readable table ({what}); give CSV, TSV or JSON Lines in UTF-8") from error


def _rows_of_csv(path: Path, file: TextIO, wanted: Collection[str]) -> Rows:
    head, before = file.readline(), 0
    if re.fullmatch(r"sep=[;,\t]", head.strip("\r\n")):  # Excel's own
        head, before = file.readline(), 1
    has_tabs = path.suffix.lower() == ".tsv" or (path.suffix.lower() == ".txt" and "\t" in head)
    has_semicolons = not has_tabs and ";" in head and "," not in head  # Excel, where numbers have decimal commas
    delimiter = "\t" if has_tabs else ";" if has_semicolons else ","
    # Raven quotes nothing: a note that begins with " would take in the rows below it
    quoting = csv.QUOTE_NONE if has_tabs and BEGIN_TIME in head else csv.QUOTE_MINIMAL
    reader = csv.reader(itertools.chain([head], file), delimiter=delimiter, quoting=quoting)
    names = _as_wanted(next(reader, []), wanted)
    used = [(number, name) for number, name in enumerate(names) if name in wanted]
    rows = []
    for cells in reader:
        line = reader.line_num + before
        if any(cell.strip() for cell in cells[len(names) :]):  # "speech,music" without quotes would be speech
            what = f"more cells than columns; put quotes round those with {delimiter!r} in them"
            raise DataError(f"{path}: line {line}: {what}")
        if not cells:
            continue
        row: dict[str, str | list[str]] = {}
        for number, name in used:
            cell = cells[number] if number < len(cells) else ""
            row[name] = re.sub(r"^\s*([+-]?\d+),(\d+)\s*$", r"\1.\2", cell) if has_semicolons else cell
        rows.append((line, row))
    return Rows(names, rows)


def _as_wanted(names: Sequence[str], wanted: Collection[str]) -> list[str]:
    """Names of columns as they are wanted, where blanks or capitals are all that differs and no other has the name."""
    plain = {each.casefold(): each for each in wanted}
    return [
        name if name in wanted or (found := plain.get(name.strip().casefold())) in (None, *names) else found
        for name in names
    ]


def _rows_of_json(path: Path, file: TextIO, wanted: Collection[str]) -> Rows:
    names: dict[str, None] = {}
    rows = []
    for line, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: line {line}: no JSON ({error}); write an object in each line") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}: line {line}: no object of JSON; write the columns of a row by their names")
        names |= dict.fromkeys(row)
        rows.append((line, {name: _as_text(row[name]) for name in wanted if name in row}))
    return Rows(list(names), rows)


def _rows_of_parquet(path: Path, wanted: Collection[str]) -> Rows:
    with opened_parquet(path) as file:
        schema = file.schema_arrow
        noted = features_of(path, schema)
        used = {name: classes_of(path, noted, name) for name in schema.names if name in wanted}
        rows = [
            {name: _as_text(value, classes) for (name, classes), value in zip(used.items(), values, strict=True)}
            for values in rows_of(path, file, list(used))
        ]
    return Rows(list(schema.names), list(enumerate(rows, start=1)))


def _as_text(value: Any, classes: list[str] | None = None) -> str | list[str]:
    if isinstance(value, list):
        return [str(_as_text(part, classes)) for part in value]
    if classes and isinstance(value, int):
        return classes[value] if 0 <= value < len(classes) else ""  # Hugging Face's -1 is no label
    return "" if value is None else str(value)
