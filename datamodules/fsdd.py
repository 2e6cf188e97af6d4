"""The Free Spoken Digit Dataset: recordings of six speakers, from a folder."""

import re
from typing import Any

from datamodules.audio_folder import AudioFiles
from datamodules.errors import DataError
from datamodules.files import Item

_NAME = re.compile(r"([0-9])_([a-z]+)_([0-9]+)\.wav")  # DIGIT_SPEAKER_INDEX.wav
_FOLDERS = ("free-spoken-digit-dataset/recordings", "recordings", ".")
_FIRST_TRAIN_INDEX = 5
_REMEDY = "get https://github.com/Jakobovski/free-spoken-digit-dataset and set root to the folder that holds it"


class FSDD(AudioFiles):
    """Spoken digits at 8 kHz, most of them shorter than a second; index 0 to 4 of each speaker and digit is the test.

    This is the official split: training and test have the same speakers. Source: Jackson et al., Free Spoken Digit
    Dataset, CC BY-SA 4.0, 3,000 recordings in version 1.0.10.

    Args:
        root: Folder that holds free-spoken-digit-dataset, or that folder, or the recordings themselves.
        sample_rate_hz: Rate of the inputs.
        seconds: Length of the longest input.
        common: Arguments of AudioFiles.

    Raises:
        DataError: From setup, if root has no recordings, or none of some digit, or if one cannot be read.
    """

    splits_by_position = True

    def __init__(self, root: str, sample_rate_hz: int = 8000, seconds: float = 1.0, **common: Any) -> None:
        super().__init__(root=root, sample_rate_hz=sample_rate_hz, seconds=seconds, **common)
        self._classes_given = [str(digit) for digit in range(10)]

    def find(self) -> list[Item]:
        for folder in _FOLDERS:
            paths = sorted((self.folder / folder).glob("*.wav"))
            names = [(path, match) for path in paths if (match := _NAME.fullmatch(path.name))]
            if names:
                break
        else:
            raise DataError(f"{self.root}: no recordings named DIGIT_SPEAKER_INDEX.wav; {_REMEDY}")
        items = [
            Item(str(path.relative_to(self.folder)), match[1], "test" if int(match[3]) < _FIRST_TRAIN_INDEX else "")
            for path, match in names
        ]
        for kind, split in (("training", ""), ("test", "test")):
            missing = set(self.class_names) - {item.label for item in items if item.split == split}
            if missing:
                raise DataError(f"{self.root}: no {kind} recording of digit {min(missing)}; {_REMEDY}")
        return items
