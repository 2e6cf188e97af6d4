"""The base of all data modules: what the trainer, encoders and the command line may expect of a data set."""

import csv
import hashlib
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import pytorch_lightning as pl
import torch
from jaxtyping import Float32, Shaped
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader

from datamodules.archives.write_shards import write_shards
from datamodules.cache import cached
from datamodules.compat import position_in_training
from datamodules.errors import DataError, printable, require, require_in, say
from datamodules.hold_out import Split, folds_of, hold_out
from datamodules.inputs import InputSpec
from datamodules.labels import Labels, classes_of, counts, rarest_classes, written
from datamodules.networks import Network, refuse_other_inputs
from datamodules.order import CountedSampler, RankSampler, SizedRankSampler, SizedSampler, all_ranks
from datamodules.own.scan import progress
from datamodules.samples import Files, ForTraining, LabelledTensors, Samples, Unfinished
from datamodules.windows import Part
from datamodules.workers import begin_worker

__all__ = ["DataError", "DataModule", "LabelledTensors", "Samples", "hold_out", "require"]


# A larger number is a mistake: the largest published batches had about 2**20 samples, over all processes.
_LARGEST_BATCH = 2**20
# A smaller share is a mistake too: it holds out one sample of each class, which measures nothing.
_SMALLEST_SHARE = 1e-4
# Of the free memory of a GPU: the training set takes no more, so that batches may be as large as without.
_SHARE_ON_GPU = 0.1


def _as_it_is(batch: Any) -> Any:
    return batch


def _digest(texts: Iterable[str]) -> str:
    hashing = hashlib.sha256()
    for text in texts:
        hashing.update(text.encode(errors="surrogatepass") + b"\0")
    return hashing.hexdigest()


def _kind(value: Any) -> tuple[Any, ...]:
    return (list(value.shape), value.dtype) if isinstance(value, Tensor) else (type(value).__name__, None)


@runtime_checkable
class LooksAtData(Protocol):
    """A transform that depends on the training split as a whole."""

    def look_at(self, data: "DataModule") -> str | None:
        """Learn from the data module after its setup, and return a line for the user, or None."""
        ...


