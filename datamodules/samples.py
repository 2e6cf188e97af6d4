"""The data sets behind a data module's loaders: labelled inputs in memory or in files, and how batches are made."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float32, Int64, Shaped
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from datamodules.labels import Labels


class Samples(Dataset):
    """Inputs, read when they are asked for or held in memory, with their labels.

    A batch is `(inputs, labels)`, made of all its samples at once.

    Args:
        inputs: One tensor a sample.
        labels: Of each sample, from 0.
        names: Of each sample, for people: a path in most cases. Their numbers if absent.
        digest: Stands for the inputs' content where they are in files; computed where they are in memory.
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
        """One input; with a generator as it is drawn for training, without as it is for evaluation."""
        return self.inputs[index]

    def collate(self, inputs: list[Tensor]) -> Any:
        """The inputs of a batch."""
        return torch.stack(inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.sample(index), self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Any, Tensor]:
        """A batch: the name through which DataLoader fetches all samples of it at once."""
        return self.collate([self.sample(index) for index in indices]), self.labels[indices]

    @property
    def lengths(self) -> Int64[Tensor, " n"] | None:
        """Of each sample, where they differ and batches are padded."""
        return None

    @property
    def is_cropped(self) -> bool:
        """Whether a sample is longer than what is drawn of it."""
        return False

    def subset(self, indices: Int64[Tensor, " m"]) -> "Samples":
        """The samples at these indices."""
        chosen: list[int] = indices.tolist()
        return type(self)(
            _chosen(self.inputs, indices),
            self.labels[indices],
            [self.names[index] for index in chosen],
            self._digest and hashlib.sha256(f"{self._digest} {chosen}".encode()).hexdigest(),
            **self._details(indices),
        )

    def _details(self, indices: Int64[Tensor, " m"]) -> dict[str, Any]:
        """Further arguments of a subset."""
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
        """The same of inputs that any machine reads alike; empty where they were computed as floats, whose last bits
        are the processor's, or would have to be read for it."""
        is_exact = isinstance(self.inputs, Tensor) and not self.inputs.is_floating_point()
        return self.digest() if is_exact or self._digest is not None else ""


class LabelledTensors(Samples):
    """Inputs of one shape in one tensor: a batch is one indexing of it, not a stack of samples."""

    inputs: Shaped[Tensor, "n ..."]

    def __getitems__(self, indices: Any) -> tuple[Tensor, Tensor]:
        return self.inputs[indices], self.labels[indices]


class Clips(Samples):
    """Sounds of any lengths. A batch is ({"waveforms": (b, s), "lengths": (b,)}, labels), where s is the length of its
    longest clip and zeros follow the shorter ones.

    Args:
        inputs: Waveforms, each of its own length, or all of one in a tensor (n, s).
        labels: Of each clip.
        names: Of each clip.
        digest: Stands for the content of clips in files.
        max_samples: Longer clips are cropped: for training anywhere, else to their middle.
        lengths: Of each clip, where its waveform is in a file.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor] | Tensor,
        labels: Labels,
        names: Sequence[str] | None = None,
        digest: str | None = None,
        max_samples: int | None = None,
        lengths: Int64[Tensor, " n"] | None = None,
    ) -> None:
        super().__init__(inputs, labels, names, digest)
        self.max_samples = max_samples
        self.whole_lengths = torch.tensor([len(clip) for clip in inputs]) if lengths is None else lengths

    @property
    def lengths(self) -> Int64[Tensor, " n"] | None:
        drawn = self.whole_lengths
        if self.max_samples is not None:
            drawn = drawn.clamp(max=self.max_samples)
        return drawn if len(drawn.unique()) > 1 else None

    @property
    def is_cropped(self) -> bool:
        return self.max_samples is not None and bool((self.whole_lengths > self.max_samples).any())

    def sample(self, index: int, generator: torch.Generator | None = None) -> Float32[Tensor, " s"]:
        waveform = self.inputs[index]
        spare = len(waveform) - (self.max_samples or len(waveform))
        if spare <= 0:
            return waveform
        start = spare // 2 if generator is None else int(torch.randint(spare + 1, (), generator=generator))
        return waveform[start : start + len(waveform) - spare]

    def collate(self, inputs: list[Tensor]) -> dict[str, Tensor]:
        return pad_clips(inputs)

    def _details(self, indices: Int64[Tensor, " m"]) -> dict[str, Any]:
        return {"max_samples": self.max_samples, "lengths": self.whole_lengths[indices]}


class Files(Sequence[Tensor]):
    """Inputs in files, each read when it is asked for."""

    def __init__(self, sources: Sequence[Any], read: Callable[[Any], Tensor]) -> None:
        self.sources, self.read = sources, read

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: Any) -> Any:
        return self.read(self.sources[index])

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.read, self.sources)


class Inputs(Dataset):
    """The inputs alone, of files to predict."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, indices: list[int]) -> Any:
        return self.samples.__getitems__(indices)[0]


class ForTraining(Dataset):
    """Samples as an epoch of training draws them: cropped anywhere and augmented, by (seed, epoch, index) alone.

    An index here is epoch * n + index, so that the epoch reaches the workers that live through all of them.

    Args:
        samples: What is drawn from.
        transforms: Applied to each input in turn; they draw from torch's own generator.
        seed: Of all of it.
    """

    def __init__(self, samples: Samples, transforms: Sequence[Callable[[Tensor], Tensor]], seed: int) -> None:
        self.samples, self.transforms, self.seed = samples, transforms, seed
        self.labels, self.names, self.collate = samples.labels, samples.names, samples.collate

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, keys: list[int]) -> tuple[Any, Tensor]:
        indices = [key % len(self) for key in keys]
        if not (self.transforms or self.samples.is_cropped):
            return self.samples.__getitems__(indices)
        with torch.random.fork_rng(devices=[]):
            inputs = [self.draw(key) for key in keys]
        return self.samples.collate(inputs), self.labels[indices]

    def draw(self, key: int) -> Tensor:
        """One input, cropped and augmented; torch's generator is seeded for it."""
        epoch, index = divmod(key, len(self))
        generator = torch.default_generator.manual_seed(mix(self.seed, epoch, index))
        drawn = self.samples.sample(index, generator)
        for transform in self.transforms:
            drawn = transform(drawn)
        return drawn


def pad_clips(waveforms: Sequence[Tensor] | Tensor) -> dict[str, Tensor]:
    """Clips of any lengths as one tensor, with zeros behind the shorter ones, and their lengths."""
    lengths = torch.tensor([len(waveform) for waveform in waveforms])
    return {"waveforms": pad_sequence(list(waveforms), batch_first=True), "lengths": lengths}


def mix(*numbers: int) -> int:
    """A seed that has nothing to do with that of any neighbouring numbers (splitmix64)."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 0x9E3779B97F4A7C15 + number + 1) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ mixed >> shift) * factor % 2**64
        mixed = mixed ^ mixed >> 31
    return mixed % 2**63


def _chosen(inputs: Any, indices: Int64[Tensor, " m"]) -> Any:
    if isinstance(inputs, Tensor):
        return inputs[indices]
    if isinstance(inputs, Files):
        return Files([inputs.sources[index] for index in indices.tolist()], inputs.read)
    return [inputs[index] for index in indices.tolist()]
