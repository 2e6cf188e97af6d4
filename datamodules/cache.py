"""Results that are stored from run to run: statistics, scans of folders, images after decoding or drawing."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from datamodules.errors import DataError


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_text(text: str) -> str:
    """The SHA-256 of a text, which may contain the names of files, and so bytes that are not UTF-8."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def cache_folder(part: str = "") -> Path:
    """The cache folder, or a part of it: LONGSEQ_CACHE, or longseq in the user's cache. Users may delete it."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "longseq"
    folder = Path(os.environ.get("LONGSEQ_CACHE") or default) / part
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be created ({error.strerror}); set LONGSEQ_CACHE to a folder that can be"
        ) from error
    return folder


def cache_file(part: str, what: str, suffix: str) -> Path:
    """The cache's file for a result; `what` names everything that the result depends on."""
    return cache_folder(part) / f"{sha256_of_text(what)}{suffix}"


def stamp(path: Path) -> str:
    """A text that changes when the file is replaced: its path, size and time."""
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time make a file of the cache. The others wait, and then find the file.

    A read-only cache works if it contains the file. On a file system without locks, two processes may make the file.
    """
    import fcntl

    lock_path = path.with_name(f".{path.name}.lock")
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(open(lock_path, "w"))
        except OSError as error:
            if not (path.exists() or lock_path.exists()):
                raise unwritable(path, error) from error
        else:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


_ROOM = "make room or set LONGSEQ_CACHE"


@contextmanager
def replacing(path: Path, remedy: str = _ROOM) -> Iterator[Path]:
    """A temporary path, which replaces `path` once its file is complete, and is deleted after an error.

    If this process is killed, the next process that writes into the folder deletes the temporary file.

    Raises:
        DataError: If the file cannot be written; the message ends with the remedy.
    """
    import fcntl

    _delete_leftovers(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:  # the caller opens the path again; this process holds the lock meanwhile
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise unwritable(path, error, remedy) from error
    finally:
        temporary.unlink(missing_ok=True)


@cache
def _delete_leftovers(folder: Path) -> None:
    """Delete the temporary files of killed processes in a folder, once in this process: nobody holds their locks.

    The process id in the name is not enough, because other containers or machines may share the folder.
    """
    import fcntl

    for path in folder.glob(".*.part"):
        if re.fullmatch(r"\..+\.\d+\.part", path.name):
            with suppress(OSError), open(path, "rb") as file:  # of another user, or on a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def cached(part: str, what: str, compute: Callable[[], Any], mmap: bool = False) -> Any:
    """The result of `compute`, which one process computes once: tensors and plain values in a file of the cache.

    Args:
        part: The subfolder of the cache.
        what: Names everything that the result depends on.
        compute: Returns the result. It is called if the file is missing or truncated.
        mmap: Whether tensors stay in the file, and are read as they are needed.
    """
    path = cache_file(part, what, ".pt")
    with locked(path):
        with suppress(Exception):  # for a truncated file torch.load raises EOFError, RuntimeError, UnpicklingError, ...
            return torch.load(path, weights_only=True, mmap=mmap)
        result = compute()
        with replacing(path) as temporary, open(temporary, "wb") as file:  # torch would reword the disk's errors
            torch.save(result, file)
        return result


def unwritable(path: Path, error: OSError, remedy: str = _ROOM) -> DataError:
    """The error for a file that cannot be written. Its exit code is that of a full disk, because no data is broken."""
    refusal = DataError(f"{path}: cannot be written ({error.strerror}); {remedy}")
    refusal.exit_code = 6
    return refusal
