"""Parquet files: their columns by what Hugging Face's datasets notes on them, and their rows as a tar archive."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datamodules.cache import cache_folder, locked, stamp
from datamodules.errors import DataError
from datamodules.shard_index import REMEDY
from datamodules.write_shards import write_tar

_VERSION = 1  # goes up when an archive holds other things


@contextmanager
def opened_parquet(path: Path) -> Iterator[Any]:
    """A Parquet file, open for reading.

    Raises:
        DataError: If it is cut off or no Parquet file; or if pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{path}: needs pyarrow; pip install 'longseq[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        what = str(error).strip().split("\n")[0].rstrip(".")
        raise DataError(f"{path}: cut off or damaged ({what}); {REMEDY}") from error


def features_of(schema: Any) -> dict[str, Any]:
    """What Hugging Face's datasets notes on the columns of a Parquet file, by name; empty if it wrote nothing."""
    noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    return {name: {"feature": of[0]} if isinstance(of, list) else of for name, of in noted.items()}  # an older form


def classes_of(features: dict[str, Any], field: str) -> list[str]:
    """The names of the numbers in a column of ClassLabel, or of lists of them; empty for other columns."""
    feature = features.get(field, {})
    return feature.get("feature", feature).get("names") or []


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
    noted = features_of(schema)
    if field not in schema.names:
        raise DataError(f"{path}: no column {field}, only {', '.join(schema.names)}; name that of labels: --data.label")
    of_kind = [name for name in schema.names if noted.get(name, {}).get("_type") == media.capitalize()]
    binary = [name for name in schema.names if "binary" in str(schema.field(name).type)]
    chosen = of_kind or binary
    if len(chosen) != 1:
        what = f"columns {' and '.join(chosen)} hold files" if chosen else "no column holds files"
        raise DataError(f"{path}: {what}; write it again with one column of {media} files, as bytes")
    return Columns(chosen[0], field, classes_of(noted, field))


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
        for batch in file.iter_batches(batch_size=64, columns=[columns.media, columns.label]):
            labels = batch.column(columns.label).to_pylist()
            for found, label in zip(batch.column(columns.media).to_pylist(), labels, strict=True):
                content = found.get("bytes") if isinstance(found, dict) else found
                if not isinstance(content, bytes):
                    raise DataError(f"{path}: row {row} has no bytes of a file; embed the files, or train on a folder")
                numbers = label if isinstance(label, list) else [label]
                if any(number is None or number == "" or number == -1 for number in numbers):
                    raise DataError(f"{path}: row {row} has no label; give it one, or take it out")
                named = [_named(f"{path}: row {row}", number, columns.classes) for number in numbers]
                origin = os.path.splitext((found.get("path") if isinstance(found, dict) else None) or "")[1].lower()
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
