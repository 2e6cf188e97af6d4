"""Give each file of a table one path, even if its rows spell it in different ways."""

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from datamodules.own.files import Item


def with_one_spelling(folder: Path, items: Sequence[Item]) -> list[Item]:
    """The rows with one path for each file, because a file with two paths could get into two splits.

    A path is changed to the Unicode form of the file's name: Macs write letters and accents as separate characters. An
    absolute path, or a path that begins with "..", becomes relative if its file is below the folder. If a file still
    has several paths, all its rows get the first one.

    Links to folders are followed. Links to files are not: git-annex stores equal files once, and each link to such a
    file is a separate file.

    Args:
        folder: The folder of relative paths.
        items: The rows, whose paths are normalized.
    """
    places: dict[str, tuple[str, str]] = {}  # by folder: a look-up of every file on the disk would take much longer
    spellings: dict[tuple[str, str], str] = {}
    composed: dict[str, str] = {}
    rows = []
    for item in items:
        if item.path not in composed:
            composed[item.path] = _as_on_disk(folder, item.path)
        parent, name = os.path.split(composed[item.path])
        if parent not in places:
            places[parent] = (os.path.realpath(folder / parent), _below(folder, parent))
        real_parent, short_parent = places[parent]
        spelling = spellings.setdefault((real_parent, name), os.path.join(short_parent, name))
        rows.append(item if spelling == item.path else replace(item, path=spelling))
    return rows


def _as_on_disk(folder: Path, path: str) -> str:
    """The path in the Unicode form that exists on the disk."""
    if path.isascii() or os.path.lexists(folder / path):
        return path
    forms = (unicodedata.normalize(form, path) for form in ("NFC", "NFD"))
    return next((other for other in forms if os.path.lexists(folder / other)), path)


def _below(folder: Path, path: str) -> str:
    """The path relative to the folder, if it is below the folder, either as written or after following links."""
    if not (os.path.isabs(path) or _leads_out(path)):
        return path
    real = os.path.realpath(folder / path)
    for relative in (os.path.relpath(folder / path, folder), os.path.relpath(real, os.path.realpath(folder))):
        # ".." after a link leads to another folder than the text of the path says
        if not _leads_out(relative) and os.path.realpath(folder / relative) == real:
            return "" if relative == os.curdir else relative
    return path


def _leads_out(path: str) -> bool:
    return path.split(os.sep)[0] == os.pardir
