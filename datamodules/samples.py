"""The data sets of a data module's loaders: labelled inputs in memory or in files, and how they become batches."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from jaxtyping import Float32, Float64, Int64, Shaped
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from datamodules.batch_augment import changed, divided, draws_of
from datamodules.cache import sha256_of_text
from datamodules.errors import say
from datamodules.labels import Labels


class Samples(Dataset):
    """Inputs with their labels, in memory or read from files when they are needed.

    A batch is `(inputs, labels)`. `__getitems__` makes it of all its samples at once.

    Args:
        inputs: One tensor for each sample.
        labels: The label of each sample, from 0.
        names: A readable name of each sample, in most cases a path. If absent, the samples are numbered.
        digest: A hash of the content, for inputs in files; for inputs in memory it is computed.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor] | Tensor,
        labels: Labels,
        names: Sequence[str] | None = None,
        digest: str | None = None,
    ) -> None:
        self.inputs, self.labels = inputs, labels
        self.names: Sequence[str] = list(map(str, range(len(labels)))) if names is None else names
        self._digest = digest

    def __len__(self) -> int:
        return len(self.labels)

    def sample(self, index: int, generator: torch.Generator | None = None) -> Tensor:
        """One input: cropped at random by the generator, for training; without a generator, as for evaluation."""
        return self.inputs[index]

    def collate(self, inputs: list[Tensor]) -> Any:
        """The inputs of a batch."""
        return torch.stack(inputs)

    def __getitem__(self, index: int | list[int]) -> tuple[Any, Tensor]:
        """A sample, or a batch for a sampler of whole batches."""
        return self.__getitems__(index) if isinstance(index, list) else (self.sample(index), self.labels[index])

    def __getitems__(self, indices: list[int]) -> tuple[Any, Tensor]:
        """A batch. DataLoader looks for a method of this name to fetch all samples of a batch at once."""
        return self.collate([self.sample(index) for index in indices]), self.labels[indices]

    @property
    def lengths(self) -> Int64[Tensor, " n"] | None:
        """The length of each sample if lengths differ, so that batches are padded; else None."""
        return None

    @property
    def is_cropped(self) -> bool:
        """Whether any sample is cropped."""
        return False

    def subset(self, indices: Int64[Tensor, " m"]) -> "Samples":
        """The samples at these indices."""
        return type(self)(
            chosen(self.inputs, indices),
            self.labels[indices],
            chosen(self.names, indices),
            self._digest and sha256_of_text(f"{self._digest} {indices.tolist()}"),
            **self._details(indices),
        )

    def _details(self, indices: Int64[Tensor, " m"]) -> dict[str, Any]:
        """Further constructor arguments of a subset."""
        return {}

    def digest(self) -> str:
        """A hash of inputs and labels."""
        hashing = hashlib.sha256(self.labels.numpy().tobytes())
        if self._digest is not None:
            hashing.update(self._digest.encode())
            return hashing.hexdigest()
        for values in self.inputs:
            hashing.update(values.contiguous().numpy().tobytes())
        return hashing.hexdigest()

    def exact_digest(self) -> str:
        """The digest, if it is the same on every machine and needs no reading of files; else empty.

        It is empty for inputs that were computed as floats, because their last bits depend on the processor.
        """
        is_exact = isinstance(self.inputs, Tensor) and not self.inputs.is_floating_point()
        return self.digest() if is_exact or self._digest is not None else ""


class LabelledTensors(Samples):
    """Inputs of one shape in one tensor: a batch is made by indexing the tensor once, not by stacking samples."""

    inputs: Shaped[Tensor, "n ..."]

    def __getitems__(self, indices: Any) -> tuple[Tensor, Tensor]:
        return self.inputs[indices], self.labels[indices]


class Sequences(Samples):
    """Inputs of any length.

    Args:
        inputs, labels, names, digest: See Samples.
        lengths: The length of each input, if they are in files.
    """

    axis: ClassVar[int] = 0  # along which inputs have their lengths

    def __init__(
        self,
        inputs: Sequence[Tensor] | Tensor,
        labels: Labels,
        names: Sequence[str] | None = None,
        digest: str | None = None,
        lengths: Int64[Tensor, " n"] | None = None,
    ) -> None:
        super().__init__(inputs, labels, names, digest)
        if lengths is None:
            lengths = torch.tensor([sequence.shape[self.axis] for sequence in inputs])
        self.whole_lengths = lengths

    @property
    def lengths(self) -> Int64[Tensor, " n"] | None:
        return self.whole_lengths if len(self.whole_lengths.unique()) > 1 else None

    def _details(self, indices: Int64[Tensor, " m"]) -> dict[str, Any]:
        return {"lengths": self.whole_lengths[indices]}


