"""What data modules of sounds share: rate, length, and reading any sound file."""

import math
import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import soundfile
import torch
from jaxtyping import Float32, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchaudio.functional import resample

from datamodules.base import DataError, DataModule, LabelledTensors, require


class Clips(LabelledTensors):
    """Waveforms in memory, with zeros behind the shorter ones, and their lengths.

    A batch is ({"waveforms": (b, s), "lengths": (b,)}, labels), where s is the length of its longest clip.
    """

    def __init__(
        self, waveforms: Float32[Tensor, "n s"], lengths: Int64[Tensor, " n"], labels: Int64[Tensor, " n"]
    ) -> None:
        super().__init__(waveforms, labels)
        self.lengths = lengths

    def __getitem__(self, index: Any) -> tuple[dict[str, Tensor], Tensor]:
        lengths = self.lengths[index]
        waveforms = self.inputs[index][..., : int(lengths.max())]
        return {"waveforms": waveforms, "lengths": lengths}, self.labels[index]

    __getitems__ = __getitem__

    def subset(self, indices: Int64[Tensor, " m"]) -> "Clips":
        return Clips(self.inputs[indices], self.lengths[indices], self.labels[indices])


def pad_clips(waveforms: Sequence[Tensor]) -> dict[str, Tensor]:
    """Clips of any lengths as one tensor, with zeros behind the shorter ones, and their lengths."""
    lengths = torch.tensor([len(waveform) for waveform in waveforms])
    return {"waveforms": pad_sequence(list(waveforms), batch_first=True), "lengths": lengths}


def crop_middle(waveform: Float32[Tensor, " s"], num_samples: int) -> Float32[Tensor, " t"]:
    """The middle of a longer waveform; a shorter one as it is."""
    start = max(len(waveform) - num_samples, 0) // 2
    return waveform[start : start + num_samples]


def change_rate(waveform: Float32[Tensor, " s"], from_hz: int, to_hz: int) -> Float32[Tensor, " t"]:
    """Resample. Rates whose ratio has large terms (44101 to 16000) get one within 1e-6 of it, unheard, for the
    filter of the exact ratio would take minutes and gigabytes."""
    ratio = Fraction(to_hz, from_hz).limit_denominator(2000)
    return resample(waveform, ratio.denominator, ratio.numerator)


class AudioDataModule(DataModule):
    """Sounds as float32 waveforms in -1..1, all of one rate and each of its own length.

    Inputs are {"waveforms": (b, s), "lengths": (b,)}: waveforms with zeros behind the shorter ones, and how many
    samples each has.

    Args:
        sample_rate_hz: Samples per second.
        seconds: Length of the longest waveform; longer sounds lose both ends.
    """

    shape: tuple[int]
    predict_suffixes: ClassVar[frozenset[str]] = frozenset(
        {".aif", ".aiff", ".au", ".caf", ".flac", ".mp3", ".ogg", ".opus", ".w64", ".wav"}
    )

    def __init__(
        self,
        sample_rate_hz: int,
        seconds: float,
        batch_size: int = 64,
        num_workers: int = 0,
        val_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers, val_fraction, seed)
        require(
            1000 <= sample_rate_hz <= 192_000,
            "sample_rate_hz",
            "in 1000..192000",
            sample_rate_hz,
            "8000 is enough for speech",
        )
        require(
            math.isfinite(seconds) and seconds * sample_rate_hz >= 1,
            "seconds",
            f"at least one sample (1/{sample_rate_hz} s)",
            seconds,
            "give the length of a typical sound",
        )
        self.sample_rate_hz = sample_rate_hz
        self.seconds = seconds
        self.shape = (round(seconds * sample_rate_hz),)

    def collate(self, inputs: list[Tensor]) -> dict[str, Tensor]:
        return pad_clips(inputs)

    def read(self, path: str | os.PathLike[str]) -> Float32[Tensor, " s"]:
        """One input from a sound file of any rate, length and number of channels (which are averaged).

        Raises:
            DataError: If the file is absent, broken, of an unknown format, empty, or holds values that are not finite.
        """
        if not Path(path).is_file():
            raise DataError(f"{path}: no such file; check the path")
        try:
            with soundfile.SoundFile(path) as file:
                rate_hz = file.samplerate
                wanted = math.ceil(self.seconds * rate_hz)  # an hour of sound costs no more than its middle
                file.seek(max(file.frames - wanted, 0) // 2)
                frames = file.read(wanted, dtype="float32", always_2d=True)
        except (soundfile.SoundFileError, OSError, TypeError) as error:  # TypeError: a file without a header (.raw)
            what = str(getattr(error, "error_string", error)).rstrip(".")
            raise DataError(f"{path}: not a readable sound ({what}); convert it to WAV or FLAC") from error
        if not len(frames):
            raise DataError(f"{path}: holds no sound; leave it out or record it again")
        if not 1000 <= rate_hz <= 1_000_000:
            raise DataError(f"{path}: says {rate_hz} samples a second; give it its true rate")
        waveform = torch.from_numpy(frames.mean(axis=1))
        if not waveform.isfinite().all():
            raise DataError(f"{path}: holds values that are not finite; write it again")
        waveform = change_rate(waveform, rate_hz, self.sample_rate_hz)
        return crop_middle(waveform.clamp(-1, 1), self.shape[0])
