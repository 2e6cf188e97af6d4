"""The user's own recordings: a folder of class folders, or a table of paths and labels."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float32
from torch import Tensor

from datamodules.audio import AudioDataModule, refuse_unusable
from datamodules.errors import DataError, require
from datamodules.files import FileDataModule, Item
from datamodules.own_files import OwnFiles
from datamodules.scan import Facts
from datamodules.sound_files import change_rate, examine_sound, read_sound, seconds_of
from datamodules.table import cut_into_clips

LONGEST_SECONDS = 10.0  # the most if `seconds` is not given


class AudioFiles(FileDataModule, AudioDataModule):
    """A data set of sound files.

    Args:
        root: The folder.
        sample_rate_hz: Rate of the inputs; if absent, the most common rate of the files.
        seconds: Length of the longest input; if absent, that of the longest clip, but 10 s at most.
        common: Arguments of FileDataModule and AudioDataModule.
    """

    reading: ClassVar[tuple[str, ...]] = ("sample_rate_hz", "seconds")

    def __init__(
        self, root: str, sample_rate_hz: int | None = None, seconds: float | None = None, **common: Any
    ) -> None:
        # absent values are taken from the files when they are first needed
        super().__init__(root=root, sample_rate_hz=_or(sample_rate_hz, 16_000), seconds=_or(seconds, 1.0), **common)
        self._rate_given, self._seconds_given = sample_rate_hz, seconds

    @property
    def sample_rate_hz(self) -> int:  # type: ignore[override]
        if self._rate_given is None:
            rates = Counter(facts["rate_hz"] for facts in self._readable().values())
            self._rate_given = max(rates, key=lambda rate_hz: (rates[rate_hz], rate_hz))
        return self._rate_given

    @sample_rate_hz.setter
    def sample_rate_hz(self, value: int) -> None:
        self._rate_given = value

    @property
    def seconds(self) -> float:  # type: ignore[override]
        if self._seconds_given is None:
            readable = self._readable()
            longest = max(self._seconds_of(item) for item in self.items if item.path in readable)
            if not longest:
                raise DataError(
                    f"{self.root}: each row starts after its recording's end; give start and end in seconds"
                )
            self._seconds_given = min(math.ceil(round(100 * longest, 3)) / 100, LONGEST_SECONDS)
            refuse_unusable(self.sample_rate_hz, self._seconds_given)
        return self._seconds_given

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._seconds_given = value

    def _readable(self) -> dict[str, Facts]:
        readable = {path: facts for path, facts in self.facts.items() if "error" not in facts}
        if not readable:
            raise DataError(f"{self.root}: no readable sound; python train.py check says what is wrong with each")
        return readable

    def _seconds_of(self, item: Item) -> float:
        facts = self.facts[item.path]
        whole = facts["frames"] / facts["rate_hz"]
        return max(min(whole, item.end or whole) - item.start, 0.0)

    def examine(self, path: Path) -> Facts:
        return examine_sound(path)

    def read_item(self, item: Item) -> Float32[Tensor, " s"]:
        waveform, rate_hz = read_sound(self.folder / item.path, item.start, item.end)
        return change_rate(waveform, rate_hz, self.sample_rate_hz).clamp(-1, 1)

    def wrong_part(self, item: Item) -> str:
        rate_hz, frames = self.facts[item.path]["rate_hz"], self.facts[item.path]["frames"]
        stop = frames if item.end is None else round(min(item.end * rate_hz, frames))
        if round(min(item.start * rate_hz, frames)) < stop:
            return ""
        line = f"line {item.line} of the table: " if item.line else ""
        return f"{line}holds no sound from {item.start:g} s on, it is {frames / rate_hz:g} s long; mend start and end"

    def size_of(self, item: Item) -> int:
        return round(4 * self.sample_rate_hz * self._seconds_of(item))

    def details(self, items: Sequence[Item]) -> dict[str, Any]:
        lengths = [round(self.sample_rate_hz * self._seconds_of(item)) for item in items]
        return {"lengths": torch.tensor(lengths, dtype=torch.int64)}


class AudioFolder(OwnFiles, AudioFiles):
    """Recordings in one folder for each class, or in such folders inside train, val and test, or listed in a table.

    Recordings may have any rate, channels and length. A row of a table may be a part of a recording. Where rows say
    what is heard when, and several things are heard at once, clip_seconds cuts the recordings into clips.

    Args:
        clip_seconds: Cut every recording of the table into clips of so many seconds, each with the classes of all rows
            that overlap it; if absent, every row is a clip of its own.
        common: Arguments of OwnFiles and AudioFiles.

    Raises:
        DataError: From setup, if there is no clip, the table lacks a column, or a file is broken.
    """

    kind: ClassVar[str] = "sound"

    def __init__(self, root: str, clip_seconds: float | None = None, **common: Any) -> None:
        super().__init__(root=root, **common)
        self.clip_seconds = clip_seconds
        if clip_seconds is not None:
            require(0.01 <= clip_seconds < math.inf, "clip_seconds", "0.01 or more", clip_seconds, "3 is usual")
            has_labels = self.labels_separator is not None
            remedy = "a clip may hold several classes or none: ';' is usual"
            require(has_labels, "labels_separator", "given with clip_seconds", self.labels_separator, remedy)

    def find(self) -> list[Item]:
        items = super().find()
        if self.clip_seconds is None:
            return items
        assert self.labels_separator is not None  # as __init__ has checked
        return cut_into_clips(items, self.clip_seconds, self._length_of, self.labels_separator)

    def _length_of(self, path: str) -> float:
        try:
            return seconds_of(self.folder / path)
        except DataError:  # the scan of all files will say what is wrong with it
            return 0.0


def _or(given: Any, usual: Any) -> Any:
    return usual if given is None else given
