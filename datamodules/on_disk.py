"""The base of data sets on a disk: which samples can be read, their splits, and which inputs stay in memory."""

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Int64
from torch import Tensor

from datamodules.base import DataModule
from datamodules.errors import DataError, counted, require, say
from datamodules.labels import counts
from datamodules.own.scan import in_threads
from datamodules.samples import Files, Samples, chosen
from datamodules.splits import Columns, divided

IN_MEMORY_BYTES = 2**30  # inputs of up to this size are decoded once and stay in memory


class OnDisk(DataModule):
    """A data set in a folder.

    Args:
        root: The folder.
        on_error: What happens if a file is broken: "raise" ends the run before training, "skip" leaves the file out.
        in_memory: Whether inputs are decoded once and stay in memory, or are decoded by workers each time they are
            needed; if absent, their size decides.
        class_names: The classes, in the order of their labels; if absent, the classes in the data.
        test_fraction: Share of the samples that is held out for the test if the data has no test split, in (0, 1).
        common: Arguments of every data module.
    """

    reading: ClassVar[tuple[str, ...]] = ()  # the names of the settings that change what is read from a file
    noun: ClassVar[str]  # what a sample is, for messages
    table_of_samples: Columns  # of all splits, after setup
    test_fold: str | int | None = None
    val_fold: str | int | None = None

    def __init__(
        self,
        root: str,
        on_error: Literal["raise", "skip"] = "raise",
        in_memory: bool | None = None,
        class_names: list[str] | None = None,
        test_fraction: float = 0.2,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        require(on_error in ("raise", "skip"), "on_error", "raise or skip", on_error, "skip leaves broken files out")
        require(0 < test_fraction < 1, "test_fraction", "between 0 and 1", test_fraction, "0.2 is a fifth")
        is_list = class_names is None or len(set(class_names)) == len(class_names) >= 1
        require(is_list, "class_names", "one or more, each once", class_names, "leave it out to take those of the data")
        self.root = root
        self.on_error = on_error
        self.in_memory = in_memory
        self.test_fraction = test_fraction
        self._classes_given = class_names

    def settings_of_reading(self) -> list[Any]:
        """The values of the settings in `reading`. Absent ones are left out, so a new setting keeps old digests."""
        return [value for name in self.reading if (value := getattr(self, name)) is not None]

    @property
    def folder(self) -> Path:
        folder = Path(self.root).expanduser()
        if not self.root or not folder.is_dir():
            raise DataError(f"{self.root}: no such folder; set data.root to the one that holds the data")
        return folder

    # What a subclass defines

    @abstractmethod
    def columns(self) -> Columns:
        """The table of the samples that can be read.

        Raises:
            DataError: If samples are missing, or are broken and must not be left out.
        """

    @abstractmethod
    def whole(self, names: Sequence[str]) -> Sequence[str] | None:
        """The group of each sample, which must not be divided; None if positions decide what is held out."""

    @abstractmethod
    def classes_found(self) -> list[str]:
        """The classes in the data, in the order of their labels."""

    @abstractmethod
    def read_item(self, item: Any) -> Tensor:
        """Read the input of one source."""

    @abstractmethod
    def bytes_of(self, sources: Any) -> int:
        """The size of the inputs of these sources in memory, in bytes."""

    @abstractmethod
    def content_of(self, sources: Any) -> bytes:
        """Bytes that identify the content of these sources. They are the same on every machine."""

    def read_all(self, sources: Any, digest: str) -> Sequence[Tensor] | Tensor:
        """All inputs, to stay in memory. The digest identifies their content and how it is read."""
        return in_threads(self.read_item, list(sources), f"reading {self.root}")

    def stay_in_memory(self, sources: Any) -> bool:
        """Whether the inputs of these sources are decoded once and stay in memory."""
        return self.bytes_of(sources) <= IN_MEMORY_BYTES if self.in_memory is None else self.in_memory

    def details(self, sources: Any) -> dict[str, Any]:
        """Further keyword arguments of samples_of for these sources."""
        return {}

    @property
    def class_names(self) -> list[str]:  # type: ignore[override]
        if self._classes_given is None:
            self._classes_given = self.classes_found()
        return self._classes_given

    def load(self) -> tuple[Samples, Samples | None, Samples]:
        table = self.table_of_samples = self.columns()
        train, val, test = (None if rows is None else self.samples_at(table, rows) for rows in divided(self, table))
        assert test is not None
        if train is not None:
            return train, val, test
        nothing = test.subset(torch.zeros(0, dtype=torch.int64))
        return nothing, nothing, test

    load_fold = load

    def groups_of(self, train: Samples) -> Sequence[str] | None:
        return self.whole(train.names)

    def samples_at(self, table: Columns, rows: Int64[Tensor, " m"]) -> Samples:
        """The samples of these rows."""
        sources = chosen(table.sources, rows)
        content = f"{self.settings_of_reading()} ".encode() + self.content_of(sources)
        digest = hashlib.sha256(content).hexdigest()
        inputs = self.read_all(sources, digest) if self.stay_in_memory(sources) else Files(sources, self.read_item)
        return self.samples_of(inputs, table.labels[rows], chosen(table.names, rows), digest, **self.details(sources))

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        if not hasattr(self, "test_set") or not len(self.train_set):  # for predictions, or for a test only
            return
        tested = counts(self.test_set.labels, self.num_classes).tolist()
        absent = [name for name, number in zip(self.class_names, tested, strict=True) if not number]
        if absent:
            others = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
            what = f"no sample to test of class {', '.join(absent[:5])}{others}"
            self.remark(f"{what}, so no figure says how well it is known; add some")

    def refuse_or_tell(self, bad: dict[str, str]) -> None:
        """Tell the user how many broken files are left out.

        Args:
            bad: The error of each broken file, by path.

        Raises:
            DataError: If there is a broken file, unless on_error is "skip".
        """
        if bad and self.on_error == "raise":
            path, what = next(iter(bad.items()))
            others = f"; {counted(len(bad) - 1, 'more broken file')}" if len(bad) > 1 else ""
            raise DataError(
                f"{self.folder / path}: {what}{others}: python train.py check lists all, --data.on_error skip leaves "
                "them out"
            )
        if bad:
            say(f"{self.root}: {counted(len(bad), 'broken file')} left out; python train.py check lists all")
