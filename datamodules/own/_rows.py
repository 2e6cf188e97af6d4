"""The rows of a table, as texts: CSV, TSV, JSON Lines or Parquet."""

import codecs
import csv
import io
import itertools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from datamodules.archives.parquet import classes_of, features_of, opened_parquet, rows_of
from datamodules.errors import DataError, say
from datamodules.own._column_names import BEGIN_TIME


@dataclass(frozen=True)
class Rows:
    """A table.

    Attributes:
        names: The names of all columns, in the spelling of the wanted names.
        rows: For each row its line, from 1 (for Parquet the number of the row), and the values of the wanted columns. A
            value is a list of texts, or a text, which is empty if there is no value.
    """

    names: list[str]
    rows: list[tuple[int, dict[str, str | list[str]]]]


def read_rows(path: Path, wanted: Sequence[str], numbers: Collection[str] = ()) -> Rows:
    """Read a table. Its suffix decides the format; .txt may have three formats, and other suffixes are CSV.

    Audacity's labels, a .txt without a line of names, have the columns start, end and label.

    Args:
        path: The table.
        wanted: The columns to read, if they exist.
        numbers: The columns in which a comma may be a decimal point, if cells are not separated by commas.

    Raises:
        DataError: If it cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _rows_of_parquet(path, wanted)
    try:
        file = io.StringIO(_text_of(path), newline="")
        if suffix == ".jsonl":
            return _rows_of_json(path, file, wanted)
        if suffix == ".txt" and _AUDACITYS.match(file.getvalue()):
            return _rows_of_audacity(file)
        return _rows_of_csv(path, file, wanted, numbers)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check the path") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path}: not a readable table ({what}); give CSV, TSV or JSON Lines in UTF-8") from error


def _text_of(path: Path) -> str:
    """The text of a file in UTF-8, in UTF-16 with a byte order mark, or in Windows-1252, of which the user is told.

    Raven and Excel write Windows-1252 on Windows.
    """
    content = path.read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if not content.decode("utf-8-sig", "ignore").isascii():  # some of it is UTF-8, so it is not Windows-1252
            raise
        try:
            text = content.decode("cp1252")
        except UnicodeDecodeError:
            raise error from None
        line = next(line for line in text.splitlines() if not line.isascii())
        word = next((word for word in line.split() if not word.isascii()), line.strip())  # a space that never breaks
        say(f"{path}: not in UTF-8, and read as Windows-1252, such as {word}; write it again as UTF-8 if this is wrong")
        return text


_DECIMAL_COMMA = re.compile(r"\s*([+-]?\d+),(\d+)\s*")
_NUMBER = r"[+-]?\d+([.,]\d+)?(e[+-]?\d+)?"
_AUDACITYS = re.compile(rf"{_NUMBER}\t{_NUMBER}(\t|\s*$)", re.MULTILINE)


def _rows_of_audacity(file: TextIO) -> Rows:
    """Audacity's labels. A line that begins with a backslash has the frequencies of the line before it."""
    names = ("start", "end", "label")
    rows = []
    for line, text in enumerate(file, start=1):
        if text.strip() and not text.startswith("\\"):
            start, end, label, *_ = *text.rstrip("\r\n").split("\t"), "", "", ""
            cells = [_DECIMAL_COMMA.sub(r"\1.\2", start), _DECIMAL_COMMA.sub(r"\1.\2", end), label]
            rows.append((line, dict(zip(names, cells, strict=True))))
    return Rows(list(names), rows)


def _records(path: Path, reader: Any, before: int) -> Iterator[tuple[int, list[str]]]:
    """The rows of a csv.reader with their line numbers, after some lines that it does not get.

    Raises:
        DataError: If a quote is not closed, so that it would swallow the rows below it, or a closed one has text behind
            it. The line is that where the row begins.
    """
    while True:
        line = reader.line_num + before + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            remedy = "close each quote in its cell, and double a quote that belongs to the text"
            raise DataError(f"{path}: line {line}: {error}; {remedy}") from error
        yield reader.line_num + before, cells


