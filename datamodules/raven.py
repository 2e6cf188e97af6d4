"""What tables of Raven and BirdNET need: names of columns, and where their recordings are."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from datamodules.errors import DataError
from datamodules.files import Item

BEGIN_TIME = "Begin Time (s)"  # counted from the first recording, as its end is; every table of Raven has it
BEGIN_PATH = "Begin Path"  # where a recording was on the computer on which Raven ran, perhaps one with Windows
BIRDNETS_PATH = "File"  # the same of BirdNET


def below(folder: Path, items: Sequence[Item], table: Path) -> list[Item]:
    """Rows whose paths are those of another computer, with the paths of the same recordings below a folder.

    Where there is no such path below the folder, the file is that of the path's longest end that is there:
    C:/forest/site1/dawn.wav is site1/dawn.wav or else dawn.wav. A path of which no end is there stays as it is.

    Args:
        folder: Where the recordings are.
        items: The rows.
        table: The file of the rows, for messages.

    Raises:
        DataError: If the paths of two recordings end with one file.
    """
    files = {path: _file_of(folder, path) for path in dict.fromkeys(item.path for item in items)}
    first: dict[str, str] = {}
    for path, file in files.items():
        other = first.setdefault(file, path)
        if other.replace("\\", "/") != path.replace("\\", "/"):
            what = f"{other} and {path} are two recordings, and {folder} has only {file} for both"
            raise DataError(f"{table}: {what}; keep the recordings in folders of their own, as they were")
    return [replace(item, path=files[item.path]) for item in items]


def _file_of(folder: Path, path: str) -> str:
    parts = re.split(r"[\\/]+", path)
    ends = ("/".join(parts[first:]) for first in range(len(parts)))
    return next((file for file in (path, *ends) if os.path.isfile(folder / file)), path)
