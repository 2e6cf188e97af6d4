"""The input files of the command predict."""

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from longseq.cli.errors import UserError
from longseq.cli.names import shown
from longseq.cli.runs.folders import is_run
from longseq.training.data import Part

_EXAMINED_SECONDS = 60.0  # of each recording are read before prediction starts
# Folders of thumbnails, deleted files and snapshots. datamodules/own/scan.py leaves out the same ones.
OF_SYSTEMS = frozenset(
    {"@eaDir", "#recycle", "#snapshot", "@Recycle", "@Recently-Snapshot", "$RECYCLE.BIN", "System Volume Information",
     "__MACOSX", "lost+found"}
)  # fmt: skip


def files_of(name: str, suffixes: frozenset[str]) -> list[str]:
    """The file itself, or all files of a folder that have one of the suffixes, except hidden files and runs.

    What is left out is printed.

    Raises:
        UserError: If there is no such file.
    """
    if not name:
        raise UserError("input: empty, perhaps from a variable that is not set; give a file or a folder")
    path = Path(name)
    if path.is_file():
        return [str(path)]
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; give one with --input", exit_code=3)
    runs, of_systems = list[str](), Counter[str]()
    below = list(_below(path, runs, of_systems))
    live = [file for file in below if file.is_file()]
    files = sorted(str(file) for file in live if file.suffix.lower() in suffixes)
    kinds = Counter(file.suffix.lower() or "without a suffix" for file in live if file.suffix.lower() not in suffixes)
    dead = [file for file in below if file.suffix.lower() in suffixes and file.is_symlink() and not file.exists()]
    if runs:
        others = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        print(shown(f"{path}: left out the folder {runs[0]}{others}: runs of longseq"), file=sys.stderr)
    if of_systems:
        listed = ", ".join(f"{number} {name}" for name, number in of_systems.most_common())
        print(shown(f"{path}: left out folders that a system has made: {listed}"), file=sys.stderr)
    if kinds:
        listed = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common(10))
        print(shown(f"{path}: left out {kinds.total()} files of other kinds: {listed}"), file=sys.stderr)
    if dead:
        lead = "link leads" if len(dead) == 1 else "links lead"
        print(shown(f"left out: {len(dead)} {lead} nowhere, such as {min(dead)}"), file=sys.stderr)
    if not files:
        raise UserError(f"{path}: holds no file to classify; it may hold {', '.join(sorted(suffixes))}", exit_code=3)
    return files


def _below(folder: Path, runs: list[str], of_systems: Counter[str]) -> Iterator[Path]:
    """All files in a folder and its subfolders that are not hidden. Folders of runs and those that systems make are
    left out, and noted. As in training, links are followed once, and never upwards."""
    seen: set[Path] = set()
    for path, folders, names in os.walk(folder, followlinks=True):
        if (real := Path(path).resolve()) in seen:
            folders.clear()
            continue
        seen.add(real)
        if is_run(real):
            folders.clear()
            runs.append(path)
            continue
        of_systems.update(OF_SYSTEMS.intersection(folders))
        inside = [Path(path) / name for name in folders if not (name.startswith(".") or name in OF_SYSTEMS)]
        folders[:] = [inner.name for inner in inside if not real.is_relative_to(inner.resolve())]
        yield from (Path(path) / name for name in names if not name.startswith("."))


def parts_of(
    datamodule: Any, paths: Sequence[str], window: float | None, hop: float | None, any_length: bool
) -> dict[str, list[Part]]:
    """The parts of each file; each part is one input. With ``--data.on_error skip`` a file that cannot be read is left
    out, and printed.

    Args:
        datamodule: Divides a file into parts.
        paths: The files.
        window: As in DataContract.parts.
        hop: As in DataContract.parts.
        any_length: Whether the model accepts inputs of any length.

    Raises:
        UserError: If window or hop does not fit, or if no file can be read.
    """
    by_path: dict[str, list[Part]] = {}
    for path in paths:
        try:
            parts = datamodule.parts(path, window, hop, any_length)
            if datamodule.on_error == "skip":
                _, start, end = parts[0]
                datamodule.read_part((path, start, None if end is None else min(end, start + _EXAMINED_SECONDS)))
            by_path[path] = parts
        except Exception as error:
            if hasattr(error, "argument"):
                raise UserError(f"{error.argument}: {error.what}") from error  # type: ignore[attr-defined]
            if datamodule.on_error != "skip" or getattr(error, "exit_code", None) != 3:  # broken data
                raise
            print(shown(f"left out: {error}"), file=sys.stderr)
    if not by_path:
        raise UserError("input: none of its files can be read; give others", exit_code=3)
    return by_path


def say_of_windows(by_path: Mapping[str, Sequence[Part]]) -> None:
    """Print which files are processed in windows although none were asked for."""
    several = [parts for parts in by_path.values() if len(parts) > 1]
    if several:
        path, start, end = several[0][0]
        assert end is not None  # only sounds have several parts
        seconds = end - start
        others = f" and {len(several) - 1} more" if len(several) > 1 else ""
        print(
            f"{shown(path)}{others}: longer than the model's clips of {seconds:g} s, so processed in windows of that "
            f"length and answered once; --window {seconds:g} prints each window",
            file=sys.stderr,
        )
