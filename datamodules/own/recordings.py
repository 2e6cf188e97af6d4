"""Where the recordings are that tables of other programs name, or whose names these tables have."""

import os
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from datamodules.errors import DataError
from datamodules.own.files import Item
from datamodules.own.scan import walk


def below(folder: Path, items: Sequence[Item], table: Path) -> list[Item]:
    """Rows whose paths are those of another computer, with the paths of the same recordings below a folder.

    A path leads to the recording that it names from the table's own folder, if that is below the folder, or else from
    the folder. Where there is none, the file is that of the path's longest end that is there: C:/forest/site1/dawn.wav
    is site1/dawn.wav or else dawn.wav. A path of which no end is there stays as it is.

    Args:
        folder: Where the recordings are.
        items: The rows.
        table: The file of the rows, for messages.

    Raises:
        DataError: If the paths of two recordings end with one file.
    """
    beside = os.path.relpath(table.parent.resolve(), folder.resolve())
    if beside.split(os.sep)[0] == os.pardir:
        beside = os.curdir
    files = {path: _file_of(folder, beside, path) for path in dict.fromkeys(item.path for item in items)}
    first: dict[str, str] = {}
    for path, file in files.items():
        other = first.setdefault(file, path)
        if other.replace("\\", "/") != path.replace("\\", "/"):
            what = f"{other} and {path} are two recordings, and {folder} has only {file} for both"
            raise DataError(f"{table}: {what}; keep the recordings in folders of their own, as they were")
    return [replace(item, path=files[item.path]) for item in items]


def _file_of(folder: Path, beside: str, path: str) -> str:
    parts = re.split(r"[\\/]+", path)
    ends = ("/".join(parts[first:]) for first in range(len(parts)))
    tried = (os.path.normpath(os.path.join(beside, path)), path, *ends)
    return next((file for file in tried if os.path.isfile(folder / file)), path)


class Recordings:
    """The recordings of a folder, to find that of a table which names none: NAME.wav, NAME.Table.1.selections.txt.

    Args:
        folder: Where the recordings are.
        suffixes: Those of recordings.
        tables: The folder of the tables.
    """

    def __init__(self, folder: Path, suffixes: frozenset[str], tables: Path) -> None:
        self.folder, self.suffixes, self.tables = folder, suffixes, tables

    @cached_property
    def _by_stem(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for path in walk(self.folder, self.suffixes):
            found.setdefault(_composed(path.stem), []).append(str(path.relative_to(self.folder)))
        return found

    def of(self, table: Path) -> str | None:
        """The path of the recording with the longest name that the table's begins with: of several ones the one beside
        the table, or in the same folder below that of the recordings as the table is below that of the tables. None if
        no recording has such a name.

        Raises:
            DataError: If there are several.
        """
        parts = _composed(table.name).split(".")
        stems = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        found = next((self._by_stem[stem] for stem in stems if stem in self._by_stem), [])
        beside = [path for path in found if (self.folder / path).parent.resolve() == table.parent.resolve()]
        inside = os.path.relpath(table.parent, self.tables)
        alike = [path for path in found if os.path.dirname(path) == ("" if inside == os.curdir else inside)]
        chosen = beside or alike or found
        if len(chosen) > 1:
            what = f"no column path, and both {chosen[0]} and {chosen[1]} may be its recording"
            raise DataError(f"{table}: {what}; put the table beside its recording, or add the column")
        return chosen[0] if chosen else None


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)
