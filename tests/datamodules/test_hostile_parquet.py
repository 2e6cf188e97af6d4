"""Parquet files of an attacker: each is one line, in bounded memory, whatever its notes, pages and footer claim."""

import io
import json
import random
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from datamodules import DataError, ImageShards
from datamodules.archives.parquet import opened_parquet, rows_of
from datamodules.cache import cache_folder
from datamodules.own._table import read_table
from longseq.reports.cell import peak_of

MIB = 2**20
FILES = [b"x", b"y"]


def png(colour: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (colour, 0, 0)).save(file, "PNG")
    return file.getvalue()


def written(folder: Path, columns: dict | pyarrow.Table, note: object = None, **options: Any) -> Path:
    table = pyarrow.table(columns) if isinstance(columns, dict) else columns
    if note is not None:
        table = table.replace_schema_metadata({"huggingface": note if isinstance(note, bytes) else json.dumps(note)})
    pyarrow.parquet.write_table(table, folder / "train.parquet", **options)
    return folder / "train.parquet"


def refusal(path: Path) -> str:
    """What is said of a shard."""
    with pytest.raises(DataError) as error:
        ImageShards(str(path.parent)).setup()
    said = str(error.value)
    assert said.startswith(f"{path}: ") and ";" in said and "\n" not in said
    return said.removeprefix(f"{path}: ")


def of_label(feature: object) -> dict:
    return {"info": {"features": {"image": {"_type": "Image"}, "label": feature}}}


NOTES = {
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "nested deeply": b"[" * 100_000,
    "a long number": b'{"info":' + b"9" * 5000 + b"}",
    "a list": [],
    "nothing": b"null",
    "a list as info": {"info": []},
    "a list as features": {"info": {"features": [1]}},
    "a text as features": {"info": {"features": "x"}},
    "a text as a feature": of_label("x"),
    "an empty list as a feature": of_label([]),
    "a number as a feature": of_label(3),
    "a number inside": of_label({"feature": 3}),
    "a number as names": of_label({"_type": "ClassLabel", "names": 3}),
    "a text as names": of_label({"_type": "ClassLabel", "names": "ab"}),
    "a dictionary as names": of_label({"_type": "ClassLabel", "names": {"a": 1}}),
    "numbers as names": of_label({"_type": "ClassLabel", "names": [1, 2]}),
    "an empty name": of_label({"_type": "ClassLabel", "names": ["a", ""]}),
    "a name twice": of_label({"_type": "ClassLabel", "names": ["a", "a"]}),
}


@pytest.mark.parametrize("note", NOTES)
def test_a_note_of_hugging_faces_features_of_another_form_is_named(note: str, tmp_path: Path) -> None:
    path = written(tmp_path, {"image": FILES, "label": [0, 1]}, NOTES[note])
    assert "its note of " in refusal(path)
    table = written(tmp_path, {"path": ["a.png", "b.png"], "label": [0, 1]}, NOTES[note])
    with pytest.raises(DataError, match=rf"^{table}: .* its note of .*; write the file again$|^{table}: its note of "):
        read_table(table)


def of_bytes(kind: pyarrow.DataType, *values: bytes) -> pyarrow.Array:
    """An array of texts that may be no UTF-8."""
    ends = np.cumsum([0, *map(len, values)]).astype(np.int32)
    buffers = [None, pyarrow.py_buffer(ends.tobytes()), pyarrow.py_buffer(b"".join(values))]
    return pyarrow.Array.from_buffers(kind, len(values), buffers)


def named(names: list[str], *columns: object) -> pyarrow.Table:
    return pyarrow.table([pyarrow.array(column) for column in columns], names=names)


