"""Find the recordings of tables from other programs: by the paths in a table, or by the table's own name."""

import os
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from datamodules.errors import DataError, say
from datamodules.own.files import Item
from datamodules.own.scan import walk


def below(folder: Path, items: Sequence[Item], table: Path, named: dict[str, tuple[str, Path]]) -> list[Item]:
    """The rows with paths below a folder instead of paths of another computer.

    A path is relative to the table's own folder, if that is below the folder, or else to the folder. If there is no
    such file, the longest end of the path that exists in the folder is used: C:/forest/site1/dawn.wav becomes
    site1/dawn.wav or else dawn.wav. If no end exists, the path does not change.

    Args:
        folder: The folder of the recordings.
        items: The rows.
        table: The file of the rows.
        named: For each file of the tables before the path that they have, and the table. This one's are added.

    Raises:
        DataError: If the paths of two recordings become the same file.
    """
    beside = os.path.relpath(table.parent.resolve(), folder.resolve())
    if beside.split(os.sep)[0] == os.pardir:
        beside = os.curdir
    files = {path: _file_of(folder, beside, path) for path in dict.fromkeys(item.path for item in items)}
    remedy = "keep the recordings in folders of their own, as they were"
    doubtful = []
    for path, file in files.items():
        other, before = named.setdefault(file, (path, table))
        if other.replace("\\", "/") == path.replace("\\", "/"):
            continue
        if before == table:
            what = f"{other} and {path} are two recordings, and {folder} has only {file} for both"
            raise DataError(f"{table}: {what}; {remedy}")
        doubtful.append(f"{path} is read as {file}, as is {other} in {before.name}")
    if doubtful:  # two persons may have listened to one recording, each in folders of their own
        more = f", and {len(doubtful) - 1} more" if len(doubtful) > 1 else ""
        say(f"{table}: {doubtful[0]}{more}; if these are two recordings, {remedy}")
    return [replace(item, path=files[item.path]) for item in items]


def _file_of(folder: Path, beside: str, path: str) -> str:
    parts = re.split(r"[\\/]+", path)
    ends = ("/".join(parts[first:]) for first in range(len(parts)))
    candidates = (os.path.normpath(os.path.join(beside, path)), path, *ends)
    return next((file for file in candidates if os.path.isfile(folder / file)), path)


class Recordings:
    """Finds the recording of a table by its name: NAME.wav for NAME.Table.1.selections.txt.

    Args:
        folder: The folder of the recordings.
        suffixes: The suffixes of recordings.
        tables: The folder of the tables.
    """

    def __init__(self, folder: Path, suffixes: frozenset[str], tables: Path) -> None:
        self.folder, self.suffixes, self.tables = folder, suffixes, tables

    @cached_property
    def _by_stem(self) -> dict[str, list[str]]:
        paths: dict[str, list[str]] = {}
        for path in walk(self.folder, self.suffixes):
            paths.setdefault(_composed(path.stem), []).append(str(path.relative_to(self.folder)))
        return paths

    def of(self, table: Path) -> str | None:
        """The path of the recording with the longest name with which the table's name begins; None if there is none.

        Of several recordings with that name, it is the one beside the table. Otherwise it is the one whose folder,
        below the folder of recordings, is that of the table below the folder of tables.

        Raises:
            DataError: If there are still several.
        """
        parts = _composed(table.name).split(".")
        stems = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        paths = next((self._by_stem[stem] for stem in stems if stem in self._by_stem), [])
        beside = [path for path in paths if (self.folder / path).parent.resolve() == table.parent.resolve()]
        inside = os.path.relpath(table.parent, self.tables)
        alike = [path for path in paths if os.path.dirname(path) == ("" if inside == os.curdir else inside)]
        chosen = beside or alike or paths
        if len(chosen) > 1:
            what = f"no column path, and both {chosen[0]} and {chosen[1]} may be its recording"
            raise DataError(f"{table}: {what}; put the table beside its recording, or add the column")
        return chosen[0] if chosen else None


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)
