"""The Free Spoken Digit Dataset: recordings of six speakers, from a folder."""

import re
from pathlib import Path

import torch

from datamodules.audio import AudioDataModule, Clips, pad_clips
from datamodules.base import DataError

_NAME = re.compile(r"([0-9])_([a-z]+)_([0-9]+)\.wav")  # DIGIT_SPEAKER_INDEX.wav
_FOLDERS = ("free-spoken-digit-dataset/recordings", "recordings", ".")
_FIRST_TRAIN_INDEX = 5
_REMEDY = "get https://github.com/Jakobovski/free-spoken-digit-dataset and set root to the folder that holds it"


class FSDD(AudioDataModule):
    """Spoken digits at 8 kHz, most of them shorter than a second; index 0 to 4 of each speaker and digit is the test.

    This is the official split: its speakers are those of training. Source: Jackson et al., Free Spoken Digit Dataset,
    CC BY-SA 4.0, 3,000 recordings in version 1.0.10.

    Args:
        root: Folder that holds free-spoken-digit-dataset, or that folder, or the recordings themselves.

    Raises:
        DataError: From setup, if there are no recordings in root, or none of some digit, or one cannot be read.
    """

    def __init__(
        self,
        root: str,
        seconds: float = 1.0,
        sample_rate_hz: int = 8000,
        batch_size: int = 64,
        num_workers: int = 0,
        val_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__(sample_rate_hz, seconds, batch_size, num_workers, val_fraction, seed)
        self.class_names = [str(digit) for digit in range(10)]
        self.root = root

    def load(self) -> tuple[Clips, Clips]:
        paths, digits, indices = self._recordings()
        labels = torch.tensor(digits)
        is_test = torch.tensor(indices) < _FIRST_TRAIN_INDEX
        for name, part in (("training", ~is_test), ("test", is_test)):
            missing = set(range(10)) - set(labels[part].tolist())
            if missing:
                raise DataError(f"{self.root}: no {name} recording of digit {min(missing)}; {_REMEDY}")
        clips = Clips(**pad_clips([self.read(path) for path in paths]), labels=labels)
        return clips.subset((~is_test).nonzero()[:, 0]), clips.subset(is_test.nonzero()[:, 0])

    def _recordings(self) -> tuple[list[Path], list[int], list[int]]:
        """The paths, digits and indices of the recordings, in the order of their names."""
        for folder in _FOLDERS:
            paths = sorted(Path(self.root).expanduser().joinpath(folder).glob("*.wav"))
            names = [(path, match) for path in paths if (match := _NAME.fullmatch(path.name))]
            if names:
                return (
                    [path for path, _ in names],
                    [int(match[1]) for _, match in names],
                    [int(match[3]) for _, match in names],
                )
        raise DataError(f"{self.root}: no recordings named DIGIT_SPEAKER_INDEX.wav; {_REMEDY}")
