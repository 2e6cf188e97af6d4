"""The Free Spoken Digit Dataset: recordings of six speakers, from a folder."""

import re
from collections.abc import Sequence
from typing import Any

from datamodules.errors import DataError, require
from datamodules.own.audio_folder import AudioFiles
from datamodules.own.files import Item

_NAME = re.compile(r"([0-9])_([a-z]+)_([0-9]+)\.wav")  # DIGIT_SPEAKER_INDEX.wav
_FOLDERS = ("free-spoken-digit-dataset/recordings", "recordings", ".")
_FIRST_TRAIN_INDEX = 5
_REMEDY = "get https://github.com/Jakobovski/free-spoken-digit-dataset and set root to the folder that holds it"


class FSDD(AudioFiles):
    """Spoken digits at 8 kHz, most of them shorter than a second.

    Recordings 0 to 4 of each speaker and digit are the official test split: training and test have the same speakers.
    With ``test_speakers``, the test has all recordings of these speakers, and no others. Source: Jackson et al., Free
    Spoken Digit Dataset, CC BY-SA 4.0, 3,000 recordings of six speakers in version 1.0.10.

    Args:
        root: Folder that holds free-spoken-digit-dataset, or this folder itself, or the recordings.
        sample_rate_hz: Rate of the inputs.
        seconds: Length of the longest input.
        test_speakers: Names of the speakers in the test split, such as theo; if empty, the official split.
        val_speakers: Names of the speakers in the validation split; if empty, a share of the training recordings.
        common: Arguments of AudioFiles.

    Raises:
        DataError: From setup, if a digit or a given speaker has no recording, or if a recording cannot be read.
        ValueError: If a speaker is in two splits.
    """

    splits_by_position = True

    def __init__(
        self,
        root: str,
        sample_rate_hz: int = 8000,
        seconds: float = 1.0,
        test_speakers: Sequence[str] = (),
        val_speakers: Sequence[str] = (),
        **common: Any,
    ) -> None:
        super().__init__(root=root, sample_rate_hz=sample_rate_hz, seconds=seconds, **common)
        self.test_speakers, self.val_speakers = list(test_speakers), list(val_speakers)
        both = sorted({*self.test_speakers} & {*self.val_speakers})
        require(not both, "val_speakers", "others than test_speakers", ", ".join(both), "leave these out")
        self._classes_given = [str(digit) for digit in range(10)]

    def find(self) -> list[Item]:
        for folder in _FOLDERS:
            paths = sorted((self.folder / folder).glob("*.wav"))
            names = [(path, match) for path in paths if (match := _NAME.fullmatch(path.name))]
            if names:
                break
        else:
            raise DataError(f"{self.root}: no recordings named DIGIT_SPEAKER_INDEX.wav; {_REMEDY}")
        speakers = {match[2] for _, match in names}
        unknown = sorted({*self.test_speakers, *self.val_speakers} - speakers)
        if unknown:
            known = ", ".join(sorted(speakers))
            raise DataError(f"{self.root}: no recordings of the speaker {unknown[0]}; it has {known}")
        items = [
            Item(str(path.relative_to(self.folder)), match[1], self._split_of(match[2], int(match[3])))
            for path, match in names
        ]
        for kind, split in (("training", ""), ("test", "test")):
            missing = set(self.class_names) - {item.label for item in items if item.split == split}
            if missing:
                raise DataError(f"{self.root}: no {kind} recording of digit {min(missing)}; {_REMEDY}")
        return items

    def _split_of(self, speaker: str, index: int) -> str:
        if speaker in self.val_speakers:
            return "val"
        is_test = speaker in self.test_speakers if self.test_speakers else index < _FIRST_TRAIN_INDEX
        return "test" if is_test else ""
