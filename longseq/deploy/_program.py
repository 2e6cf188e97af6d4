"""The part of a classifier that is exported: a function from inputs, as files hold them, to probabilities."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn

from longseq.arguments import ArgumentError
from longseq.encoders.pretrained_stem import Pretrained
from longseq.encoders.spectrogram import LogMel
from longseq.training.classifier import Classifier
from longseq.training.data import InputSpec


class Program(nn.Module):
    """A classifier in evaluation mode and float32 that exporters can trace: convolutions compute its spectrogram.

    Its inputs are images (b, channels, height, width), 0 to 255 in uint8, or waveforms (b, samples) in float32 with
    their lengths (b,) in samples; of several channels they are (b, channels, samples). Features are (b, tokens,
    numbers), with their lengths in tokens; a frozen network is no part of the program. Its outputs are the
    probabilities (b, classes) that ``predict`` gives. The batch size is free, and so is the length of waveforms and
    features. An encoder with a longest input limits that length, and computes as many tokens for a short one.

    Args:
        model: The classifier; it is copied.
        inputs: What one input is, as the data module says.

    Raises:
        SettingError: If its task predicts nothing.
        ValueError: If clips pass through a pretrained stem, which runs once for each length in a batch.
    """

    def __init__(self, model: Classifier, inputs: InputSpec) -> None:
        super().__init__()
        model.task.require("classes", "amounts")
        self.model = copy.deepcopy(model).float().eval().requires_grad_(False)
        encoder: Any = self.model.encoder
        self.inputs, self.has_lengths = inputs, None in inputs.shape
        if self.has_lengths and isinstance(getattr(encoder, "stem", None), Pretrained):
            what = "must have no pretrained stem where clips have lengths of their own"
            raise ArgumentError("ckpt_path", f"{what}; --format safetensors shares any model")
        self.longest: int | None = encoder.longest if self.has_lengths and not encoder.any_length else None
        for name, module in encoder.named_children():
            if isinstance(module, LogMel):
                setattr(encoder, name, LogMelOfProducts(module))

    def forward(self, inputs: Shaped[Tensor, "b ..."], lengths: Int64[Tensor, " b"] | None = None) -> Tensor:
        batch: Any = inputs
        if self.has_lengths:
            name, axis = self._varying
            batch = {name: inputs if self.longest is None else _filled(inputs, self.longest, axis), "lengths": lengths}
        return self.model.task.probabilities(self.model(batch))

    @property
    def names(self) -> list[str]:
        """The names of the inputs."""
        return [self._varying[0], "lengths"] if self.has_lengths else [self.inputs.kind]

    @property
    def _varying(self) -> tuple[str, int]:
        varying = self.model.encoder.varying
        assert varying is not None
        return varying

    def _sized(self, length: int) -> tuple[int, ...]:
        """The shape of an input of this length."""
        return tuple(length if size is None else size for size in self.inputs.shape)

    def _numbers(self, *shape: int) -> Tensor:
        """Random inputs for a trial, except sounds: bytes, or numbers of either sign."""
        generator = torch.Generator().manual_seed(0)
        dtype = self.inputs.dtype
        if dtype.is_floating_point:
            return torch.randn(*shape, generator=generator).to(dtype)
        return torch.randint(256, shape, generator=generator).to(dtype)

    def examples(self) -> tuple[Tensor, ...]:
        """Two inputs to trace with. Sounds are shorter than the longest clip, which would skip some operations. Images
        of any size have two rows and columns of tokens or more: torch.export treats a dimension of 1 as fixed."""
        encoder: Any = self.model.encoder
        if not self.has_lengths:
            channels, height, width = encoder.picture_shape
            if encoder.any_length:
                rows, columns = encoder.trunk.patch_embed.patch_size
                height, width = max(height, 2 * rows), max(width, 2 * columns)
            return (torch.zeros(2, channels, height, width, dtype=self.inputs.dtype),)
        length = max(3 * encoder.longest // 4, 2)
        return torch.zeros(2, *self._sized(length)), torch.tensor([length, length // 2 + 1])

    def other_examples(self, fewest_rows: int) -> list[tuple[Tensor, ...]]:
        """Smaller and larger inputs than ``examples``, for a model that takes any size. The smaller image has
        ``fewest_rows`` rows of tokens, 1 or 2."""
        generator = torch.Generator().manual_seed(0)
        if self.length_of_row is not None:
            row = max(self.length_of_row, fewest_rows if self.inputs.kind == "features" else 1)
            lengths = [row, 7 * row, 2 * int(self.examples()[1][0]) + 1]
            return [
                (
                    0.1 * torch.randn(2, *self._sized(length), generator=generator),
                    torch.tensor([length, length // 2 + 1]),
                )
                for length in lengths
            ]
        encoder: Any = self.model.encoder
        channels, height, width = self.examples()[0].shape[1:]
        rows, columns = encoder.trunk.patch_embed.patch_size
        sizes = [(fewest_rows * rows, 3 * columns), (height + rows, 2 * width)]
        return [(self._numbers(2, channels, *size),) for size in sizes]

    def free_dimensions(self, dim: Callable[[str], Any]) -> tuple[dict[int, Any], ...]:
        """The dimensions of each input that have no fixed size, with what ``dim`` returns for their names."""
        encoder: Any = self.model.encoder
        batch, varying, height, width = map(dim, ("batch", self.name_of_axis, "height", "width"))
        if self.has_lengths:
            return {0: batch, 1 + self.inputs.shape.index(None): varying}, {0: batch}
        return ({0: batch, 2: height, 3: width} if encoder.any_length else {0: batch},)

    @property
    def name_of_axis(self) -> str:
        """What inputs with lengths have more or less of."""
        return "tokens" if self.inputs.kind == "features" else "samples"

    @property
    def length_of_row(self) -> int | None:
        """Samples from one row of tokens to the next, or 1 for features; None unless inputs may have any length."""
        encoder: Any = self.model.encoder
        if not self.has_lengths or self.longest is not None:
            return None
        return 1 if self.inputs.kind == "features" else round(encoder.row_seconds * encoder.sample_rate_hz)

    def of_batch(self, inputs: Any) -> tuple[Tensor, ...]:
        """The arguments of ``forward`` for a batch of a data module."""
        if not self.has_lengths:
            return (inputs,)
        name, axis = self._varying
        if isinstance(inputs, Tensor):
            return inputs, torch.full((len(inputs),), inputs.shape[axis])
        return inputs[name], inputs["lengths"]


def _filled(inputs: Float[Tensor, "b ..."], length: int, axis: int) -> Float[Tensor, "b ..."]:
    """Inputs padded with zeros to a length, by the same operations for all lengths, as a tracer needs them."""
    shape = [*inputs.shape]
    shape[axis] = length
    return torch.cat([inputs, inputs.new_zeros(shape)], dim=axis).narrow(axis, 0, length)


class LogMelOfProducts(nn.Module):
    """LogMel as two convolutions: with the windowed waves of the Fourier transform, and with the mel filters. Exporters
    have no Fourier transform, or only one of a fixed length.

    Args:
        log_mel: The front end to replace.
    """

    def __init__(self, log_mel: LogMel) -> None:
        super().__init__()
        spectrogram: Any = log_mel.mel.spectrogram
        bins, window = spectrogram.n_fft, spectrogram.window.double()
        before = (bins - len(window)) // 2
        window = F.pad(window, (before, bins - len(window) - before))
        turns = torch.outer(torch.arange(bins // 2 + 1), torch.arange(bins)) % bins
        angles = 2 * torch.pi / bins * turns.double()
        self.waves = nn.Buffer((torch.cat([angles.cos(), angles.sin()]) * window)[:, None].float())
        self.filters = nn.Buffer(log_mel.mel.mel_scale.fb.T[..., None].float())  # type: ignore[union-attr]
        self.hop = spectrogram.hop_length

    def forward(self, waveforms: Float[Tensor, "b samples"]) -> Float[Tensor, "b mels frames"]:
        padding = self.waves.shape[-1] // 2
        real, imaginary = F.conv1d(waveforms[:, None], self.waves, stride=self.hop, padding=padding).chunk(2, dim=1)
        return (F.conv1d(real.square() + imaginary.square(), self.filters) + 1e-6).log()
