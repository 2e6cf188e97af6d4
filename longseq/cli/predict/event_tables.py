"""Files of events with their times: CSV, labels for Audacity, and selection tables for Raven."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import soundfile

from longseq.cli.errors import UserError
from longseq.cli.predict.output_files import TextFile, csv_lines, times_of
from longseq.training.answers.predictions import Recording

_LABEL = rb"\d+\.\d{6}\t\d+\.\d{6}\t"  # begin and end of an Audacity label; the files have no header


class EventTable(TextFile, ABC):
    """A table of events, written one recording at a time.

    Args:
        path: The file.
        recordings: The paths of all recordings, with their lengths in seconds.
    """

    header = ""

    def __init__(self, path: Path, recordings: Mapping[str, float]) -> None:
        super().__init__(path, "events", rb"\A" + (re.escape(self.header.encode()) or _LABEL))
        self.check(recordings)

    def check(self, recordings: Mapping[str, float]) -> None:
        """Check that the table can hold the events of these recordings.

        Raises:
            UserError: If it cannot.
        """

    def begin(self, finished: Sequence[str]) -> None:
        """Begin the table, or continue after the events of the recordings that an earlier run finished."""
        if not finished:
            self.write(self.header)

    @abstractmethod
    def take(self, recording: Recording) -> None:
        """Write the events of the next recording."""


class EventCSV(EventTable):
    """CSV with a row for each event."""

    header = "path,start,end,class,score\r\n"

    def take(self, recording: Recording) -> None:
        rows = ((*times_of(e.start, e.end), e.class_name, f"{e.score:.4f}") for e in recording.events)
        self.write(csv_lines([recording.path, *row] for row in rows))


class Audacity(EventTable):
    """Audacity's labels: start, end and class, separated by tabs."""

    def check(self, recordings: Mapping[str, float]) -> None:
        if len(recordings) > 1:
            what = f"Audacity's labels are of one recording, got {len(recordings)}"
            raise UserError(f"events: {self.path}: {what}; give a .csv")

    def take(self, recording: Recording) -> None:
        lines = (f"{e.start:.6f}\t{e.end:.6f}\t{' '.join(e.class_name.split())}\n" for e in recording.events)
        self.write("".join(lines))


class Raven(EventTable):
    """A selection table of Raven, separated by tabs. Begin and end times count from the start of the first recording,
    as in Raven's sequence of sound files; the file offset counts from the start of the event's recording."""

    header = (
        "Selection\tView\tChannel\tBegin Time (s)\tEnd Time (s)\tLow Freq (Hz)\tHigh Freq (Hz)\t"
        "Begin Path\tFile Offset (s)\tSpecies\tScore\n"
    )

    def check(self, recordings: Mapping[str, float]) -> None:
        self.sounds = {path: (_rate_of(path), seconds) for path, seconds in recordings.items()}

    def begin(self, finished: Sequence[str]) -> None:
        super().begin(finished)
        self.count = self.text().count("\n") - 1  # without the header
        self.before = sum(self.sounds[path][1] for path in finished)

    def take(self, recording: Recording) -> None:
        rate_hz, seconds = self.sounds[recording.path]
        lines = []
        for event in recording.events:
            self.count += 1
            times = f"{self.before + event.start:.6f}\t{self.before + event.end:.6f}\t0\t{rate_hz / 2:g}"
            name = " ".join(event.class_name.split())
            where = f"{recording.path}\t{event.start:.6f}"
            lines.append(f"{self.count}\tSpectrogram 1\t1\t{times}\t{where}\t{name}\t{event.score:.4f}\n")
        self.write("".join(lines))
        self.before += seconds


def _rate_of(path: str) -> int:
    """The sample rate of a recording in Hz.

    Raises:
        UserError: If Raven cannot open it.
    """
    try:
        name: Any = os.fsencode(path)  # bytes, because text would have to be UTF-8
        return soundfile.info(name).samplerate
    except soundfile.LibsndfileError as error:  # a form that longseq reads with torchcodec
        raise UserError(f"events: {path}: not in a format that Raven opens; give a .csv") from error


_EVENT_TABLES: dict[str, type[EventTable]] = {".csv": EventCSV, ".txt": Audacity, ".tsv": Raven}


def table_for(path: Path, recordings: Mapping[str, float]) -> EventTable:
    """Make a table of events in the form of the path's suffix.

    Args:
        path: The file.
        recordings: The paths of all recordings, with their lengths in seconds.

    Raises:
        UserError: If the suffix is unknown, the form does not fit the recordings, or the folder does not exist.
    """
    kind = _EVENT_TABLES.get(path.suffix.lower())
    if kind is None:
        raise UserError(f"events: {path}: ends in none of .csv, .txt (Audacity), .tsv (Raven); give one of them")
    table = kind(path, recordings)
    if not path.parent.is_dir():
        raise UserError(f"events: {path.parent}: no such folder; make it, or give another", exit_code=6)
    return table