def _rows_of_csv(path: Path, file: TextIO, wanted: Sequence[str], numbers: Collection[str]) -> Rows:
    head, before = file.readline(), 0
    if re.fullmatch(r"sep=[;,\t]", head.strip("\r\n")):  # a line that only Excel writes
        head, before = file.readline(), 1
    has_tabs = path.suffix.lower() == ".tsv" or (path.suffix.lower() == ".txt" and "\t" in head)
    has_semicolons = not has_tabs and ";" in head and "," not in head  # Excel, in countries with decimal commas
    delimiter = "\t" if has_tabs else ";" if has_semicolons else ","
    # Raven does not quote: a note that begins with " would swallow the rows below it
    quoting = csv.QUOTE_NONE if has_tabs and BEGIN_TIME.casefold() in head.casefold() else csv.QUOTE_MINIMAL
    reader = csv.reader(itertools.chain([head], file), delimiter=delimiter, quoting=quoting, strict=True)
    records = _records(path, reader, before)
    names = _as_wanted(next(records, (1, []))[1], wanted)
    used = [(number, name) for number, name in enumerate(names) if name in wanted]
    rows = []
    for line, cells in records:
        if any(cell.strip() for cell in cells[len(names) :]):  # speech,music without quotes would become speech
            what = f"more cells than columns; put quotes round those with {delimiter!r} in them"
            raise DataError(f"{path}: line {line}: {what}")
        if not cells:
            continue
        row: dict[str, str | list[str]] = {}
        for number, name in used:
            cell = cells[number] if number < len(cells) else ""
            decimal = _DECIMAL_COMMA.fullmatch(cell) if has_semicolons or (has_tabs and name in numbers) else None
            row[name] = f"{decimal[1]}.{decimal[2]}" if decimal else cell
        rows.append((line, row))
    return Rows(names, rows)


def _as_wanted(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Names of columns in the spelling of the wanted names.

    Spellings may differ in blanks, capitals, "_" and the unit of seconds, unless another column has the wanted name.
    """
    plain = {name.casefold(): name for name in wanted}
    loose = {_loose(name): name for name in wanted if "(" not in name}  # Begin Time (s) is Raven's, Begin Time is not
    respelled = [plain.get(name.strip().casefold(), loose.get(_loose(name), name)) for name in names]
    return [name if name in wanted or new in names else new for name, new in zip(names, respelled, strict=True)]


def _loose(name: str) -> str:
    words = re.sub(r"[\s_]+", " ", name.strip().casefold())
    return re.sub(r" ?\((s|secs?|seconds)\)$| (s|secs?|seconds)$", "", words)


def _rows_of_json(path: Path, file: TextIO, wanted: Sequence[str]) -> Rows:
    names: dict[str, None] = {}
    objects: list[tuple[int, dict[str, Any]]] = []
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
        objects.append((line, row))
    new = dict(zip(names, _as_wanted([*names], wanted), strict=True))
    rows = [
        (line, {new[name]: _as_text(value) for name, value in row.items() if new[name] in wanted})
        for line, row in objects
    ]
    return Rows(list(new.values()), rows)


def _rows_of_parquet(path: Path, wanted: Sequence[str]) -> Rows:
    with opened_parquet(path) as file:
        schema = file.schema_arrow
        new = dict(zip(schema.names, _as_wanted(schema.names, wanted), strict=True))
        noted = features_of(path, schema)
        used = {name: classes_of(path, noted, name) for name in schema.names if new[name] in wanted}
        rows = [
            {new[name]: _as_text(value, classes) for (name, classes), value in zip(used.items(), values, strict=True)}
            for values in rows_of(path, file, list(used))
        ]
    return Rows(list(new.values()), list(enumerate(rows, start=1)))


def _as_text(value: Any, classes: list[str] | None = None) -> str | list[str]:
    if isinstance(value, list):
        return [str(_as_text(part, classes)) for part in value]
    if classes and isinstance(value, int):
        return classes[value] if 0 <= value < len(classes) else ""  # Hugging Face's -1 is no label
    return "" if value is None else str(value)
