"""Samples in shards: tar archives of WebDataset's form, and Parquet files of Hugging Face's datasets.

Samples are read by their offsets in the archives, so any sample can be read at any time, as in a folder. Splits, order
and resuming are the same as in every data module. A sample takes about 60 bytes of memory.
"""

import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, ClassVar

import torch
from jaxtyping import Int64
from torch import Tensor

from datamodules.archives._shard_list import ShardList
from datamodules.archives.write_shards import CLASSES
from datamodules.cache import cached, sha256_of, stamp
from datamodules.decoding.packed import Packed
from datamodules.errors import DataError
from datamodules.labels import Labels, labels_of
from datamodules.on_disk import OnDisk
from datamodules.own.own_files import group_in, refuse_wrong_pattern
from datamodules.own.scan import in_threads, progress
from datamodules.samples import Files
from datamodules.splits import Columns

_VERSION = 3  # increased when an examination detects more faults
_TOGETHER = 64  # samples that a thread examines at once


@dataclass(frozen=True)
class Facts:
    """The results of reading every sample.

    Attributes:
        values: Two numbers for each sample; zeros for broken ones.
        errors: The errors of the broken samples, by their numbers.
        sha256: The SHA-256 of each shard.
    """

    values: Int64[Tensor, "n 2"]
    errors: dict[int, str]
    sha256: list[str]


