"""ESC-50: fifty classes of environmental sounds, in five folds."""

import csv
from pathlib import Path
from typing import Any, Literal

from datamodules.errors import DataError
from datamodules.own.audio_folder import AudioFiles
from datamodules.own.files import Item
from datamodules.sets.fetch import fetch_and_unpack, folder_with

URL = "https://github.com/karolpiczak/ESC-50/archive/master.zip"
FOLDER = "ESC-50-master"


class ESC50(AudioFiles):
    """Environmental sounds of 5 seconds at 44.1 kHz in the official five folds; one fold is the test split.

    All clips of one recording are in one fold, so a fold (val_fold) is a better validation split than a share of the
    others. The paper's accuracy is the mean over five trainings, with each fold as the test once. Source: Piczak, ESC:
    Dataset for Environmental Sound Classification (2015), 2,000 clips, CC BY-NC 3.0.

    Args:
        root: Folder that holds ESC-50-master, or this folder itself.
        download: Fetch the data if it is missing.
        test_fold: The fold of the test split, 1 to 5.
        val_fold: Another fold, or "before": the fold before test_fold (5 before 1). None: a share of the other four.
        sample_rate_hz: Rate of the inputs.
        seconds: Length of the longest input.
        common: Arguments of AudioFiles.

    Raises:
        DataError: From prepare_data or setup, if files are missing or broken, or cannot be fetched.
    """

    splits_by_position = True

    def __init__(
        self,
        root: str,
        download: bool = False,
        test_fold: int = 5,
        val_fold: int | Literal["before"] | None = "before",
        sample_rate_hz: int = 16_000,
        seconds: float = 5.0,
        **common: Any,
    ) -> None:
        if val_fold == "before":
            val_fold = (test_fold - 2) % 5 + 1
        super().__init__(
            root=root, test_fold=test_fold, val_fold=val_fold, sample_rate_hz=sample_rate_hz, seconds=seconds, **common
        )
        self.download = download

    def find(self) -> list[Item]:
        if self.download:
            fetch_and_unpack(URL, Path(self.root).expanduser(), FOLDER, self._is_whole)
        rows = self._rows()
        if rows is None:
            raise DataError(
                f"{self.root}: no {FOLDER}/meta/esc50.csv; unpack {URL} there, or set data.download to true"
            )
        return rows

    def _rows(self) -> list[Item] | None:
        base = folder_with(self.root, FOLDER, "meta/esc50.csv")
        if base is None:
            return None
        audio = base.relative_to(self.folder) / "audio"
        with open(base / "meta/esc50.csv", newline="") as file:
            return [
                Item(f"{audio}/{row['filename']}", row["category"], fold=row["fold"]) for row in csv.DictReader(file)
            ]

    def _is_whole(self) -> bool:
        rows = self._rows()
        return rows is not None and all((Path(self.root).expanduser() / item.path).is_file() for item in rows)
