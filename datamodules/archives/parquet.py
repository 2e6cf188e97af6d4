"""Parquet files: their columns by what Hugging Face's datasets notes on them, and their rows as a tar archive."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from datamodules.archives.parquet_pages import BOMB, SMALL, TIMES, rows_at_once
from datamodules.archives.shard_index import REMEDY
from datamodules.archives.write_shards import write_tar
from datamodules.cache import cache_folder, locked, stamp
from datamodules.errors import DataError

_VERSION = 1  # goes up when an archive holds other things
_AGAIN = "write the file again"
_IN_PYTHON = 64  # bytes that a value takes besides its own
_IN_TAR = 2048  # bytes that a row takes in an archive besides its own


@contextmanager
def opened_parquet(path: Path) -> Iterator[Any]:
    """A Parquet file, open for reading.

    Raises:
        DataError: If it is cut off or no Parquet file; or if pyarrow is not installed.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{path}: needs pyarrow; pip install 'longseq[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except DataError:
        raise
    except Exception as error:  # of hostile bytes: pyarrow's own, UnicodeDecodeError, OverflowError, ...
        what = str(error).strip().split("\n")[0].rstrip(".")
        raise DataError(f"{path}: cut off or damaged ({what}); {REMEDY}") from error


def rows_of(path: Path, file: Any, columns: Sequence[str], of_a_row: int = 0) -> Iterator[Sequence[Any]]:
    """The values of some columns of an open Parquet file, row by row.

    Args:
        path: The file.
        file: The same, open.
        columns: The names of the columns.
        of_a_row: Bytes that each row will take besides its values.

    Raises:
        DataError: If two columns have one of these names, if a column holds lists of lists, if a page is damaged, or if
            the rows would take much more memory than the file is long: it may be a decompression bomb.
    """
    from pyarrow import compute, parquet, types

    schema, leaves = file.schema_arrow, file.metadata.schema
    _refuse_twice(path, schema, columns)
    for name in columns:
        kind = schema.field(name).type
        inner = [kind.field(number).type for number in range(kind.num_fields)]
        if types.is_map(kind) or any(types.is_nested(each) for each in inner):
            raise DataError(f"{path}: column {name} holds {kind}; write numbers or texts, or lists of them")
    size = rows_at_once(path, file.metadata, columns)
    # pyarrow keeps a text that many lists hold once, if it is told the full path of the column
    parts = [leaves.column(at) for at in range(len(leaves))]
    texts = [part.path for part in parts if part.max_repetition_level and part.physical_type == "BYTE_ARRAY"]
    left = most = max(SMALL, TIMES * path.stat().st_size)
    with parquet.ParquetFile(path, read_dictionary=texts) as again:
        groups = range(file.metadata.num_row_groups)  # pyarrow cannot put the texts of lists in two groups together
        for batch in chain.from_iterable(again.iter_batches(size, [group], list(columns)) for group in groups):
            left -= of_a_row * len(batch)
            for column in batch.columns:
                values = column if types.is_struct(column.type) or not column.type.num_fields else column.flatten()
                if types.is_dictionary(values.type):
                    lengths = compute.binary_length(values.dictionary)  # type: ignore[attr-defined]
                    left -= compute.sum(lengths.take(values.indices)).as_py() or 0  # type: ignore[attr-defined]
                    values = values.indices
                left -= values.nbytes + _IN_PYTHON * len(values)
            if left < 0:
                raise DataError(f"{path}: would become more than {most} bytes; it {BOMB}")
            yield from zip(*(batch.column(name).to_pylist() for name in columns), strict=True)


def _refuse_twice(path: Path, schema: Any, columns: Sequence[str]) -> None:
    for name in columns:
        if schema.names.count(name) > 1:
            raise DataError(f"{path}: two columns are called {name}; keep one")