TABLES = {
    "a label that is no UTF-8": lambda: {"image": FILES, "label": of_bytes(pyarrow.string(), b"\xff", b"a")},
    "a date beyond Python's": lambda: {"image": FILES, "label": pyarrow.array([2**62] * 2, pyarrow.timestamp("us"))},
    "two columns of labels": lambda: named(["image", "label", "label"], FILES, [0, 1], [0, 1]),
    "two columns of files": lambda: named(["image", "image", "label"], FILES, FILES, [0, 1]),
    "a column of files and of others": lambda: named(["image", "image", "label"], FILES, [0, 1], [0, 1]),
    "lists of lists": lambda: {"image": FILES, "label": [[[0]], [[1]]]},
    "maps": lambda: {
        "image": FILES,
        "label": pyarrow.array([[("a", 1)]] * 2, pyarrow.map_(pyarrow.string(), pyarrow.int64())),
    },
    "structs": lambda: {"image": FILES, "label": [{"a": 1}] * 2},
    "a number as bytes": lambda: {"image": [{"bytes": 1, "other": b"x"}] * 2, "label": [0, 1]},
    "a number as path": lambda: {"image": [{"bytes": b"x", "path": 1}] * 2, "label": [0, 1]},
    "no rows": lambda: {"image": pyarrow.array([], pyarrow.binary()), "label": pyarrow.array([], pyarrow.int64())},
    "no columns": lambda: {},
    "no values": lambda: {"image": FILES, "label": pyarrow.nulls(2)},
}


@pytest.mark.parametrize("table", TABLES)
def test_columns_of_other_kinds_are_named(table: str, tmp_path: Path) -> None:
    path = written(tmp_path, TABLES[table]())
    with pytest.raises(DataError) as error:
        ImageShards(str(tmp_path)).setup()
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)  # or of a sample in it


FOOTERS = {
    "a length beyond the file": lambda content: content[:-8] + struct.pack("<I", 2**32 - 1) + content[-4:],
    "no length": lambda content: content[:-8] + bytes(4) + content[-4:],
    "a footer of noise": lambda content: content[:-200] + random.Random(0).randbytes(192) + content[-8:],
    "only marks": lambda content: b"PAR1PAR1",
    "an encrypted footer": lambda content: content[:-4] + b"PARE",
    "a name that is no UTF-8": lambda content: content.replace(b"label", b"\xff\xfebel"),
}


@pytest.mark.parametrize("footer", FOOTERS)
def test_a_broken_footer_is_named(footer: str, tmp_path: Path) -> None:
    path = written(tmp_path, {"image": FILES, "label": [0, 1]}, store_schema=False)
    path.write_bytes(FOOTERS[footer](path.read_bytes()))
    assert "cut off or damaged" in refusal(path)


# A kilobyte that becomes gigabytes


def repeated(value: bytes, times: int) -> pyarrow.DictionaryArray:
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * times, pyarrow.int32()), pyarrow.array([value]))


def one_list(length: int) -> pyarrow.ListArray:
    return pyarrow.ListArray.from_arrays(pyarrow.array([0, length], pyarrow.int32()), np.zeros(length, np.int8))


def list_of(value: str, times: int) -> pyarrow.Array:
    return pyarrow.ListArray.from_arrays(pyarrow.array([0, times], pyarrow.int32()), repeated(value, times))  # type: ignore


BOMBS = {
    "a file in every row": (lambda: {"image": repeated(bytes(10 * MIB), 64), "label": [0, 1] * 32}, {}),
    "a long list": (lambda: {"image": [b"x"], "label": one_list(20_000_000)}, {}),
    "a list of a long text": (lambda: {"image": [b"x"], "label": list_of("x" * MIB, 5000)}, {}),
    "a file of zeros": (lambda: {"image": [bytes(100 * MIB)], "label": [0]}, {"use_dictionary": False}),
    "many empty files": (lambda: {"image": repeated(b"", 100_000), "label": np.zeros(100_000, np.int8)}, {}),
}


@pytest.mark.parametrize(
    "bomb", [pytest.param(name, marks=pytest.mark.thorough if name.startswith("many") else ()) for name in BOMBS]
)
def test_a_small_file_that_would_take_much_memory_or_disk_is_refused(bomb: str, tmp_path: Path) -> None:
    columns, options = BOMBS[bomb]
    path = written(tmp_path, columns(), compression="zstd", write_statistics=False, store_schema=False, **options)
    assert path.stat().st_size < 50_000
    columns = None
    before = set(cache_folder("parquet").iterdir())
    peak = peak_of(torch.device("cpu"))
    assert "may be a decompression bomb; if not, write it again in smaller groups of rows" in refusal(path)
    assert peak() < 400 * MIB
    assert sum(file.stat().st_size for file in set(cache_folder("parquet").iterdir()) - before) == 0


