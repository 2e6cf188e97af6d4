"""Checkpoints on disk: complete or absent, with a SHA-256 file next to them, and read without running code in them."""

import hashlib
import mmap
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from longseq.arguments import ArgumentError

# The entries of a checkpoint from training. A checkpoint of another program may have none of them.
LAYOUT = {
    "hyper_parameters": dict,
    "state_dict": dict,
    "epoch": int,
    "global_step": int,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
}


class CheckpointError(Exception):
    """A checkpoint cannot be used; the message names the file and the remedy."""

    exit_code = 4


class StorageError(Exception):
    """A checkpoint cannot be written; the message names the file and the remedy."""

    exit_code = 6


def remove_checkpoint(path: str | PathLike) -> None:
    """Remove a checkpoint and its SHA-256 file."""
    if Path(path).is_dir():
        shutil.rmtree(path)
    for file in (Path(path), _sums_file(Path(path))):
        file.unlink(missing_ok=True)


def set_aside(path: Path) -> None:
    """Rename a checkpoint before one of the other form replaces it, because no rename replaces a file by a folder, or a
    folder by a file. If the process is killed before the new one exists, --resume finds this one."""
    remove_checkpoint(aside(path))
    os.rename(path, aside(path))
    with suppress(FileNotFoundError):
        os.rename(_sums_file(path), _sums_file(aside(path)))


def aside(path: Path) -> Path:
    """The path of a checkpoint after `set_aside`."""
    return path.with_name(f"old-{path.name}")


def write_checkpoint(checkpoint: dict[str, Any], path: str | PathLike) -> None:
    """Write a checkpoint so that a complete file exists, old or new, even if the process is killed.

    A temporary file beside it is written, synced to the disk and read back before it is renamed. Meanwhile the SHA-256
    file holds the sums of both files.

    Raises:
        StorageError: If the disk is full or the folder cannot be written; an older file stays unchanged.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # open("xb") fails if the file or a link exists
        with open(temporary, "xb") as file:
            hashing = _HashingFile(file)
            torch.save(checkpoint, hashing)  # type: ignore[arg-type]  # torch only calls write and flush
            file.flush()
            os.fsync(file.fileno())
        new = hashing.sha256.hexdigest()
        if sha256_of(temporary) != new:
            raise OSError("what was read back is not what was written")
        if path.is_dir():  # the run used a strategy that writes folders before
            set_aside(path)
        _write_sums(path, [new, *(_sums(path) or [])])
        os.replace(temporary, path)
        _write_sums(path, [new])
        remove_checkpoint(aside(path))
    except (OSError, RuntimeError) as error:  # torch wraps disk errors in a RuntimeError
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or getattr(error.__context__, "strerror", None) or str(error)
        raise StorageError(
            f"{path}: the checkpoint cannot be written ({reason.splitlines()[0]}); make room or choose another "
            "--trainer.default_root_dir, then --resume: an older checkpoint is unchanged"
        ) from error


def write_text(path: Path, text: str, sync: bool = False) -> None:
    """Write a text file so that a complete file exists, old or new, even if the process is killed; with sync even if
    the power fails."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.unlink(missing_ok=True)  # open("x") fails if the file or a link exists
    with open(temporary, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path with the file's name in a temporary folder beside it. After the block, all files written to that
    folder replace those at the destination. After an error the old files stay."""
    folder = path.with_name(f".{path.name}.part")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder / path.name
        for file in folder.iterdir():
            os.replace(file, path.parent / file.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_foreign(path: Path, mark: bytes) -> bool:
    """Whether a file exists that is not empty and was not written by longseq.

    Args:
        path: The file.
        mark: A regular expression that matches in every file of this kind written by longseq.
    """
    if not path.is_file() or not path.stat().st_size:
        return False
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return re.search(mark, content) is None


def refuse_foreign(path: Path, argument: str, mark: bytes) -> None:
    """Check that writing a file replaces no file of another program.

    Raises:
        ValueError: If it would; the message names the argument.
    """
    if is_foreign(path, mark):
        what = f"must be a new file, or one that longseq has written, got {path}, which it has not"
        raise ArgumentError(argument, f"{what}; give another, or move that file away")


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_whole(
    path: str | PathLike, map_location: Any = "cpu", sha256_of: Callable[[Path], str] = sha256_of
) -> dict[str, Any]:
    """Read a checkpoint as tensors and plain types, without running code in it.

    Args:
        path: The file.
        map_location: The device for the tensors; on ``meta`` they have no values, and none is read.
        sha256_of: Computes the SHA-256 of a file.

    Raises:
        CheckpointError: If the file does not exist, is damaged, or is not a checkpoint.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; give a checkpoint of fit, such as runs/digits/0/best.ckpt")
    sums = _sums(path)
    try:
        if sums is not None and sha256_of(path) not in sums:
            raise CheckpointError(
                f"{path}: damaged, because its SHA-256 differs from its .sha256 file{_good_one_near(path)}"
            )
        _refuse_packed(path)
        # weights_only is explicit, because otherwise an environment variable could allow code to run
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # torch raises many kinds of errors for broken files
        what = f"not a readable checkpoint ({type(error).__name__})"
        raise CheckpointError(f"{path}: {what}{_good_one_near(path)}") from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(
            f"{path}: holds a {type(checkpoint).__name__} instead of a checkpoint{_good_one_near(path)}"
        )
    for name, kind in LAYOUT.items():
        if not isinstance(checkpoint.get(name, kind()), kind):
            what = f"its {name} is a {type(checkpoint[name]).__name__}"
            raise CheckpointError(f"{path}: not a checkpoint of longseq, {what}{_good_one_near(path)}")
    if not all(isinstance(weight, Tensor) for weight in checkpoint.get("state_dict", {}).values()):
        raise CheckpointError(f"{path}: not a checkpoint of longseq, its weights are not tensors{_good_one_near(path)}")
    return checkpoint


def _refuse_packed(path: Path) -> None:
    """Check that a checkpoint needs no more memory than the size of its file. torch writes no compressed entries and
    none that share bytes, but it reads them.

    Raises:
        CheckpointError: If it needs more.
    """
    with zipfile.ZipFile(path) as entries:
        parts = entries.infolist()
    if any(part.compress_type for part in parts) or sum(part.file_size for part in parts) > path.stat().st_size:
        raise CheckpointError(
            f"{path}: would become larger than its file, unlike any checkpoint of longseq; give another"
        )


class _HashingFile:
    """A file that computes the SHA-256 of what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        self.sha256.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _sums_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _sums(path: Path) -> list[str] | None:
    """The sums in the SHA-256 file of a checkpoint, which has the format of sha256sum. None if there is no such file;
    an empty list if it cannot be read, so that the checkpoint counts as damaged."""
    try:
        return [line.split()[0] for line in _sums_file(path).read_text().splitlines() if line.strip()]
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        return []


def _write_sums(path: Path, sums: list[str]) -> None:
    write_text(_sums_file(path), "".join(f"{digest}  {path.name}\n" for digest in sums), sync=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # writes both renames to the disk
    finally:
        os.close(folder)


def _good_one_near(path: Path) -> str:
    others = [other for other in path.parent.glob("*.ckpt") if other != path and other.is_file()]
    for other in sorted(others, key=lambda file: file.stat().st_mtime, reverse=True):
        sums = _sums(other)
        if sums and sha256_of(other) in sums:
            return f"; use {other}, the newest good one"
    return "; give another"
