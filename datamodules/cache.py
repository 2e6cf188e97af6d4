"""Results that are kept from run to run: statistics, scans of folders, images as they were read or generated."""

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


def cache_folder(part: str = "") -> Path:
    """The cache, or a part of it: LONGSEQ_CACHE, or longseq in the user's cache folder. It may be deleted any time."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "longseq"
    folder = Path(os.environ.get("LONGSEQ_CACHE") or default) / part
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be created ({error.strerror}); set LONGSEQ_CACHE to a folder that can be"
        ) from error
    return folder


def stamp(path: Path) -> str:
    """What changes if a file is replaced by another: its path, size and time."""
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time make a file of the cache; the others wait, and then find it. A cache that may only be
    read does, where it holds the file. On a file system without locks two processes may make the same file."""
    import fcntl

    named = path.with_name(f".{path.name}.lock")
    with ExitStack() as held:
        try:
            lock = held.enter_context(open(named, "w"))
        except OSError as error:
            if not (path.exists() or named.exists()):
                raise unwritable(path, error) from error
        else:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


_ROOM = "make room or set LONGSEQ_CACHE"


@contextmanager
def replacing(path: Path, remedy: str = _ROOM) -> Iterator[Path]:
    """A temporary path. It replaces `path` when the file is complete, and is deleted if it is not. If this process is
    killed, the next one that writes into the folder deletes it.

    Raises:
        DataError: If it cannot be written; the message ends with the remedy.
    """
    import fcntl

    _delete_leftovers(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as held:  # writers open the same file, so their process has the lock while it lives
            with suppress(OSError):  # a file system without locks
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise unwritable(path, error, remedy) from error
    finally:
        temporary.unlink(missing_ok=True)


@cache
def _delete_leftovers(folder: Path) -> None:
    """Delete, once in a process, the temporary files in a folder whose writers were killed: nobody has their locks. The
    number of a process says less, because others in a container or on another machine may share the folder."""
    import fcntl

    for path in folder.glob(".*.part"):
        if re.fullmatch(r"\..+\.\d+\.part", path.name):
            with suppress(OSError), open(path, "rb") as file:  # of another user, or on a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def kept(part: str, what: str, compute: Callable[[], Any]) -> Any:
    """A result that is computed once, by one process: tensors and plain values in a file of the cache.

    Args:
        part: The part of the cache.
        what: Names everything that the result depends on.
        compute: Returns the result, if the file is missing or cut off.
    """
    path = cache_folder(part) / f"{hashlib.sha256(what.encode(errors='surrogateescape')).hexdigest()}.pt"
    with locked(path):
        with suppress(Exception):  # torch.load answers a cut file with EOFError, RuntimeError, UnpicklingError, ...
            return torch.load(path, weights_only=True)
        result = compute()
        with replacing(path) as temporary, open(temporary, "wb") as file:  # torch would reword the disk's errors
            torch.save(result, file)
        return result


def unwritable(path: Path, error: OSError, remedy: str = _ROOM) -> DataError:
    """The error to raise if a file cannot be written: no data is broken, and the exit code is that of a full disk."""
    refused = DataError(f"{path}: cannot be written ({error.strerror}); {remedy}")
    refused.exit_code = 6
    return refused
