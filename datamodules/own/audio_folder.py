"""The user's own recordings: a folder of class folders, or a table of paths and labels."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from datamodules.audio import SoundsOfAnyRate
from datamodules.decoding.sound_files import (
    DECODED_ELSEWHERE,
    clip_of,
    examine_sound,
    frames_between,
)
from datamodules.errors import DataError, counted, require, say
from datamodules.on_disk import IN_MEMORY_BYTES
from datamodules.own._clips import cut_into_clips
from datamodules.own.files import FileDataModule, Item
from datamodules.own.own_files import OwnFiles
from datamodules.own.scan import Facts
from datamodules.samples import Samples

_DECODED = 4  # times the size of a file, about: two for 16 bits as they are, four for FLAC
_DIFFERENT = 0.9  # share of the channels' power in their mean: above it they are nearly the same
_CANCELLED = 0.01  # share of the channels' power, -20 dB; one channel alone, or two unrelated ones, have a half


class AudioFiles(FileDataModule, SoundsOfAnyRate):
    """A data set of sound files.

    Args:
        common: Arguments of FileDataModule and SoundsOfAnyRate.
    """

    kind: ClassVar[str] = "sound"
    has_times: ClassVar[bool] = True

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        self._decoded.clear()  # waveforms of the scan that no split took
        self._for_splits = set()
        if stage == "predict":
            return
        peaks = {path: facts["peak"] for path, facts in self.facts.items() if facts.get("peak", 0.0) > 1}
        if peaks:
            path = max(peaks, key=lambda path: peaks[path])
            has = "has a peak" if len(peaks) == 1 else "have peaks"
            what = f"{has} above full scale 1, the largest {peaks[path]:.3g} in {path}"
            self.remark(f"{counted(len(peaks), 'file')} of {len(self.facts)} {what}; the values are kept as they are")
        if self.channels == "mean":
            self._tell_of_averages()

    def _tell_of_averages(self) -> None:
        """Tell the user how many files lose something when their channels are averaged."""
        shares = {path: facts.get("kept", 1.0) for path, facts in self.facts.items()}
        different = [path for path, share in shares.items() if _CANCELLED <= share < _DIFFERENT]
        if different:
            has = "has channels that differ" if len(different) == 1 else "have channels that differ"
            what = f"{has}, such as {different[0]}; they are averaged; --data.channels all keeps them"
            self.remark(f"{counted(len(different), 'file')} of {len(self.facts)} {what}")
        cancelled = [path for path, share in shares.items() if share < _CANCELLED]
        if cancelled:
            what = f"channels that cancel each other when they are averaged, such as {cancelled[0]}"
            number = (
                f"{counted(len(cancelled), 'file')} of {len(self.facts)} {'has' if len(cancelled) == 1 else 'have'}"
            )
            self.remark(f"{number} {what}, so it is nearly silent; --data.channels all keeps them, 1 takes one")

    def rates_hz(self) -> Int64[Tensor, " n"]:
        return torch.tensor([facts["rate_hz"] for facts in self._readable().values()])

    def numbers_of_channels(self) -> Int64[Tensor, " n"]:
        return torch.tensor([facts["channels"] for facts in self._readable().values()])

    def bad_files(self) -> dict[str, str]:
        """Also the errors of files without the channels that are asked for."""
        bad = super().bad_files()
        wrong = {path: self.wrong_channels(of["channels"]) for path, of in self.facts.items() if path not in bad}
        return bad | {path: what for path, what in wrong.items() if what}

    def longest_seconds(self) -> float:
        readable = self._readable()
        longest = max(self._seconds_of(item) for item in self.items if item.path in readable)
        if not longest:
            raise DataError(f"{self.root}: each row starts after its recording's end; give start and end in seconds")
        return longest

    def _seconds_of(self, item: Item) -> float:
        """The seconds that are read for a row: from one sample of its file to another."""
        rate_hz, frames = self.facts[item.path]["rate_hz"], self.facts[item.path]["frames"]
        start, stop = frames_between(item.start, item.end, rate_hz, frames)
        return max(stop - start, 0) / rate_hz

    @cached_property
    def _decoded(self) -> dict[Path, Float32[Tensor, "*channels s"]]:
        """Waveforms of whole files from the scan, at their own rates, until the splits take them."""
        return {}

    def _whole_files_in_memory(self) -> set[Path]:
        """The files that are a sample as a whole, if they are small enough to stay in memory once they are decoded."""
        paths = {self.folder / item.path for item in self.items if item.name == item.path}
        if self.in_memory is None:
            num_bytes = sum(path.stat().st_size for path in paths if os.path.isfile(path))
            return paths if _DECODED * num_bytes <= IN_MEMORY_BYTES else set()
        return paths if self.in_memory else set()

    @cached_property
    def facts(self) -> dict[str, Facts]:
        self._for_splits = self._whole_files_in_memory()
        facts = {path: self.chosen(of) for path, of in super().facts.items()}
        lengths = {path: of["frames"] / of["rate_hz"] for path, of in facts.items() if "error" not in of}
        self._tell_of_late(self.items, lengths)
        return facts

    def chosen(self, facts: Facts) -> Facts:
        """Facts about a file, for the channels that are read."""
        return facts

    def _tell_of_late(self, items: Sequence[Item], lengths: Mapping[str, float]) -> None:
        """Tell the user how many rows end after their recordings, by more than the rounding of a table."""
        late = [
            item
            for item in items
            if item.end is not None and item.start < lengths.get(item.path, 0.0) < item.end - 0.001
        ]
        if late:
            end, length = late[0].end, lengths[late[0].path]
            what = f"line {late[0].line} ends at {end:g} s, {late[0].path} has {length:g} s"
            last = "lasts beyond its recording" if len(late) == 1 else "last beyond their recordings"
            say(f"{self.root}: {counted(len(late), 'row')} of the table {last} ({what}); cut there")

    def examine(self, path: Path) -> Facts:
        waveform: list[Tensor] = []
        facts = examine_sound(path, waveform if path in self._for_splits else None, self.channels)
        if waveform:
            self._decoded[path] = waveform[0]
        return facts

    def read_item(self, item: Item) -> Float32[Tensor, "*channels s"]:
        path = self.folder / item.path
        waveform = self._decoded.pop(path, None) if item.name == item.path else None
        if waveform is None:
            return self.read_whole(path, item.start, item.end)
        return self.at_rate(waveform, self.facts[item.path]["rate_hz"])

    def wrong_part(self, item: Item) -> str:
        if self._seconds_of(item):
            return ""
        rate_hz, frames = self.facts[item.path]["rate_hz"], self.facts[item.path]["frames"]
        line = f"line {item.line} of the table: " if item.line else ""
        return (
            f"{line}holds no sound from {item.start:g} s on, it is {frames / rate_hz:g} s long; correct start and end"
        )

    def lengths_of(self, sources: Sequence[Item]) -> Int64[Tensor, " m"]:
        lengths = [round(self.sample_rate_hz * self._seconds_of(item)) for item in sources]
        return torch.tensor(lengths, dtype=torch.int64)

    def file_of(self, samples: Samples, index: int) -> tuple[str, bytes]:
        item = self._item_of[samples.names[index]]
        if item.name != item.path or Path(item.path).suffix.lower() in DECODED_ELSEWHERE:
            return clip_of(self.folder / item.path, item.start, item.end)
        return super().file_of(samples, index)


class AudioFolder(OwnFiles, AudioFiles):
    """Recordings in one folder for each class, or in such folders inside train, val and test, or listed in a table.

    Recordings may have any rate, length and number of channels, which are averaged without --data.channels. A row of a
    table may be a part of a recording. If rows give the start and end of sounds, and sounds overlap, clip_seconds cuts
    the recordings into clips.

    Args:
        clip_seconds: Cut every recording of the table into clips of this length in seconds. A clip has the classes of
            all rows that belong to it. If absent, every row is a separate clip.
        min_overlap: A row belongs to a clip that contains at least this many seconds of it, or at least half of it. If
            absent, 0.25 s, or half of clip_seconds if that is less.
        common: Arguments of OwnFiles and AudioFiles.

    Raises:
        DataError: From setup, if there is no clip, the table lacks a column, or a file is broken.
    """

    def __init__(
        self, root: str, clip_seconds: float | None = None, min_overlap: float | None = None, **common: Any
    ) -> None:
        super().__init__(root=root, **common)
        self.clip_seconds, self.min_overlap = clip_seconds, min_overlap
        self._events: list[Item] = []  # the rows of the table, before recordings are cut into clips
        if clip_seconds is not None:
            require(0.01 <= clip_seconds < math.inf, "clip_seconds", "0.01 or more", clip_seconds, "3 is usual")
            has_labels = self.labels_separator is not None
            remedy = "a clip may hold several classes or none: ';' is usual"
            require(has_labels, "labels_separator", "given with clip_seconds", self.labels_separator, remedy)
        if min_overlap is not None:
            require(clip_seconds is not None, "clip_seconds", "given with min_overlap", clip_seconds, "3 is usual")
            assert clip_seconds is not None
            rule = f"in 0..{clip_seconds:g}, the seconds of a clip"
            require(0 <= min_overlap <= clip_seconds, "min_overlap", rule, min_overlap, "0.25 is usual")

    def find(self) -> list[Item]:
        items = super().find()
        if self.clip_seconds is None:
            points = [item for item in items if item.start == item.end]
            if points:
                what = f"line {points[0].line}: a point in time, at {points[0].start:g} s, is not a clip"
                raise DataError(f"{self.table or self.root}: {what}; give it an end, or give --data.clip_seconds")
            return items
        self._events = items
        assert self.labels_separator is not None  # as __init__ has checked
        nameless = [item for item in items if item.line and not item.label and (item.start or item.end is not None)]
        if nameless:
            what = "row has times and no label" if len(nameless) == 1 else "rows have times and no label"
            where = f"line {nameless[0].line}, {nameless[0].path}"
            say(f"{self.root}: {len(nameless)} {what} ({where}); nothing is heard there")
        lengths = {path: self._length_of(path) for path in dict.fromkeys(item.path for item in items)}
        self._tell_of_late(items, lengths)
        overlap = min(0.25, self.clip_seconds / 2) if self.min_overlap is None else self.min_overlap
        return cut_into_clips(items, self.clip_seconds, lengths.__getitem__, self.labels_separator, overlap)

    def true_events(self, split: str) -> dict[str, list[tuple[float, float, str]]]:
        names = self.splits()[split].names
        rows = self._events if self.clip_seconds is not None else []
        if not any(row.start or row.end is not None for row in rows if self._classes_of(row)):
            return {}  # labels of whole recordings
        events: dict[str, list[tuple[float, float, str]]] = {self._item_of[name].path: [] for name in names}
        for row in rows:
            if row.path in events:
                length = self._seconds_of(replace(row, start=0.0, end=None))
                end = length if row.end is None else min(row.end, length)
                events[row.path] += [(row.start, end, name) for name in self._classes_of(row) if row.start < end]
        return {str(self.folder / path): of_path for path, of_path in events.items()}

    def _length_of(self, path: str) -> float:
        try:
            return self.header(self.folder / path)[0]
        except (DataError, OSError):  # the scan of all files reports the error
            return 0.0
