"""The user's own recordings: a folder of class folders, or a table of paths and labels."""

import csv
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float32
from torch import Tensor

from datamodules.audio import AudioDataModule, refuse_unusable
from datamodules.errors import DataError, counted, say
from datamodules.files import FileDataModule, Item
from datamodules.image_folder import SPLITS, find_in_class_folders
from datamodules.scan import Facts, walk
from datamodules.sound_files import change_rate, examine_sound, read_sound

_COLUMNS = ("path", "label", "start", "end", "fold", "split")  # of a table; other columns are ignored
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


class AudioFolder(AudioFiles):
    """Recordings in one folder for each class, or in such folders inside train, val and test, or listed in a table.

    A table (.csv, or .tsv with tabs) has a header with the columns path and label, and optionally start and end (in
    seconds: one recording may hold many clips), fold, and split (train, val or test). Recordings may have any rate,
    channels and length. A clip has one label: lists and amounts are refused.

    Args:
        root: Folder of the class folders, or of the files that the table names.
        table: Path of the table; it may be relative to root.
        common: Arguments of AudioFiles.

    Raises:
        DataError: From setup, if there is no clip, the table lacks a column, or a file is broken.
    """

    named_by: ClassVar[str | None] = "root"

    def __init__(self, root: str, table: str | None = None, **common: Any) -> None:
        super().__init__(root=root, **common)
        self.table = table

    def find(self) -> list[Item]:
        if self.table is not None:
            path = Path(self.table).expanduser()
            path = path if path.is_file() else self.folder / path
            items = read_table(path)
            refuse_other_tasks(path, [item for item in items if item.label not in (self._classes_given or ())])
            named = {(self.folder / item.path).resolve() for item in items}
            others = [path for path in walk(self.folder, self.predict_suffixes) if path.resolve() not in named]
            if others:
                count = counted(len(others), "sound")
                say(f"{self.root}: {count} without a row in {self.table}, such as {others[0].name}")
            return items
        items = list(find_in_class_folders(self.folder, self.predict_suffixes))
        if not items:
            suffixes = ", ".join(sorted(self.predict_suffixes))
            raise DataError(f"{self.root}: holds no folder of sounds for each class; it may hold {suffixes}")
        return items


def read_table(path: Path) -> list[Item]:
    """The rows of a table of path, label and optionally start, end, fold and split.

    Raises:
        DataError: If the table cannot be read, or a row is invalid.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
            missing = {"path", "label"} - set(rows.fieldnames or [])
            if missing:
                raise DataError(f"{path}: no column {' and '.join(sorted(missing))}; name it in the first line")
            twice = [name for name, count in Counter(rows.fieldnames).items() if count > 1 and name in _COLUMNS]
            if twice:
                raise DataError(f"{path}: two columns are called {twice[0]}; keep one")
            items = [_item(path, rows.line_num, row) for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path}: not a readable table ({what}); give a CSV or TSV file in UTF-8") from error
    if not items:
        raise DataError(f"{path}: holds no row; give each clip a row")
    splits: dict[str, str] = {}
    labels: dict[str, str] = {}
    for item in items:
        label = labels.setdefault(item.name, item.label)
        if label != item.label:
            what = f"line {item.line}: {item.name} is {item.label} here and {label} before"
            raise DataError(f"{path}: {what}; choose one, for a clip has one class")
        first = splits.setdefault(item.path, item.split)
        if first != item.split:
            both = f"{first or 'no split'} and {item.split or 'no split'}"
            raise DataError(f"{path}: {item.path} is in {both}; give all rows of a file one split")
    return items


# A bar, a semicolon, or a comma right before a word makes a list; "Rock, Paper" and "1,000 Hz" are names of classes.
_LIST = re.compile(r"[;|]|,(?=[^\s\d])|^\[.*\]$")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def refuse_other_tasks(path: Path, items: Sequence[Item]) -> None:
    """Check that each label of a table names one class, not several classes and not an amount.

    A label names several classes if it looks like a list, or if each of its parts between commas is in another label
    too.

    Raises:
        DataError: If a label does not; the message names the line.
    """
    parts = {item.label: {part.strip(" []'\"") for part in re.split("[,;|]", item.label)} - {""} for item in items}
    occurrences = Counter(part for label in parts for part in parts[label])
    are_numbers = all(_NUMBER.fullmatch(label) for label in parts)
    for item in items:
        known = all(occurrences[part] > 1 for part in parts[item.label])
        if len(parts[item.label]) > 1 and (known or _LIST.search(item.label)):
            raise DataError(
                f"{path}: line {item.line}: label {item.label!r} is a list, and a clip has one class; choose one, or "
                "put it into data.class_names if it is a name"
            )
        if are_numbers and not float(item.label).is_integer():
            raise DataError(
                f"{path}: line {item.line}: label {item.label} is an amount, and there is no regression; give each "
                "clip the name of a class, or put it into data.class_names if it is one"
            )


def _item(path: Path, line: int, row: dict[str, str | None]) -> Item:
    def wrong(what: str) -> DataError:
        return DataError(f"{path}: line {line}: {what}")

    values = {name: (value or "").strip() for name, value in row.items() if name}
    if not values["path"] or not values["label"]:
        raise wrong("no path or no label; give both")
    if "\0" in values["path"]:
        raise wrong("a NUL in the path; write the table again as UTF-8")
    split = values.get("split", "").lower()
    if split and split not in SPLITS:
        raise wrong(f"split {split}; give train, val or test")
    try:
        start = float(values.get("start") or 0)
        end = float(values["end"]) if values.get("end") else None
    except ValueError as error:
        raise wrong(f"start or end is no number ({error}); give seconds") from error
    if not 0 <= start < (math.inf if end is None else end) or end == math.inf:
        raise wrong(f"from {start:g} to {'its end' if end is None else f'{end:g} s'}; end must come after start")
    file = os.path.normpath(values["path"])  # one file with two spellings could get into two splits
    return Item(file, values["label"], SPLITS.get(split, ""), values.get("fold", ""), start, end, line)


def _or(given: Any, usual: Any) -> Any:
    return usual if given is None else given
