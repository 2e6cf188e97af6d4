"""The input files of the command predict."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longseq.cli.errors import UserError
from longseq.cli.names import shown
from longseq.training.data import Part


def files_of(name: str, suffixes: frozenset[str]) -> list[str]:
    """The file itself, or all files of a folder with one of the suffixes, except hidden ones."""
    if not name:
        raise UserError("input: empty, perhaps from a variable that is not set; give a file or a folder")
    path = Path(name)
    if path.is_file():
        return [str(path)]
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; give one with --input", exit_code=3)
    files = sorted(
        str(file)
        for file in path.rglob("*")
        if file.suffix.lower() in suffixes
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise UserError(f"{path}: holds no file to classify; it may hold {', '.join(sorted(suffixes))}", exit_code=3)
    return files


def readable(datamodule: Any, paths: list[str]) -> list[str]:
    """All files; with ``--data.on_error skip`` only those that can be read, and the others are printed."""
    if datamodule.on_error != "skip":
        return paths
    good = []
    for path in paths:
        try:
            datamodule.read(path)
        except Exception as error:
            if getattr(error, "exit_code", None) != 3:  # broken data
                raise
            print(shown(f"left out: {error}"), file=sys.stderr)
        else:
            good.append(path)
    if not good:
        raise UserError("input: none of its files can be read; give others", exit_code=3)
    return good


def parts_of(
    datamodule: Any, paths: Sequence[str], window: float | None, hop: float | None, any_length: bool
) -> list[Part]:
    """The parts of all files that are inputs of their own. A line says so if a file has several and no window is asked
    for.

    Args:
        datamodule: Knows the parts of a file.
        paths: The files.
        window: As DataContract.parts takes it.
        hop: As DataContract.parts takes it.
        any_length: Whether the model takes inputs of any length.
    """
    try:
        by_path = {path: datamodule.parts(path, window, hop, any_length) for path in paths}
    except ValueError as error:
        if not hasattr(error, "argument"):
            raise
        raise UserError(f"{error.argument}: {error.what}") from error  # type: ignore[attr-defined]
    several = {path: parts for path, parts in by_path.items() if len(parts) > 1}
    if several and window is None and hop is None:
        path, parts = next(iter(several.items()))
        seconds = parts[0][2] - parts[0][1]
        others = f" and {len(several) - 1} more" if len(several) > 1 else ""
        print(
            f"{shown(path)}{others}: longer than the model's clips of {seconds:g} s, so heard in windows of that "
            f"length and answered once; --window {seconds:g} prints each window",
            file=sys.stderr,
        )
    return [part for parts in by_path.values() for part in parts]
