"""The contract of a data module: what a trainer, an encoder and the command line may expect of every data set."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
from jaxtyping import Int64, Shaped
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from datamodules.order import CountedSampler, RankSampler


class DataError(Exception):
    """Data that is missing or broken; the message reads "<path or key>: <what>; <remedy>", on one line."""

    exit_code = 3


def require(holds: bool, name: str, rule: str, value: object, remedy: str) -> None:
    """Check one constructor argument.

    Raises:
        ValueError: Unless `holds`; its first word is the argument's name.
    """
    if not holds:
        raise ValueError(f"{name} must be {rule}, got {value!r}; {remedy}")


def hold_out(
    labels: Int64[Tensor, " n"], fraction: float, seed: int
) -> tuple[Int64[Tensor, " kept"], Int64[Tensor, " held"]]:
    """Split 0..n-1 into the indices kept and those held out, the same fraction of every class.

    A class of two or more has at least one index on either side, a class of one is kept. Both parts are sorted, and
    depend on the arguments alone.
    """
    generator = torch.Generator().manual_seed(seed)
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        count = min(max(round(fraction * len(members)), 1), len(members) - 1)
        held_out[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    return (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]


class LabelledTensors(Dataset):
    """Inputs and labels in memory; a batch is one indexing of each tensor, not a stack of samples."""

    def __init__(self, inputs: Shaped[Tensor, "n ..."], labels: Int64[Tensor, " n"]) -> None:
        self.inputs = inputs
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]

    # DataLoader fetches a whole batch through this name. A batch sampler passed as `sampler` would do as much in one
    # process, but under DDP Lightning replaces the sampler, and with it the batches.
    __getitems__ = __getitem__

    def subset(self, indices: Int64[Tensor, " m"]) -> "LabelledTensors":
        """The samples at these indices."""
        return type(self)(self.inputs[indices], self.labels[indices])


class _Files(Dataset):
    """Foreign files, each read when it is asked for."""

    def __init__(self, paths: Sequence[str], read: Callable[[str], Tensor]) -> None:
        self.paths = paths
        self.read = read

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        return self.read(self.paths[index])


def _as_it_is(batch: Any) -> Any:
    return batch


class DataModule(pl.LightningDataModule, ABC):
    """A labelled data set with its three splits, and a way to read foreign files as inputs of the same kind.

    A batch is `(inputs, labels)`, labels int64 (b,). Inputs are a tensor (b, *shape), or, of sounds, a dictionary of
    waveforms and their lengths. A batch of predict_dataloader is inputs only.

    Every constructor argument of a subclass is of a plain type (int, float, str, bool, None, list) and is kept as an
    attribute of the same name, so that a checkpoint can describe the data module. The constructor touches no file:
    `num_classes`, `class_names` and `shape` are known before there is any data.

    Args:
        batch_size: Samples in a batch, of each process.
        num_workers: Processes that load; 0 loads in the trainer's own process, the best choice for data in memory.
        val_fraction: Share of the training split that is held out for validation, in (0, 1).
        seed: Of the validation split and of the order of training, which it and the epoch decide alone.

    Attributes:
        predict_paths: The files that predict_dataloader reads, in this order.
        train_set, val_set, test_set: The splits, after setup.

    Raises:
        ValueError: If an argument is out of its range.
        DataError: From setup or prepare_data, if files are missing or broken.
    """

    class_names: list[str]
    shape: tuple[int, ...]
    predict_suffixes: ClassVar[frozenset[str]]  # of files that `read` understands, in lower case, with the dot

    train_set: LabelledTensors
    val_set: LabelledTensors
    test_set: LabelledTensors

    def __init__(self, batch_size: int = 64, num_workers: int = 0, val_fraction: float = 0.1, seed: int = 0) -> None:
        super().__init__()
        require(batch_size >= 1, "batch_size", "at least 1", batch_size, "64 is a good start")
        require(num_workers >= 0, "num_workers", "0 or more", num_workers, "0 loads in the trainer's own process")
        require(0 < val_fraction < 1, "val_fraction", "between 0 and 1", val_fraction, "0.1 is a tenth")
        require(0 <= seed < 2**63, "seed", "in 0..2**63 - 1", seed, "0 is as good as any")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self.seed = seed
        self.predict_paths: list[str] = []
        self._start = (0, 0)

    def state_dict(self) -> dict[str, int]:
        """Where a training is: the epoch, and how many of its batches are done."""
        loop = self.trainer.fit_loop  # type: ignore[union-attr]
        total, of_epoch = loop.epoch_loop.batch_progress.total.processed, self.trainer.num_training_batches  # type: ignore[union-attr]
        return {"epoch": total // of_epoch, "batches": total % of_epoch} if total else {"epoch": 0, "batches": 0}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on where the state was taken: the loader of a training starts there."""
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:  # a test of a checkpoint is no start
            self._start = (state_dict["epoch"], state_dict["batches"])

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @abstractmethod
    def load(self) -> tuple[LabelledTensors, LabelledTensors]:
        """The training split (validation still in it) and the test split.

        Raises:
            DataError: If files are missing or broken.
        """

    @abstractmethod
    def read(self, path: str | os.PathLike[str]) -> Shaped[Tensor, "..."]:
        """One model input from a foreign file.

        Raises:
            DataError: If the file cannot be read; the message names it.
        """

    def collate(self, inputs: list[Tensor]) -> Any:
        """The inputs of a batch, of what `read` gave."""
        return torch.stack(inputs)

    def split_validation(self, train: LabelledTensors) -> tuple[Int64[Tensor, " kept"], Int64[Tensor, " held"]]:
        """The indices of `train` to train on and those to validate on: the same share of every class."""
        return hold_out(train.labels, self.val_fraction, self.seed)

    def setup(self, stage: str | None = None) -> None:
        if stage == "predict" or hasattr(self, "test_set"):  # predicting on foreign files needs none of our own
            return
        train, test = self.load()
        kept, held_out = self.split_validation(train)
        self.train_set, self.val_set, self.test_set = train.subset(kept), train.subset(held_out), test

    def train_dataloader(self) -> DataLoader:
        sampler = CountedSampler(len(self.train_set), self.batch_size, self.seed)
        sampler.start(*self._start)
        return self._loader(self.train_set, collate_fn=_as_it_is, sampler=sampler)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.val_set, collate_fn=_as_it_is, sampler=RankSampler(len(self.val_set)))

    def test_dataloader(self) -> DataLoader:
        return self._loader(self.test_set, collate_fn=_as_it_is, sampler=RankSampler(len(self.test_set)))

    def predict_dataloader(self) -> DataLoader:
        return self._loader(_Files(self.predict_paths, self.read), collate_fn=self.collate)

    def _loader(self, dataset: Dataset, **options: Any) -> DataLoader:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            # workers are seeded from it, so that the loader draws nothing from the generator of the training
            generator=torch.Generator().manual_seed(self.seed),
            **options,
        )
