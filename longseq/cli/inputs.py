"""The files that predict is asked for."""

import sys
from pathlib import Path
from typing import Any

from longseq.cli.errors import UserError
from longseq.cli.names import shown


def files_of(name: str, suffixes: frozenset[str]) -> list[str]:
    """The file itself, or all files of a folder with one of the suffixes, hidden ones left out."""
    if not name:
        raise UserError("input: empty, as of a variable that is not set; give a file or a folder")
    path = Path(name)
    if path.is_file():
        return [str(path)]
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; give one with --input", exit_code=3)
    found = sorted(
        str(file)
        for file in path.rglob("*")
        if file.suffix.lower() in suffixes
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not found:
        raise UserError(f"{path}: holds no file to classify; it may hold {', '.join(sorted(suffixes))}", exit_code=3)
    return found


def readable(datamodule: Any, paths: list[str]) -> list[str]:
    """The files without the broken ones, which are named, where ``--data.on_error skip`` wants it; else all."""
    if datamodule.on_error != "skip":
        return paths
    kept = []
    for path in paths:
        try:
            datamodule.read(path)
        except Exception as error:
            if getattr(error, "exit_code", None) != 3:  # broken data
                raise
            print(shown(f"left out: {error}"), file=sys.stderr)
        else:
            kept.append(path)
    if not kept:
        raise UserError("input: no file of it can be read; give others", exit_code=3)
    return kept
