"""Write data sets as shards: tar archives of many samples, in WebDataset's form."""

import io
import json
import os
import re
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datamodules.cache import replacing, sha256_of_text, unwritable
from datamodules.errors import DataError, require
from datamodules.labels import classes_of
from datamodules.own.scan import progress

CLASSES = "classes.txt"  # the names of the classes, one per line, in the order of their numbers
UNFINISHED = ".unfinished"  # a digest of what is being written into the folder; deleted after the last shard
_REMEDY = "give a folder with room that you may write into"


def write_shards(data: Any, folder: Path, samples_per_shard: int) -> int:
    """Write every split of a data module, and return the number of shards.

    Their names are {split}-{number}-of-{shards}.tar. Sample K of a shard has two files: K.png, or another suffix, has
    the bytes of the sample's own file if there is one; K.cls has the number of its class. If samples may have any
    number of classes, K.json has their list as "label" instead. classes.txt has the names of the classes. What is
    written depends on the samples only. An archive gets its name when it is complete, so writing can resume with the
    next archive.

    Args:
        data: A DataModule, after setup.
        folder: Where to write; it need not exist.
        samples_per_shard: The most samples in one archive.

    Raises:
        ArgumentError: If samples_per_shard is less than 1.
        DataError: If the folder contains other files, or cannot be written.
    """
    require(samples_per_shard >= 1, "samples_per_shard", "1 or more", samples_per_shard, "10000 is usual")
    names = data.class_names
    broken = [name for name in names if "\n" in name or "\r" in name]
    if broken:
        raise DataError(f"data: the class {broken[0]!r} has a line break in its name; rename it")
    what = f"{data.identity} {names} {samples_per_shard}"
    with _sole_writer(folder):
        _begin(folder, sha256_of_text(what))
        return _write(data, folder, samples_per_shard)


def _write(data: Any, folder: Path, samples_per_shard: int) -> int:
    shards = [
        (folder / f"{split}-{number:05}-of-{count:05}.tar", samples, first)
        for split, samples in data.splits().items()
        for count in (-(-len(samples) // samples_per_shard),)
        for number, first in enumerate(range(0, len(samples), samples_per_shard))
    ]
    for path, samples, first in progress(shards, f"writing {folder}"):
        if not path.exists():
            indices = range(first, min(first + samples_per_shard, len(samples)))
            write_tar(path, _members(data, samples, indices))
    with replacing(folder / CLASSES, _REMEDY) as temporary:
        temporary.write_text("".join(f"{name}\n" for name in data.class_names), encoding="utf-8", newline="\n")
    (folder / UNFINISHED).unlink()
    return len(shards)


def write_tar(path: Path, members: Iterator[tuple[str, bytes]], remedy: str = _REMEDY) -> None:
    """Write an archive of files (name, content). Its bytes depend on these only."""
    with replacing(path, remedy) as temporary, tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@contextmanager
def _sole_writer(folder: Path) -> Iterator[None]:
    """Make a folder, and prevent other processes from writing into it.

    A lock on the folder itself leaves no file behind, and a killed process releases it.
    """
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise unwritable(folder, error, _REMEDY) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{folder}: another process writes into it; wait for its end, or give another") from error
        except OSError as error:  # a file system without locks
            print(f"{folder}: cannot be locked ({error.strerror}); write into it in one process only", file=sys.stderr)
        yield
    finally:
        os.close(descriptor)


def _begin(folder: Path, digest: str) -> None:
    try:
        unfinished = folder / UNFINISHED
        is_begun = unfinished.is_file() and unfinished.read_text() == digest
        for leftover in folder.glob(".*.part" if is_begun else f".{UNFINISHED}.*.part"):
            leftover.unlink()  # of a killed process
        if is_begun:
            return
        if any(folder.iterdir()):
            raise DataError(f"{folder}: holds other files already; give an empty folder")
        with replacing(unfinished, _REMEDY) as temporary:
            temporary.write_text(digest)
    except OSError as error:
        raise unwritable(folder, error, _REMEDY) from error


def _members(data: Any, samples: Any, indices: range) -> Iterator[tuple[str, bytes]]:
    keys: set[str] = set()
    for index in indices:
        suffix, content = data.file_of(samples, index)
        label = samples.labels[index]
        if label.is_floating_point():
            raise DataError("data.amounts: shards hold classes and no amounts; train on the files themselves")
        key = _key(samples.names[index], suffix)
        if key in keys:
            key = f"{key}_{index}"
        keys.add(key)
        yield f"{key}{suffix}", content
        if label.ndim:
            (classes,) = classes_of(label[None])
            yield f"{key}.json", json.dumps({"label": classes}).encode()
        else:
            yield f"{key}.cls", str(int(label)).encode()


def _key(name: str, suffix: str) -> str:
    """The name of a sample as WebDataset's key: relative, and without a dot after the last slash."""
    stem = name[: -len(suffix)] if name.lower().endswith(suffix) else name
    parts = [part for part in stem.split("/") if part not in ("", "..")]
    return os.path.join("", *parts[:-1], re.sub(r"[.]", "_", parts[-1]))
