"""The input files of the command predict."""

import sys
from pathlib import Path
from typing import Any

from longseq.cli.errors import UserError
from longseq.cli.names import shown


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