class Shards(OnDisk):
    """A data set of shards: files .tar and .parquet in a folder, in the order of their paths.

    In a .tar (WebDataset), consecutive files with the same name up to the first dot after the last slash are a sample:
    one input, and its label in .cls (the name or the number of its class) or in .json. In a .parquet, a row is a
    sample, with a column of files and a column of labels. A label that is a list has any number of classes. A number is
    a line of classes.txt in the folder, from 0, if there is such a file.

    The path of a shard names its split, in one word: train, val (valid, validation) or test. If no path names a split,
    the test is held out from all samples. Without val shards, the validation is held out from the training.

    Every sample is read once before the first training. The results are cached until a shard changes.

    Args:
        root: The folder.
        label: The key of .json files, or the column of .parquet files, with the label.
        groups: A regular expression that finds the group in the name of a sample, such as train-0.tar/patient7/3. A
            group is never in two splits.
        common: Arguments of OnDisk.

    Raises:
        DataError: From setup, if a shard is missing, truncated or damaged, or if a sample is broken or has no label.
    """

    named_by: ClassVar[str | None] = "root"
    noun: ClassVar[str] = "sample"
    kind: ClassVar[str]  # image or audio
    suffixes: ClassVar[frozenset[str]]  # of inputs in archives

    def __init__(self, root: str, label: str = "label", groups: str | None = None, **common: Any) -> None:
        super().__init__(root=root, **common)
        self.label, self.groups = label, groups
        if groups is not None:
            refuse_wrong_pattern(groups)

    @abstractmethod
    def examine(self, file: Packed) -> tuple[int, int]:
        """Read a whole sample, and return two numbers about it.

        Raises:
            DataError: If it is broken.
        """

    def examined_with(self) -> str:
        """The settings that `examine` depends on, if they are given."""
        return ""

    def wrong_values(self) -> dict[int, str]:
        """The errors of samples that can be read, by their numbers."""
        return {}

    @cached_property
    def listed(self) -> ShardList:
        """The samples of all shards."""
        return ShardList(self.root, self.folder, self.kind, self.suffixes, self.label)

    # Classes

    @cached_property
    def _numbered(self) -> list[str]:
        """The class names in the order of their numbers, from classes.txt; empty without this file."""
        path = self.folder / CLASSES
        if not path.is_file():
            return []
        try:
            names = path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read ({error}); write the name of a class in each line") from error
        if len({*names}) < len(names) or "" in names:
            raise DataError(f"{path}: a name is empty or occurs twice; write the name of a class in each line")
        return names

    def classes_found(self) -> list[str]:
        noted = self._numbered or next((shard.classes for shard in self.listed.shards if shard.classes), [])
        texts = {text for shard in self.listed.shards for text in shard.index.texts}
        return noted or sorted({name for text in texts for name in self._classes_of(text)}, key=_in_order)

    def _classes_of(self, text: str) -> list[str]:
        """The class names of a label."""
        value = json.loads(text)
        names = self._numbered
        return [
            names[part] if isinstance(part, int) and 0 <= part < len(names) else str(part)
            for part in (value if isinstance(value, list) else [value])
        ]

    def _labels(self) -> Labels:
        """The labels of all samples.

        Raises:
            DataError: If one has a class that is not in class_names.
        """
        number = {name: label for label, name in enumerate(self.class_names)}
        are_many = any(text.startswith("[") for shard in self.listed.shards for text in shard.index.texts)
        of_shards = []
        for shard in self.listed.shards:
            classes = [self._classes_of(text) for text in shard.index.texts]
            for position, names in enumerate(classes):
                for name in names:
                    if name not in number:
                        first = int((shard.index.labels == position).nonzero()[0])
                        known = ", ".join(self.class_names[:20])
                        what = f"sample {shard.index.key(first)} is of class {name}, and the classes are {known}"
                        raise DataError(f"{self.folder / shard.name}: {what}; correct {CLASSES} or data.class_names")
            of_texts = labels_of([[number[name] for name in names] for names in classes], len(number), are_many)
            of_shards.append(of_texts[shard.index.labels])
        return torch.cat(of_shards)

    # The results of reading every sample

    @cached_property
    def facts(self) -> Facts:
        """The results of reading every sample, cached by shard."""
        values, sha256, errors = [], [], {}
        for at, shard in enumerate(progress(self.listed.shards, f"checking {self.root}")):
            examining = f"{type(self).examine.__qualname__} {_VERSION} {self.label}{self.examined_with()}"
            what = f"{examining}\n{stamp(shard.archive)}"
            of_shard = cached("shards", what, partial(self._examine, at))
            values.append(of_shard["values"])
            sha256.append(of_shard["sha256"])
            errors |= {self.listed.starts[at] + position: error for position, error in of_shard["errors"].items()}
        return Facts(torch.cat(values), errors, sha256)

    def _examine(self, at: int) -> dict[str, Any]:
        numbers = range(self.listed.starts[at], self.listed.starts[at + 1])

        def examine(part: range) -> list[tuple[int, int] | str]:
            return [self._values_or_error(number) for number in part]

        parts = [numbers[first : first + _TOGETHER] for first in range(0, len(numbers), _TOGETHER)]
        results = list(chain.from_iterable(in_threads(examine, parts, f"checking {self.listed.shards[at].name}")))
        errors = {position: result for position, result in enumerate(results) if isinstance(result, str)}
        pairs = [(0, 0) if isinstance(result, str) else result for result in results]
        values = torch.tensor(pairs, dtype=torch.int64)
        return {"values": values, "errors": errors, "sha256": sha256_of(self.listed.shards[at].archive)}

    def _values_or_error(self, number: int) -> tuple[int, int] | str:
        file = self.listed.packed(number)
        try:
            return self.examine(file)
        except DataError as error:
            return str(error).removeprefix(f"{file}: ")

    def _readable(self) -> Int64[Tensor, "n 2"]:
        """The two numbers of each sample that can be read."""
        can_be_read = torch.ones(len(self.facts.values), dtype=torch.bool)
        can_be_read[list(self.facts.errors)] = False
        if not can_be_read.any():
            raise DataError(f"{self.root}: no readable sample; python train.py check says what is wrong with each")
        return self.facts.values[can_be_read]

    def bad_files(self) -> dict[str, str]:
        """The errors, with remedies, of shards that cannot be listed and of broken samples, by name."""
        broken = self._broken_samples() if self.listed.shards else {}
        return self.listed.bad | {self.listed.name_of(number): what for number, what in sorted(broken.items())}

    def _broken_samples(self) -> dict[int, str]:
        if len(self.facts.errors) == len(self.facts.values):
            return self.facts.errors
        return self.wrong_values() | self.facts.errors

    # Splits

    def columns(self) -> Columns:
        bad_shards = self.listed.bad
        if bad_shards and self.on_error == "raise":  # before the others are read
            self.refuse_or_tell(bad_shards)
        if not self.listed.shards:
            raise DataError(f"{self.root}: no readable shard; python train.py check says what is wrong with each")
        labels = self._labels()
        self.refuse_or_tell(self.bad_files())
        is_good = torch.ones(len(labels), dtype=torch.bool)
        is_good[list(self._broken_samples())] = False
        numbers = is_good.nonzero()[:, 0]
        splits = {shard.split for shard in self.listed.shards}
        if "" in splits and len(splits) > 1:
            name = next(shard.name for shard in self.listed.shards if not shard.split)
            raise DataError(f"{self.root}: {name} names no split, and others do; call it train, val or test")
        if not splits & {"train", ""}:
            raise DataError(f"{self.root}: no shard of train, only of val or test; add it")
        in_folds = {"val": "train"} if self.folds is not None else {}  # both are divided into folds
        of_good = [self.listed.place(number)[0].split for number in numbers.tolist()]
        names, none = Files(numbers, self.listed.name_of), [""] * len(numbers)
        given = [in_folds.get(split, split) for split in of_good]
        return Columns(numbers, names, labels[numbers], given, none, self.whole(names) or none)

    def whole(self, names: Sequence[str]) -> Sequence[str] | None:
        return None if self.groups is None else [group_in(self.groups, name) for name in names]

    def content_of(self, sources: Int64[Tensor, " m"]) -> bytes:
        return f"{self.facts.sha256}".encode() + sources.numpy().tobytes()


def _in_order(name: str) -> tuple[bool, int, str]:
    """A sorting key: numbers by value, then names."""
    return not name.isdecimal(), int(name) if name.isdecimal() else 0, name
