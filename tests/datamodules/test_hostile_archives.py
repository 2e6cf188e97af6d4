"""Archives of an attacker: what a name or a header claims takes no memory, and is one line."""

import random
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from datamodules import DataError, ImageShards
from datamodules.archives._shard_index import index_of
from datamodules.labels import labels_of
from datamodules.sets.fetch import unpack
from longseq.reports.cell import peak_of

MIB = 2**20
PNG = frozenset({".png"})
END = bytes(1024)


def header(name: str, size: int, kind: bytes = b"0", more: bytes = b"") -> bytes:
    """A header with a size that tarfile writes only where there is content: more than eight GiB and less than nothing
    in base 256."""
    of_size = b"%011o\0" % size if 0 <= size < 8**11 else (b"\xff" if size < 0 else b"\x80")
    of_size = of_size if len(of_size) == 12 else of_size + (size % 256**11).to_bytes(11, "big")
    block = bytearray(512)
    block[:100] = name.encode().ljust(100, b"\0")
    block[100:124] = b"%07o\0" % 0o644 + (b"%07o\0" % 0) * 2
    block[124:136], block[136:148], block[156:157] = of_size, b"%011o\0" % 0, kind
    block[257:265] = b"ustar\0" + b"00" if kind != b"S" else b"ustar  \0"
    block[345 : 345 + len(more)] = more
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def with_pax(**values: str) -> bytes:
    """A member with these values before it."""
    lines = b""
    for name, value in values.items():
        line = f" {name.replace('_', '.')}={value}\n".encode()
        length = next(n for n in range(len(line), len(line) + 9) if len(str(n)) + len(line) == n)
        lines += str(length).encode() + line
    return header("x", len(lines), b"x") + padded(lines) + header("a.png", 1) + padded(b"x")


def gnu_sparse(size: int) -> bytes:
    """The old form: one block of content at the start of a file of this size."""
    size_of_block, whole = b"%011o\0" % 512, b"\x80" + size.to_bytes(11, "big")
    more = bytes(41) + b"%011o\0" % 0 + size_of_block + bytes(72) + b"\0" + whole
    return header("a.png", 512, b"S", more) + bytes(512)


ARCHIVES: dict[str, Callable[[], bytes]] = {
    "a sparse file of a terabyte": lambda: gnu_sparse(2**40),
    "a sparse file of a terabyte in pax": lambda: with_pax(
        GNU_sparse_major="0", GNU_sparse_minor="1", GNU_sparse_map="0,1", GNU_sparse_size=str(2**40)
    ),
    "a size of a terabyte in pax": lambda: with_pax(size=str(2**40)),
    "a size of no number in pax": lambda: with_pax(size="9" * 5000),
    "a size below nothing in pax": lambda: with_pax(size="-1024"),
    "pax of a terabyte": lambda: header("x", 2**40, b"x") + padded(b"9 a=b\n"),
    "pax of 2**80 bytes": lambda: header("x", 2**80, b"x") + padded(b"9 a=b\n"),
    "pax of less than nothing": lambda: header("x", -1024, b"x") + padded(b"9 a=b\n"),
    "a name of a terabyte": lambda: header("x", 2**40, b"L") + padded(b"a.png"),
    "a name of 2**80 bytes": lambda: header("x", 2**80, b"L") + padded(b"a.png"),
    "names of names of names": lambda: (header("x", 6, b"L") + padded(b"a.png\0")) * 5000,
    "a file of 2**80 bytes": lambda: header("a.png", 2**80) + bytes(512),
    "a file of less than nothing": lambda: header("a.png", -1024) + bytes(512),
    "a file that ends where it begins": lambda: header("a.png", -512) + header("b.png", -1024),
    "a label of 17 MiB of brackets": lambda: (
        header("a.png", 1)
        + padded(b"x")
        + header("a.json", 17 * MIB)
        + padded(b"[" + b"[]," * (17 * MIB // 3 - 1) + b"[]]")
    ),
}


@pytest.mark.parametrize("archive", ARCHIVES)
def test_an_archive_that_claims_more_than_it_holds_is_named(archive: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(ARCHIVES[archive]() + header("a.cls", 1) + padded(b"0") + END)
    peak = peak_of(torch.device("cpu"))
    with pytest.raises(DataError) as error:
        index_of(path, PNG, "label")
    assert peak() < 200 * MIB
    assert str(error.value).startswith(f"{path}: ") and ";" in str(error.value) and "\n" not in str(error.value)


def test_a_name_that_claims_many_shards_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "a-0-of-99999999999.tar").write_bytes(END)
    peak = peak_of(torch.device("cpu"))
    with pytest.raises(DataError, match=r"/a-00000000001-of-99999999999\.tar: missing, and others of its 99999999999 "):
        ImageShards(str(tmp_path)).setup()
    assert peak() < 100 * MIB


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_bytes_of_an_archive_that_an_attacker_changes_are_an_error_of_the_data(form: int, tmp_path: Path) -> None:
    path, draw = tmp_path / "a.tar", random.Random(form)
    with tarfile.open(path, "w", format=form) as archive:
        for name in ("a.png", "a.cls", f"{'long' * 40}.png", f"{'long' * 40}.cls"):
            archive.addfile(tarfile.TarInfo(name))
    content = path.read_bytes()[:6144]
    for _ in range(200):
        changed = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(changed))
            changed[at - at % 512 + draw.choice((at % 512, 124, 125, 130, 156))] = draw.choice((0, 48, 128, 255))
        path.write_bytes(changed)
        with suppress(DataError):
            index_of(path, PNG, "label")


@pytest.mark.parametrize("form", ["zip", "tar.gz"])
def test_an_archive_that_unpacks_to_far_more_than_itself_is_named(form: str, tmp_path: Path) -> None:
    (tmp_path / "zeros").write_bytes(bytes(50 * MIB))
    archive = tmp_path / f"a.{form}"
    if form == "zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
            for name in ("a.png", "b.png"):
                packed.write(tmp_path / "zeros", name)
    else:
        with tarfile.open(archive, "w:gz") as packed:
            for name in ("a.png", "b.png"):
                packed.add(tmp_path / "zeros", name)
    with pytest.raises(DataError, match=rf"^{archive}: becomes 100 times its size or more; do not trust this archive$"):
        unpack(archive, tmp_path / "unpacked")
    assert sum(file.stat().st_size for file in (tmp_path / "unpacked").iterdir()) <= 64 * MIB


def test_labels_that_fit_into_no_memory_are_named() -> None:
    with pytest.raises(DataError, match=r"^data: 100,000 samples of 100,000 classes take 75 GiB as labels; keep "):
        labels_of([[0]] * 100_000, 100_000, are_many=True)