def features_of(path: Path, schema: Any) -> dict[str, Any]:
    """What Hugging Face's datasets notes on the columns of a Parquet file, by name; empty if it wrote nothing.

    Raises:
        DataError: If what stands there has another form.
    """
    note = (schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        noted = json.loads(note).get("info", {}).get("features", {})
        return {name: {"feature": of[0]} if isinstance(of, list) else of for name, of in noted.items()}  # an older form
    except (ValueError, RecursionError, AttributeError, LookupError) as error:
        raise DataError(f"{path}: its note of Hugging Face's features cannot be read; {_AGAIN}") from error


def classes_of(path: Path, features: dict[str, Any], field: str) -> list[str]:
    """The names of the numbers in a column of ClassLabel, or of lists of them; empty for other columns.

    Raises:
        DataError: If they are no names, or one is there twice.
    """
    feature = features.get(field, {})
    inner = feature.get("feature", feature) if isinstance(feature, dict) else None
    names = (inner.get("names") or []) if isinstance(inner, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise DataError(f"{path}: the classes that its note of {field} names are no names; {_AGAIN}")
    if len({*names}) < len(names):
        raise DataError(f"{path}: a class that its note of {field} names is there twice; {_AGAIN}")
    return names


@dataclass(frozen=True)
class Columns:
    """What of a Parquet file is used.

    Attributes:
        media: The column with files, as bytes, or as structs with a field "bytes".
        label: The column of labels.
        classes: The names of its numbers; empty if it holds names, or numbers without names.
    """

    media: str
    label: str
    classes: list[str]


def columns_of(path: Path, media: str, field: str) -> Columns:
    """The columns of a Parquet file, by their types and by what Hugging Face's datasets notes on them.

    Args:
        path: The file.
        media: "image" or "audio".
        field: The name of the column of labels.

    Raises:
        DataError: If the file is cut off or no Parquet file, or lacks a column; or if pyarrow is not installed.
    """
    with opened_parquet(path) as file:
        schema = file.schema_arrow
    noted = features_of(path, schema)
    if field not in schema.names:
        raise DataError(f"{path}: no column {field}, only {', '.join(schema.names)}; name that of labels: --data.label")
    of_kind = [
        name
        for name in schema.names
        if isinstance(noted.get(name), dict) and noted[name].get("_type") == media.capitalize()
    ]
    binary = [each.name for each in schema if "binary" in str(each.type)]
    chosen = of_kind or binary
    if len(chosen) != 1:
        what = f"columns {' and '.join(chosen)} hold files" if chosen else "no column holds files"
        raise DataError(f"{path}: {what}; write it again with one column of {media} files, as bytes")
    _refuse_twice(path, schema, chosen)
    kind = schema.field(chosen[0]).type
    if kind.num_fields and not str(kind).startswith("struct<"):
        what = f"column {chosen[0]} holds {kind} and no bytes of a file"
        raise DataError(f"{path}: {what}; embed the files, or train on a folder")
    return Columns(chosen[0], field, classes_of(path, noted, field))


def tar_of_parquet(path: Path, media: str, suffixes: frozenset[str], field: str) -> Path:
    """A Parquet file as a tar archive in the cache, made once, because single rows of Parquet cannot be read fast.

    Its samples have the numbers of their rows as names.

    Raises:
        DataError: As `columns_of`; or if a row has no label or no file.
    """
    columns = columns_of(path, media, field)
    what = f"{_VERSION} {media} {field}\n{stamp(path)}"
    archive = cache_folder("parquet") / f"{hashlib.sha256(what.encode(errors='surrogateescape')).hexdigest()}.tar"
    with locked(archive):
        if not archive.is_file():
            write_tar(archive, _members_of_rows(path, columns, suffixes), "make room or set LONGSEQ_CACHE")
    return archive


def _members_of_rows(path: Path, columns: Columns, suffixes: frozenset[str]) -> Iterator[tuple[str, bytes]]:
    usual = ".png" if ".png" in suffixes else ".wav"  # a decoder looks at the content anyway
    row = 0
    with opened_parquet(path) as file:
        for found, label in rows_of(path, file, [columns.media, columns.label], _IN_TAR):
            content = found.get("bytes") if isinstance(found, dict) else found
            if not isinstance(content, bytes):
                raise DataError(f"{path}: row {row} has no bytes of a file; embed the files, or train on a folder")
            numbers = label if isinstance(label, list) else [label]
            if any(number is None or number == "" or number == -1 for number in numbers):
                raise DataError(f"{path}: row {row} has no label; give it one, or take it out")
            named = [_named(f"{path}: row {row}", number, columns.classes) for number in numbers]
            of_path = found.get("path") if isinstance(found, dict) else None
            origin = os.path.splitext(of_path)[1].lower() if isinstance(of_path, str) else ""
            yield f"{row:09}{origin if origin in suffixes else usual}", content
            value = named if isinstance(label, list) else named[0]
            yield f"{row:09}.json", json.dumps({columns.label: value}).encode()
            row += 1


def _named(row: str, label: Any, classes: list[str]) -> Any:
    """A label, or the name of the class of which it is the number.

    Raises:
        DataError: If it is neither a name nor a number, or no number of a class.
    """
    if not isinstance(label, int | float | str):
        raise DataError(f"{row} has the label {label}; name the column of classes: --data.label")
    if not classes:
        return label
    if not isinstance(label, int) or not 0 <= label < len(classes):
        raise DataError(f"{row} has the label {label}, and its classes are 0 to {len(classes) - 1}; mend one of them")
    return classes[label]