class Bags(Sequences):
    """Features of any number of tokens. A batch is ({"features": (b, n, f + p), "lengths": (b,)}, labels).

    A sample is (n, f + p): f features of each token, and p coordinates. n is the number of tokens of the largest sample
    of the batch. Zeros follow the tokens of smaller ones.
    """

    def collate(self, inputs: list[Tensor]) -> dict[str, Tensor]:
        return _padded("features", inputs, 0)

    def figures(self, num_features: int) -> dict[str, Any]:
        """The numbers of tokens, and of their features."""
        tokens = self.whole_lengths
        return {
            "tokens of a bag, fewest / median / most": [int(tokens.min()), int(tokens.median()), int(tokens.max())],
            "tokens, in all": int(tokens.sum()),
            "features of a token": num_features,
        }


class Clips(Sequences):
    """Sounds of any length. A batch is ({"waveforms": (b, s), "lengths": (b,)}, labels); with several channels the
    waveforms are (b, channels, s).

    s is the length of the longest clip of the batch. Shorter clips are padded with zeros at the end.

    Args:
        inputs: Waveforms of any lengths, or a tensor (n, s) or (n, channels, s) if all have the same length.
        labels, names, digest, lengths: See Sequences.
        max_samples: Longer clips are cropped: at random in training, else to their middle.
    """

    axis = -1

    def __init__(
        self, inputs: Sequence[Tensor] | Tensor, *arguments: Any, max_samples: int | None = None, **details: Any
    ) -> None:
        super().__init__(inputs, *arguments, **details)
        self.max_samples = max_samples

    @property
    def lengths(self) -> Int64[Tensor, " n"] | None:
        lengths = self.whole_lengths
        if self.max_samples is not None:
            lengths = lengths.clamp(max=self.max_samples)
        return lengths if len(lengths.unique()) > 1 else None

    @property
    def is_cropped(self) -> bool:
        return self.max_samples is not None and bool((self.whole_lengths > self.max_samples).any())

    def sample(self, index: int, generator: torch.Generator | None = None) -> Float32[Tensor, "*channels s"]:
        waveform = self.inputs[index]
        length = waveform.shape[-1]
        spare = length - (self.max_samples or length)
        if spare <= 0:
            return waveform
        start = spare // 2 if generator is None else int(torch.randint(spare + 1, (), generator=generator))
        part = waveform[..., start : start + length - spare]
        if part[..., 0].isnan().all() and part.isnan().all():  # inside a gap of a signal, where nothing can be learned
            known = (~waveform.isnan()).view(-1, length).any(0).nonzero()
            start = min(int(known[0]), spare) if len(known) else start
            part = waveform[..., start : start + length - spare]
        return part

    def collate(self, inputs: list[Tensor]) -> dict[str, Tensor]:
        return pad_clips(inputs)

    def _details(self, indices: Int64[Tensor, " m"]) -> dict[str, Any]:
        return {"max_samples": self.max_samples, **super()._details(indices)}


Result = TypeVar("Result")


class Files(Sequence[Result]):
    """Inputs in files. Each file is read when its input is needed.

    Args:
        sources: What to read for each input: rows of a table, or a tensor (n,) of sample numbers, which takes less
            memory.
        read: Reads the input of one source.
    """

    def __init__(self, sources: Sequence[Any] | Int64[Tensor, " n"], read: Callable[[Any], Result]) -> None:
        self.sources, self.read = sources, read

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: Any) -> Any:
        return self.read(self.sources[index])

    def __iter__(self) -> Iterator[Result]:
        return map(self.read, self.sources)


class Unfinished(NamedTuple):
    """A training batch that `ForTraining.finish` completes on the device of the training.

    Attributes:
        inputs: (b, *shape), or if the whole training set is on the device, indices (b,).
        labels: The label of each sample.
        draws: The random numbers of each sample.
        taught: What a teacher gives of each sample; None without one.
    """

    inputs: Tensor
    labels: Labels
    draws: Float64[Tensor, "b m"]
    taught: Float32[Tensor, "b f"] | None = None