@pytest.mark.parametrize("column", ["path", "label"])
def test_a_small_table_that_would_take_much_memory_is_refused(column: str, tmp_path: Path) -> None:
    plain = {"path": [f"{number}.png" for number in range(2000)], "label": ["a", "b"] * 1000}
    path = written(tmp_path, plain | {column: repeated("x" * MIB, 2000)}, compression="zstd", store_schema=False)  # type: ignore
    peak = peak_of(torch.device("cpu"))
    with pytest.raises(
        DataError, match=rf"^{path}: would become more than \d+ bytes; it may be a decompression bomb; "
    ):
        read_table(path)
    assert peak() < 400 * MIB


def varint(number: int, length: int) -> bytes:
    """A number as a footer writes it, in so many bytes, of which some may be too many."""
    doubled = number << 1
    return bytes(doubled >> 7 * at & 127 | (128 if at < length - 1 else 0) for at in range(length))


def test_a_footer_that_declares_fewer_values_than_its_pages_hold_is_found_out(tmp_path: Path) -> None:
    """pyarrow itself makes room for all of them."""
    columns = {"image": [b"x"], "label": one_list(3_000_000)}
    path = written(tmp_path, columns, compression="zstd", write_statistics=False, store_schema=False)
    content, count = path.read_bytes(), varint(3_000_000, 4)
    liars = 0
    for at in (at for at in range(len(content)) if content.startswith(count, at)):
        path.write_bytes(content[:at] + varint(1, 4) + content[at + 4 :])
        with opened_parquet(path) as file:
            is_liar = file.metadata.row_group(0).column(1).num_values == 1
        if is_liar:
            liars += 1
            assert refusal(path).startswith("damaged, its pages hold 3000000 values, and its end says 1; ")
    assert liars == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "none", "use_dictionary": False},
        {"compression": "gzip", "data_page_version": "2.0", "data_page_size": 100, "write_page_checksum": True},
        {"compression": "zstd", "row_group_size": 7, "write_page_index": True},
        {"compression": "snappy", "use_dictionary": False, "column_encoding": {"n": "DELTA_BINARY_PACKED",
                                                                               "s": "DELTA_BYTE_ARRAY"}},
    ],
)  # fmt: skip
def test_rows_of_every_form_are_those_that_pyarrow_reads_at_once(options: dict, tmp_path: Path) -> None:
    columns = {
        "n": list(range(500)),
        "s": [None if number % 9 == 0 else f"text {number // 3}" for number in range(500)],
        "of": [["ab"[: number % 3], "c"] if number % 5 else [] for number in range(500)],
        "image": [{"bytes": bytes([number % 256] * number), "path": f"{number}.png"} for number in range(500)],
    }
    path = written(tmp_path, columns, **options)
    with opened_parquet(path) as file:
        rows = [*rows_of(path, file, list(columns))]
    table = pyarrow.parquet.read_table(path)
    assert rows == [*zip(*(table.column(name).to_pylist() for name in columns), strict=True)]


@pytest.mark.parametrize("seed", range(4))
def test_bytes_that_an_attacker_changes_are_an_error_of_the_data(seed: int, tmp_path: Path) -> None:
    note = of_label({"_type": "ClassLabel", "names": ["zebra", "ant"]})
    files = [{"bytes": png(number), "path": f"{number}.png"} for number in range(20)]
    path = written(tmp_path, {"image": files, "label": [0, 1] * 10}, note)
    content, draw = path.read_bytes(), random.Random(seed)
    for _ in range(25):
        changed = bytearray(content)
        for _ in range(draw.randint(1, 6)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        path.write_bytes(changed)
        # any other error, or a death of the process, fails the test
        with suppress(DataError), opened_parquet(path) as file:
            for _ in rows_of(path, file, [name for name in ("image", "label") if name in file.schema_arrow.names]):
                pass