class DataModule(pl.LightningDataModule, ABC):
    """A labelled data set with its three splits, and a way to read foreign files as inputs of the same kind.

    A batch is `(inputs, labels)`, labels int64 (b,). Inputs are a tensor (b, *shape), or for sounds a dictionary of
    waveforms and their lengths. A batch of predict_dataloader is inputs only.

    A subclass keeps each constructor argument as an attribute of the same name, so that a checkpoint can describe the
    data module. Each argument has a plain type (int, float, str, bool, None, list) or is a transform. The constructor
    touches no file. Subclasses pass the arguments below to this class as keywords.

    Args:
        batch_size: Samples in a batch of each process.
        num_workers: Processes that load; 0 loads in the trainer's own process, the best choice for data in memory.
        val_fraction: Share of the training split that is held out for validation if the data has no such split.
        seed: Decides the splits. Seed and epoch alone decide the order of training and what is random in it.
        balanced: Whether a training epoch draws all classes equally often, with replacement, for any class sizes.
        folds: Number of folds for cross-validation; each fold has the same share of every class.
        fold: The fold that is held out as the test split, 1..folds. If the data has its own test split, that split is
            in no fold, and the held-out fold is the validation split.

    Attributes:
        num_classes, class_names: The number and the names of the classes.
        shape: The shape of one input, or of the longest one.
        inputs: What one input is: its kind, type, range, unit and rate.
        augment: Transforms of single inputs, used in training only. A transform with a method look_at(data) is first
            called with this data module, after setup, and may return a line for the user.
        predict_parts: The files, or parts of files, that predict_dataloader reads, in this order; see `parts`.
        train_set, val_set, test_set: The splits, after setup.
        remarks: What the user was told about the data as a whole, such as copies in two splits; complete after setup.
        taught: What a teacher gives of each training sample, which longseq sets. A training batch is then `(inputs,
            labels, taught)`.

    Raises:
        ValueError: If an argument is out of its range.
        DataError: From setup or prepare_data, if files are missing or broken.
    """

    class_names: list[str]
    shape: tuple[int, ...]
    augment: Sequence[Callable[[Tensor], Tensor]] = ()
    on_error: Literal["raise", "skip"] = "raise"  # what happens if a file cannot be read
    labels_separator: str | None = None  # the text between the classes of a label; None if a label is one class
    predict_suffixes: ClassVar[frozenset[str]]  # of files that `read` understands, in lower case, with the dot
    # The argument with the folder of the user's own data; experiments get the name of that folder.
    named_by: ClassVar[str | None] = None

    train_set: Samples
    val_set: Samples
    test_set: Samples

    def __init__(
        self,
        batch_size: int = 64,
        num_workers: int = 0,
        val_fraction: float = 0.1,
        seed: int = 0,
        balanced: bool = False,
        folds: int | None = None,
        fold: int | None = None,
    ) -> None:
        super().__init__()
        require_in("batch_size", batch_size, 1, _LARGEST_BATCH, "64 is a good start")
        require_in("num_workers", num_workers, 0, 1024, "0 loads in the trainer's process")
        require_in("val_fraction", val_fraction, _SMALLEST_SHARE, 1 - _SMALLEST_SHARE, "0.1 is a tenth")
        require(0 <= seed < 2**63, "seed", "in 0..2**63 - 1", seed, "0 is as good as any")
        if folds is not None:
            require_in("folds", folds, 2, 1000, "5 is usual")
        is_fold = fold is None if folds is None else fold is not None and 1 <= fold <= folds
        require(is_fold, "fold", "in 1..folds, and given with folds", fold, "fit --folds 5 trains with each in turn")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self.seed = seed
        self.balanced = balanced
        self.folds, self.fold = folds, fold
        self.predict_parts: list[Part] = []
        self.remarks: list[str] = []
        self.taught: Float32[Tensor, "n f"] | None = None
        self._start = (0, 0)
        self._training: ForTraining | None = None

    def state_dict(self) -> dict[str, int]:
        """The position in a training: the epoch, its finished batches, the batch size and the number of processes."""
        epoch, batches = position_in_training(self.trainer)
        shared = {"batch_size": self.batch_size, "processes": self._ranks()[1]}
        return {"epoch": epoch, "batches": batches, **shared}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Resume from a state: the training loader starts at its position.

        If the number of processes has changed, they share the same batches, unless the user has changed `batch_size`.

        Raises:
            DataError: If the samples of a batch cannot be divided by the number of processes.
        """
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:  # not for a test of a checkpoint
            self._start = (state_dict["epoch"], state_dict["batches"])
            trainer: Any = self.trainer
            if trainer is not None and not trainer.overfit_batches:  # else the sampler is Lightning's
                warnings.filterwarnings("ignore", ".*your dataloader is not resumable")
            if state_dict.get("batch_size") == self.batch_size:  # an older checkpoint has none
                self._share_batches(self.batch_size, state_dict["processes"], self._ranks()[1])

    def _share_batches(self, batch_size: int, before: int, now: int) -> None:
        whole = batch_size * before
        if whole % now:
            what = f"{now} processes cannot share the batches of {whole} samples that {before} had"
            raise DataError(f"trainer.devices: {what}; ask for a number that divides {whole}")
        if now != before:
            self.batch_size = whole // now
            change = f"{self.batch_size} on {now} processes, it was {batch_size} on {before}"
            rank_zero_only(print)(f"data.batch_size: {change}")

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    # What a data set defines

    @property
    def inputs(self) -> InputSpec:
        """What one input is; by default float32 numbers of the shape ``shape``."""
        return InputSpec("inputs", torch.float32, tuple(self.shape))

    @abstractmethod
    def load(self) -> tuple[Samples, Samples | None, Samples]:
        """The training, validation and test split; if validation is None, it is held out from the training split.

        Raises:
            DataError: If files are missing or broken.
        """

    @abstractmethod
    def read(self, path: str | os.PathLike[str]) -> Shaped[Tensor, "..."]:
        """One model input from a foreign file.

        Raises:
            DataError: If the file cannot be read; the message names it.
        """

    def parts(
        self, path: str, window: float | None = None, hop: float | None = None, any_length: bool = False
    ) -> list[Part]:
        """The parts of a file that are separate inputs. By default this is the whole file; sounds may have several.

        Args:
            path: The file.
            window: Length of each part in seconds; None for as few parts as needed.
            hop: Seconds from the start of one part to the next; None for the length of the window.
            any_length: Whether the model takes inputs of any length.

        Raises:
            DataError: If the file cannot be read.
            ValueError: If it has no such parts.
        """
        require(window is None and hop is None, "window", "left out", window, "only sounds have windows")
        return [(path, 0.0, None)]

    def read_part(self, part: Part) -> Shaped[Tensor, "..."]:
        """One model input from a part of a file, as `parts` returns it.

        Raises:
            DataError: If the file cannot be read, or does not contain finite numbers.
        """
        inputs = self.read(part[0])
        if inputs.is_floating_point() and not inputs.isfinite().all():
            raise DataError(f"{part[0]}: contains NaN or infinity; remove such values")
        return inputs

    def read_input(self, part: Part) -> Shaped[Tensor, "..."]:
        """What the model gets of a part of a file: what `read_part` returns, or what a network makes of it."""
        return self.read_part(part)

    def split_validation(self, train: Samples) -> Split:
        """The indices of `train` to train on and to validate on: the same share of every class, and whole groups."""
        return hold_out(train.labels, self.val_fraction, self.seed, self.groups_of(train))

    def load_fold(self) -> tuple[Samples, Samples | None, Samples]:
        """Like `load`, with folds: the test split of `load`, and `fold` of the rest as the validation split.

        Raises:
            DataError: If files are missing or broken, or if the data cannot be divided into these folds.
        """
        train, val, test = self.load()
        if val is not None:
            what = f"{type(self).__name__} has a validation split of its own, so there is nothing to divide"
            raise DataError(f"data.folds: {what}; leave it out")
        of_train, of_val = self.hold_out_fold(train.labels, self.groups_of(train))
        return train.subset(of_train), train.subset(of_val), test

    def groups_of(self, train: Samples) -> Sequence[str] | None:
        """The name of each sample's group. A group is never divided between splits. None: samples have no groups."""
        return None

    def hold_out_fold(self, labels: Labels, groups: Sequence[str] | None) -> Split:
        """The indices of the samples outside `fold`, and of the samples in it.

        Raises:
            DataError: If there are too few samples or groups.
        """
        assert self.folds is not None and self.fold is not None
        if not len(labels):
            raise DataError("data.folds: no readable sample is left to divide; leave it out, or add some to train on")
        num_groups = len(labels) if groups is None else len(set(groups))
        largest = int(rarest_classes(labels).unique(return_counts=True)[1].max())
        what = f"{self.folds} folds of {num_groups} files or groups, {largest} samples in the largest class"
        if min(num_groups, largest) < self.folds:
            raise DataError(f"data.folds: {what}; ask for fewer folds")
        numbers = folds_of(labels, groups, self.folds, self.seed)
        if len(numbers.unique()) < self.folds:
            raise DataError(f"data.folds: {what}, leave a fold empty; ask for fewer folds")
        folds_with: dict[int, set[int]] = {}
        for number, classes in zip(numbers.tolist(), classes_of(labels), strict=True):
            for label in classes:
                folds_with.setdefault(label, set()).add(number)
        alone = [label for label, in_folds in sorted(folds_with.items()) if len(in_folds) == 1]
        if alone:
            what = f"class {self.class_names[alone[0]]} is in one fold only, so nothing is left of it to train on"
            raise DataError(f"data.folds: {what}; add some of it, or take the class out")
        return (numbers != self.fold).nonzero()[:, 0], (numbers == self.fold).nonzero()[:, 0]

    @abstractmethod
    def figures(self, samples: Samples) -> dict[str, Any]:
        """Figures of a split other than its size, such as means, deviations and lengths."""

    def file_of(self, samples: Samples, index: int) -> tuple[str, bytes]:
        """A sample as a file: the suffix and the bytes of the sample's own file, or of a new file if it has none.

        Raises:
            DataError: If there is no file format for this kind of input.
        """
        raise DataError(f"data: {type(self).__name__} has no files; derive it from a module of images or of sounds")

    def samples_of(self, inputs: Sequence[Tensor] | Tensor, *arguments: Any, **details: Any) -> Samples:
        """A data set of inputs of this kind."""
        return Samples(inputs, *arguments, **details)

    def remark(self, what: str) -> None:
        """Tell the user something about the data as a whole, once, and store it for the model card."""
        what = printable(what)
        if what not in self.remarks:
            self.remarks.append(what)
            say(f"{getattr(self, 'root', None) or type(self).__name__}: {what}")

    # Splits

    def setup(self, stage: str | None = None) -> None:
        self._start, self.taught = (0, 0), None  # a checkpoint is restored after this
        if stage == "predict" or hasattr(self, "test_set"):  # a prediction of foreign files needs no splits
            return
        train, val, test = self.load() if self.folds is None else self.load_fold()
        if val is None:
            of_train, of_val = self.split_validation(train)
            train, val = train.subset(of_train), train.subset(of_val)
        if len(train):
            for name, samples in (("validation", val), ("test", test)):
                if not len(samples):
                    what = f"nothing is left for the {name} split, because each class has only one sample or file"
                    raise DataError(f"data.root: {what}; add some of each class")
            self._refuse_unfit_augmentations(train)
        elif stage != "test":
            raise DataError("data.root: holds samples to test on alone, which only the command test takes; add train")
        self.train_set, self.val_set, self.test_set = train, val, test

    def _refuse_unfit_augmentations(self, train: Samples) -> None:
        """Try the transforms on one sample, so that they cannot fail in the middle of a training.

        Raises:
            DataError: If a transform fails, or if they change the shape or the type of the sample.
        """
        plain = train.sample(0)
        drawn: Any = plain
        with torch.random.fork_rng(devices=[]):
            for transform in self.augment:
                try:
                    drawn = transform(drawn)
                except Exception as error:  # the transform may be from any library
                    what = f"{type(transform).__name__} fails ({' '.join(str(error).split())})"
                    raise DataError(f"data.augment: {what}; choose transforms for {plain.dtype} inputs") from error
        for before, after in zip(_kind(plain), _kind(drawn), strict=True):
            if before != after:
                what = f"makes {after} of an input of {before}"
                raise DataError(f"data.augment: {what}; choose transforms that keep shape and type")

    def splits(self) -> dict[str, Samples]:
        """The splits by their names, after setup."""
        return {"train": self.train_set, "val": self.val_set, "test": self.test_set}

    @cached_property
    def identity(self) -> dict[str, int | str]:
        """What must be unchanged when a training is resumed: the size of each split, and digests of its samples.

        It does not depend on the data's folder or on the machine.
        """
        splits = self.splits()
        return {
            **{f"{name} samples": len(samples) for name, samples in splits.items()},
            "names of samples": _digest(name for samples in splits.values() for name in samples.names),
            "labels of samples": _digest(str(samples.labels.tolist()) for samples in splits.values()),
            "contents of samples": _digest(samples.exact_digest() for samples in splits.values()),
        }

    def save_splits(self, path: Path) -> None:
        """Write a table with the location, the label and the split of each sample."""
        columns = [*self.located(self.test_set.names[0]), "label", "split"]
        with open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:  # names hold any bytes
            table = csv.DictWriter(file, columns)
            table.writeheader()
            for split, samples in self.splits().items():
                labels = written(samples.labels, self.class_names, self.labels_separator or ";")
                for name, label in zip(samples.names, labels, strict=True):
                    table.writerow({**self.located(name), "label": label, "split": split})

    def located(self, name: str) -> dict[str, Any]:
        """The columns with the location of the sample of this name in the table of splits: its path, or its number."""
        return {"path": name}

    def bad_files(self) -> dict[str, str]:
        """The error of each broken file, by path; empty if the data is not in files."""
        return {}

    def true_events(self, split: str) -> dict[str, list[tuple[float, float, str]]]:
        """The events in each recording of a split, by path: start and end in seconds, and the name of the class.

        Empty if the labels do not give the times of events.
        """
        return {}

    def statistics(self) -> dict[str, Any]:
        """Sizes of splits and classes, and figures of the training set. They are cached by content."""
        sizes = {f"{name} samples": len(samples) for name, samples in self.splits().items()}
        of_classes = counts(self.train_set.labels, self.num_classes).tolist()
        figures = self.remember("figures", lambda: self.figures(self.train_set))
        return {
            **sizes,
            "classes": self.num_classes,
            "train samples of each class": dict(zip(self.class_names, of_classes, strict=True)),
            **figures,
        }

    def remember(self, what: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A result of the training set. It is cached by the content of the training set and what its inputs are.

        Args:
            what: Names the result and everything that it depends on, except for the training set.
            compute: Returns tensors and plain values.
        """
        inputs = f"{self.inputs.shape} {self.inputs.dtype}"  # the digest does not tell (1, 12, n) from (12, 1, n)
        return cached("statistics", f"{what}\n{inputs}\n{self.train_set.digest()}", compute)

    def outputs_of(self, network: Network) -> Float32[Tensor, "n f"]:
        """What a frozen network gives of each training sample, not augmented: the mean over its windows or tiles,
        without coordinates. It is computed once and cached, by the network and the contents of the samples.

        Raises:
            DataError: If the network takes other inputs.
        """
        refuse_other_inputs(network, self.inputs.kind, self)
        train = self.train_set

        def compute() -> dict[str, Any]:
            numbers = progress(range(len(train)), f"teaching {type(self).__name__}", len(train))
            return {"outputs": torch.stack([network.mean_of(self.resized(train.sample(n), network)) for n in numbers])}

        rate_hz = self.inputs.rate_hz  # of inputs in memory, which their digest does not tell
        return self.remember(f"outputs {network.identity} {rate_hz}", compute)["outputs"]

    def resized(self, values: Tensor, network: Network) -> Tensor:
        """An input, at the rate or the size of a network."""
        return values

    def write_shards(self, folder: Path, samples_per_shard: int) -> int:
        """Write every split as tar archives (archives/write_shards.py), after setup. Returns the number of archives.

        Raises:
            DataError: If the folder already contains other shards.
        """
        return write_shards(self, folder, samples_per_shard)

    def flags_of_shards(self, root: str) -> list[str]:
        """The command-line flags of a data module that reads the shards written into a folder by `write_shards`."""
        raise NotImplementedError

    # Loaders

    def training_augment(self) -> Sequence[Callable[[Tensor], Tensor]]:
        """The transforms of ``augment`` as training applies them, after setup."""
        return self.augment

    def train_dataloader(self) -> DataLoader:
        train = self.train_set
        for transform in self.augment:
            if isinstance(transform, LooksAtData) and (line := transform.look_at(self)):
                self.remark(line)
        sampler = self._order_of_training(train)
        sampler.start(*self._start)
        gpu = self._gpu()
        augment = self.training_augment()
        training = ForTraining(train, augment, self.seed, is_deferred=gpu is not None, taught=self.taught)
        if gpu is not None:
            training.is_on_device = training.num_bytes <= _SHARE_ON_GPU * self._free_bytes(gpu)
        self._training = training
        options = {"num_workers": 0, "persistent_workers": False} if training.is_on_device else {}
        return self._loader(training, sampler=sampler, **options)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Finish a training batch on the GPU; other batches do not change. The model's hook of this name comes next."""
        if isinstance(batch, Unfinished):
            assert self._training is not None
            batch = self._training.finish(batch)
        if self.trainer is None:
            return batch
        # Lightning calls the hook of the data module in place of the model's
        return self.trainer.lightning_module.on_after_batch_transfer(batch, dataloader_idx)

    def teardown(self, stage: str | None = None) -> None:
        """Give back the GPU's memory of the training set."""
        self._training = None

    def _gpu(self) -> torch.device | None:
        """The GPU of a training, which finishes batches; None on a CPU, where the loader does it."""
        if self.trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            return None
        if self.trainer.state.finished:  # nobody would finish the batches
            return None
        device = self.trainer.strategy.root_device
        return device if device.type == "cuda" else None

    def _free_bytes(self, gpu: torch.device) -> int:
        return torch.cuda.mem_get_info(gpu)[0]

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.val_set, sampler=self._order_of_evaluation(self.val_set))

    def test_dataloader(self) -> DataLoader:
        return self._loader(self.test_set, sampler=self._order_of_evaluation(self.test_set))

    def predict_dataloader(self) -> DataLoader:
        collate = self.samples_of([], torch.zeros(0, dtype=torch.int64)).collate
        return self._loader(Files(self.predict_parts, self.read_input), collate_fn=collate, **self._predict_options())

    def longest_batch(self) -> Any:
        """The training batch that takes the most memory."""
        train = self.train_set
        lengths = torch.zeros(len(train)) if train.lengths is None else train.lengths
        return train.__getitems__(lengths.argsort(descending=True)[: self.batch_size].tolist())

    def _order_of_training(self, train: Samples) -> CountedSampler:
        labels = train.labels if self.balanced else None
        return CountedSampler(len(train), self.batch_size, self.seed, train.lengths, labels, self._ranks)

    def _order_of_evaluation(self, samples: Samples) -> RankSampler:
        return RankSampler(len(samples), samples.lengths, self._ranks)

    def _predict_options(self) -> dict[str, Any]:
        """Further arguments of the loader for predictions."""
        return {}

    def _ranks(self) -> tuple[int, int]:
        """The part of the samples that this process gets: its number, and the number of parts.

        All processes get different parts, unless the strategy lets several processes share a sample.
        """
        strategy = None if self.trainer is None else self.trainer.strategy
        asked = getattr(strategy, "distributed_sampler_kwargs", None)
        return all_ranks() if asked is None else (asked["rank"], asked["num_replicas"])

    def _loader(self, dataset: Any, **options: Any) -> DataLoader:
        if isinstance(options.get("sampler"), SizedSampler | SizedRankSampler):
            options["batch_size"] = None  # the sampler returns whole batches
        workers = {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
        return DataLoader(
            dataset,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
            # seeds the workers; without it the loader would draw from the generator of the training
            generator=torch.Generator().manual_seed(self.seed),
            worker_init_fn=begin_worker,
            # the data set returns whole batches
            **{**workers, "batch_size": self.batch_size, "collate_fn": _as_it_is, **options},
        )