class ForTraining(Dataset):
    """The samples of a training epoch, cropped at random and augmented: (seed, epoch, index) decide the changes.

    The keys of this data set are epoch * n + index. The workers live through all epochs, and find the epoch in the key.

    Args:
        samples: The samples without changes.
        transforms: Applied to each input in turn; they draw from torch's own generator. The last ones are applied to
            whole batches where that gives the same (batch_augment.py).
        seed: The seed of crops and transforms.
        is_deferred: Whether a batch is `Unfinished` where possible, so that its last changes happen on another device.
        taught: What a teacher gives of each sample; a batch is then `(inputs, labels, taught)`.

    Attributes:
        is_on_device: Whether a batch is of indices, and `finish` takes their inputs from a copy of all samples on the
            device.
    """

    def __init__(
        self,
        samples: Samples,
        transforms: Sequence[Callable[[Tensor], Tensor]],
        seed: int,
        is_deferred: bool = False,
        taught: Float32[Tensor, "n f"] | None = None,
    ) -> None:
        self.samples, self.seed, self.is_deferred, self.taught = samples, seed, is_deferred, taught
        is_tensor = type(samples).collate is Samples.collate  # a batch of inputs
        self.transforms, self._of_batches = divided(transforms) if is_tensor else (transforms, [])
        self._num_draws = sum(transform.num_draws for transform in self._of_batches)
        self.is_on_device = False
        self._on_device: Tensor | None = None
        self.labels, self.names, self.collate = samples.labels, samples.names, samples.collate

    @property
    def num_bytes(self) -> float:
        """The size of a copy of all samples on the device; infinity if batches cannot be made of one."""
        is_enough = isinstance(self.samples, LabelledTensors) and not self.transforms
        return float(self.samples.inputs.nbytes) if is_enough else math.inf  # type: ignore[union-attr]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, keys: list[int]) -> tuple[Any, ...]:
        """A batch, for a sampler of whole batches."""
        return self.__getitems__(keys)

    def __getitems__(self, keys: list[int]) -> tuple[Any, ...]:
        places = [divmod(key, len(self)) for key in keys]
        indices = [index for _, index in places]
        if self.is_on_device:
            inputs: Any = torch.tensor(indices)
        elif self.transforms or self.samples.is_cropped:
            with torch.random.fork_rng(devices=[]):
                inputs = self.samples.collate([self.draw(key) for key in keys])
        else:
            inputs, _ = self.samples.__getitems__(indices)
        labels = self.labels[indices]
        taught = None if self.taught is None else self.taught[indices]
        if not (self._of_batches or self.is_on_device):
            return (inputs, labels) if taught is None else (inputs, labels, taught)
        batch = Unfinished(inputs, labels, draws_of(self.seed, places, self._num_draws), taught)
        return batch if self.is_deferred else self.finish(batch)

    def finish(self, batch: Unfinished) -> tuple[Tensor, ...]:
        """The batch with its inputs, changed on the device that they are on."""
        inputs, labels, draws, taught = batch
        if self.is_on_device:
            if self._on_device is None:
                assert isinstance(self.samples.inputs, Tensor)
                self._on_device = self.samples.inputs.to(inputs.device)
                size = f"{self.num_bytes / 1e6:.1f} MB"
                say(f"data: the training set ({size}) stays on the GPU, where its batches are made")
            inputs = self._on_device[inputs]
        inputs = changed(inputs, self._of_batches, draws)
        return (inputs, labels) if taught is None else (inputs, labels, taught)

    def draw(self, key: int) -> Tensor:
        """One input, cropped and changed by the transforms of single inputs. This seeds torch's generator."""
        epoch, index = divmod(key, len(self))
        generator = torch.default_generator.manual_seed(mix(self.seed, epoch, index))
        values = self.samples.sample(index, generator)
        for transform in self.transforms:
            values = transform(values)
        return values


def pad_clips(waveforms: Sequence[Tensor] | Tensor) -> dict[str, Tensor]:
    """Clips of any lengths as one tensor (b, s) or (b, channels, s), padded with zeros at the end, and their lengths
    (b,)."""
    return _padded("waveforms", waveforms, -1)


def _padded(name: str, sequences: Sequence[Tensor] | Tensor, axis: int) -> dict[str, Tensor]:
    lengths = torch.tensor([sequence.shape[axis] for sequence in sequences])
    first = [sequence.movedim(axis, 0) for sequence in sequences]
    padded = pad_sequence(first, batch_first=True)
    return {name: padded if axis == 0 or padded.ndim == 2 else padded.mT.contiguous(), "lengths": lengths}


def mix(*numbers: int) -> int:
    """A seed from numbers; neighbouring numbers give unrelated seeds (splitmix64)."""
    seed = 0
    for number in numbers:
        seed = (seed * 0x9E3779B97F4A7C15 + number + 1) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            seed = (seed ^ seed >> shift) * factor % 2**64
        seed = seed ^ seed >> 31
    return seed % 2**63


def chosen(inputs: Any, indices: Int64[Tensor, " m"]) -> Any:
    """The elements of a tensor, of files or of a list at these indices, as an object of the same kind."""
    if isinstance(inputs, Tensor):
        return inputs[indices]
    if isinstance(inputs, Files):
        return Files(chosen(inputs.sources, indices), inputs.read)
    return [inputs[index] for index in indices.tolist()]
