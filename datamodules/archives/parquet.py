"""Parquet files: their columns, with the notes that Hugging Face's datasets writes, and their rows as a tar archive."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from datamodules.archives._shard_index import REMEDY
from datamodules.archives.parquet_pages import BOMB, SMALL, TIMES, rows_at_once
from datamodules.archives.write_shards import write_tar
from datamodules.cache import cache_file, locked, stamp
from datamodules.errors import DataError

_VERSION = 1  # increased when the content of the archives changes
_AGAIN = "write the file again"
_IN_PYTHON = 64  # bytes of overhead of a value
_IN_TAR = 2048  # bytes of overhead of a row in an archive


@contextmanager
def opened_parquet(path: Path) -> Iterator[Any]:
    """A Parquet file, open for reading.

    Raises:
        DataError: If it is truncated or not a Parquet file, or if pyarrow is not installed.
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
    except Exception as error:  # hostile bytes raise pyarrow's errors, UnicodeDecodeError, OverflowError, ...
        what = str(error).strip().split("\n")[0].rstrip(".")
        raise DataError(f"{path}: cut off or damaged ({what}); {REMEDY}") from error


def rows_of(path: Path, file: Any, columns: Sequence[str], of_a_row: int = 0) -> Iterator[Sequence[Any]]:
    """The values of some columns of an open Parquet file, row by row.

    Args:
        path: The file.
        file: The same file, open.
        columns: The names of the columns.
        of_a_row: Bytes that each row takes in addition to its values.

    Raises:
        DataError: If two columns have one of these names, if a column holds lists of lists, if a page is damaged, or if
            the rows would take much more memory than the size of the file: it may be a decompression bomb.
    """
    from pyarrow import compute, parquet, types

    schema, leaves = file.schema_arrow, file.metadata.schema
    _refuse_twice(path, schema, columns)
    for name in columns:
        kind = schema.field(name).type
        inner = [kind.field(number).type for number in range(kind.num_fields)]
        if types.is_map(kind) or any(map(types.is_nested, inner)):
            raise DataError(f"{path}: column {name} holds {kind}; write numbers or texts, or lists of them")
    size = rows_at_once(path, file.metadata, columns)
    # with the full path of a column, pyarrow stores a text only once, even if many lists contain it
    parts = [leaves.column(at) for at in range(len(leaves))]
    texts = [part.path for part in parts if part.max_repetition_level and part.physical_type == "BYTE_ARRAY"]
    left = most = max(SMALL, TIMES * path.stat().st_size)
    with parquet.ParquetFile(path, read_dictionary=texts) as again:
        groups = range(file.metadata.num_row_groups)  # pyarrow cannot join the texts of lists from two groups
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
    """The notes of Hugging Face's datasets on the columns of a Parquet file, by name; empty if there are none.

    Raises:
        DataError: If the notes have another form.
    """
    note = (schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        noted = json.loads(note).get("info", {}).get("features", {})
        return {  # a list is an older form
            name: {"feature": feature[0]} if isinstance(feature, list) else feature for name, feature in noted.items()
        }
    except (ValueError, RecursionError, AttributeError, LookupError) as error:
        raise DataError(f"{path}: its note of Hugging Face's features cannot be read; {_AGAIN}") from error


def classes_of(path: Path, features: dict[str, Any], field: str) -> list[str]:
    """The class names of a column of ClassLabel, or of lists of ClassLabel; empty for other columns.

    Raises:
        DataError: If they are not names, or if a name occurs twice.
    """
    feature = features.get(field, {})
    inner = feature.get("feature", feature) if isinstance(feature, dict) else None
    names = (inner.get("names") or []) if isinstance(inner, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise DataError(f"{path}: the classes that its note of {field} names are not names; {_AGAIN}")
    if len({*names}) < len(names):
        raise DataError(f"{path}: a class that its note of {field} names occurs twice; {_AGAIN}")
    return names


def _media_and_classes(path: Path, media: str, field: str) -> tuple[str, list[str]]:
    """The column of a Parquet file with files, as bytes or as structs with a field "bytes"; and the class names.

    The types of the columns and the notes of Hugging Face's datasets decide. The class names are those of the numbers
    in the column of labels, `field`; empty if it has names, or numbers without names.

    Raises:
        DataError: If the file is truncated or not a Parquet file, or lacks a column; or if pyarrow is not installed.
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
    binary = [column.name for column in schema if "binary" in str(column.type)]
    chosen = of_kind or binary
    if len(chosen) != 1:
        what = f"columns {' and '.join(chosen)} hold files" if chosen else "no column holds files"
        raise DataError(f"{path}: {what}; write it again with one column of {media} files, as bytes")
    _refuse_twice(path, schema, chosen)
    kind = schema.field(chosen[0]).type
    if kind.num_fields and not str(kind).startswith("struct<"):
        what = f"column {chosen[0]} holds {kind} and no bytes of a file"
        raise DataError(f"{path}: {what}; embed the files, or train on a folder")
    return chosen[0], classes_of(path, noted, field)


def tar_of_parquet(path: Path, media: str, suffixes: frozenset[str], field: str) -> tuple[Path, list[str]]:
    """A Parquet file as a tar archive in the cache, and the names of its classes, if it has a list of them.

    The archive is made once, because single rows of Parquet cannot be read fast. Its samples have the numbers of their
    rows as names.

    Args:
        path: The file.
        media: "image" or "audio".
        suffixes: The suffixes of inputs in archives.
        field: The name of the column of labels.

    Raises:
        DataError: If the file is truncated or not a Parquet file, lacks a column, or has a row without a label or a
            file; or if pyarrow is not installed.
    """
    column, classes = _media_and_classes(path, media, field)
    archive = cache_file("parquet", f"{_VERSION} {media} {field}\n{stamp(path)}", ".tar")
    with locked(archive):
        if not archive.is_file():
            members = _members_of_rows(path, column, field, classes, suffixes)
            write_tar(archive, members, "make room or set LONGSEQ_CACHE")
    return archive, classes


def _members_of_rows(
    path: Path, column: str, field: str, classes: list[str], suffixes: frozenset[str]
) -> Iterator[tuple[str, bytes]]:
    usual = ".png" if ".png" in suffixes else ".wav"  # a decoder looks at the content, not at the suffix
    with opened_parquet(path) as file:
        for row, (media, label) in enumerate(rows_of(path, file, [column, field], _IN_TAR)):
            content, origin = (media.get("bytes"), media.get("path")) if isinstance(media, dict) else (media, None)
            if not isinstance(content, bytes):
                raise DataError(f"{path}: row {row} has no bytes of a file; embed the files, or train on a folder")
            numbers = label if isinstance(label, list) else [label]
            if any(number is None or number == "" or number == -1 for number in numbers):
                raise DataError(f"{path}: row {row} has no label; give it one, or take it out")
            names = [_named(f"{path}: row {row}", number, classes) for number in numbers]
            suffix = os.path.splitext(origin)[1].lower() if isinstance(origin, str) else ""
            yield f"{row:09}{suffix if suffix in suffixes else usual}", content
            yield f"{row:09}.json", json.dumps({field: names if isinstance(label, list) else names[0]}).encode()


def _named(row: str, label: Any, classes: list[str]) -> Any:
    """A label as a class name: a number is replaced by the name of its class, if there are names.

    Raises:
        DataError: If it is neither a name nor a number, or not the number of a class.
    """
    if not isinstance(label, int | float | str):
        raise DataError(f"{row} has the label {label}; name the column of classes: --data.label")
    if not classes:
        return label
    if not isinstance(label, int) or not 0 <= label < len(classes):
        raise DataError(
            f"{row} has the label {label}, and its classes are 0 to {len(classes) - 1}; correct one of them"
        )
    return classes[label]
