"""The base of data modules for sounds: rate, length, and reading any sound file."""

import io
import math
import os
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import soundfile
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from datamodules.augment import SoundTransform
from datamodules.base import DataModule, Part
from datamodules.decoding.sound_files import (
    DECODED_ELSEWHERE,
    SUFFIXES,
    ValuesError,
    change_rate,
    header_of,
    read_middle,
    read_until_break,
)
from datamodules.errors import DataError, require, require_in, say
from datamodules.inputs import InputSpec
from datamodules.on_disk import OnDisk
from datamodules.samples import Clips, Samples
from datamodules.windows import starts_of_windows

_LONGEST_SECONDS = 10.0  # the longest input if `seconds` is not given
_REMEMBERED = 10_000  # the most names of broken files, because a server receives new ones for months


def crop_middle(waveform: Float32[Tensor, " s"], num_samples: int) -> Float32[Tensor, " t"]:
    """The middle of the waveform, num_samples long; a shorter waveform is not changed."""
    start = max(len(waveform) - num_samples, 0) // 2
    return waveform[start : start + num_samples]


class AudioDataModule(DataModule):
    """Sounds as float32 waveforms of one rate and of any lengths.

    Full scale is 1. Values beyond it are not clipped, because encoders normalise their inputs.

    Inputs are {"waveforms": (b, s), "lengths": (b,)}: waveforms, padded with zeros at the end, and their numbers of
    samples. The sounds of a training batch have similar lengths, so that there is little padding.

    Args:
        sample_rate_hz: Samples per second.
        seconds: Length of the longest waveform; longer sounds are cropped: at random in training, else to the middle.
        augment: Transforms of datamodules/augment.py for each sound in training.
        common: Arguments of every data module.
    """

    sample_rate_hz: int
    seconds: float
    predict_suffixes: ClassVar[frozenset[str]] = SUFFIXES | DECODED_ELSEWHERE

    def __init__(
        self, sample_rate_hz: int, seconds: float, augment: Sequence[SoundTransform] = (), **common: Any
    ) -> None:
        super().__init__(**common)
        _refuse_unusable(sample_rate_hz, seconds)
        self.sample_rate_hz, self.seconds = sample_rate_hz, seconds
        self.augment = augment
        self._broken: dict[str, None] = {}  # the last broken files that the user was told about

    @property
    def shape(self) -> tuple[int]:  # type: ignore[override]
        return (round(self.seconds * self.sample_rate_hz),)

    @property
    def inputs(self) -> InputSpec:
        return InputSpec("sounds", torch.float32, (None,), unit="full scale", rate_hz=self.sample_rate_hz)

    def samples_of(self, inputs: Sequence[Tensor] | Tensor, *arguments: Any, **details: Any) -> Samples:
        return Clips(inputs, *arguments, max_samples=self.shape[0], **details)

    def read(self, path: str | os.PathLike[str]) -> Float32[Tensor, " s"]:
        """One input from a sound file of any rate, length and number of channels (which are averaged).

        Raises:
            DataError: If the file is missing, broken, of an unknown format or empty, or has values that are not finite.
        """
        waveform = change_rate(*read_middle(path, self.seconds), self.sample_rate_hz)
        return crop_middle(waveform, self.shape[0])

    def parts(
        self, path: str, window: float | None = None, hop: float | None = None, any_length: bool = False
    ) -> list[Part]:
        """The whole sound, or windows that cover it.

        There are windows if `window` or `hop` is given, or if the sound is longer than `seconds` and the model does not
        take longer sounds. All windows have the same length. The last window ends with the sound, so its overlap may be
        larger. If the header declares more sound than the file has, the user is told.
        """
        length, contradiction = header_of(path)
        if not length:
            raise DataError(f"{path}: holds no sound; leave it out, or give --data.on_error skip")
        if contradiction:
            self._say_once(path, contradiction)
        longest = math.inf if any_length else self.seconds
        least = 1 / self.sample_rate_hz
        if window is None and hop is None and length <= longest + least:
            return [(path, 0.0, length)]
        window = self.seconds if window is None else window
        hop = window if hop is None else hop
        rule = "positive" if any_length else f"positive and at most {longest:g} s"
        remedy = "10 is usual" if any_length else "clips are no longer"
        require(least <= window <= longest, "window", rule, window, remedy)
        rule = f"positive and at most {window:g} s"
        require(least <= hop <= window, "hop", rule, hop, "else some sound is not heard")
        starts = starts_of_windows(length, window, hop, least)
        return [(path, start, min(start + window, length)) for start in starts]

    def read_part(self, part: Part) -> Float32[Tensor, " s"]:
        """One model input from a part of a file, as `parts` returns it.

        If the file breaks off, the user is told once, and the samples before the break are returned. A part without any
        sample is all NaN, and so are the model's scores for it. With ``on_error`` "skip", values that are not finite or
        far beyond full scale count as a break.

        Raises:
            DataError: If the file cannot be read from its start, or has such values.
        """
        path, start, end = part
        if end is None:
            return self.read(path)
        waveform, rate_hz, damage = read_until_break(path, start, end, in_order=True)
        num_samples = math.ceil((end - start) * self.sample_rate_hz - 1e-6)
        if (
            end - start <= self.seconds + 1 / self.sample_rate_hz
        ):  # a clip; rounding must not make it longer than others
            num_samples = min(num_samples, self.shape[0])
        if damage is not None:
            if isinstance(damage, ValuesError) and self.on_error == "raise":
                raise damage
            if not len(waveform) and not (start and len(read_until_break(path, 0.0, min(start, 1.0))[0])):
                raise damage
            what = f"{damage.what} at" if isinstance(damage, ValuesError) else "breaks off after"
            self._say_once(path, f"{what} {start + len(waveform) / rate_hz:.0f} s")
        resampled = change_rate(waveform, rate_hz, self.sample_rate_hz)[:num_samples]
        return resampled if len(resampled) else torch.full((num_samples,), math.nan)

    def _say_once(self, path: str, what: str) -> None:
        """Tell the user what is wrong with a broken file, once for each file."""
        if path not in self._broken:
            self._broken[path] = None
            if len(self._broken) > _REMEMBERED:
                self._broken.pop(next(iter(self._broken)), None)  # the oldest; another thread may have removed it
            say(f"{path}: {what}; heard as far as it goes")

    def _predict_options(self) -> dict[str, Any]:
        longest = self.seconds + 1 / self.sample_rate_hz  # a difference of seconds is rounded
        is_long = any(end is not None and end - start > longest for _, start, end in self.predict_parts)
        return {"batch_size": 1} if is_long else {}  # a batch would pad an hour to the length of a day

    def file_of(self, samples: Samples, index: int) -> tuple[str, bytes]:
        file = io.BytesIO()
        soundfile.write(file, samples.inputs[index].numpy(), self.sample_rate_hz, "FLOAT", format="WAV")
        return ".wav", file.getvalue()

    def flags_of_shards(self, root: str) -> list[str]:
        rate_hz, seconds = str(self.sample_rate_hz), str(self.seconds)
        return ["AudioShards", "--data.root", root, "--data.sample_rate_hz", rate_hz, "--data.seconds", seconds]

    def figures(self, samples: Samples) -> dict[str, Any]:
        lengths, powers, peak, silent = [], [], 0.0, 0
        for waveform in samples.inputs:
            lengths.append(len(waveform) / self.sample_rate_hz)
            powers.append(float(waveform.square().mean()))
            loudest = float(waveform.abs().max())
            peak, silent = max(peak, loudest), silent + (loudest == 0)
        median = float(torch.tensor(lengths).median())
        return {
            "sample rate (Hz)": self.sample_rate_hz,
            "seconds, shortest / median / longest": [round(value, 3) for value in (min(lengths), median, max(lengths))],
            "seconds, in all": round(sum(lengths), 1),
            "level (dB below full scale)": round(10 * math.log10(sum(powers) / len(powers) + 1e-12), 1),
            "peak": round(peak, 4),
            "silent clips": silent,
        }


class SoundsOfAnyRate(OnDisk, AudioDataModule):
    """Sounds of any rate and length in files, which are read as inputs of one rate.

    Args:
        sample_rate_hz: Rate of the inputs; if absent, the most common rate of the files.
        seconds: Length of the longest input; if absent, the length of the longest clip, but 10 s at most.
        common: Arguments of OnDisk and AudioDataModule.
    """

    reading: ClassVar[tuple[str, ...]] = ("sample_rate_hz", "seconds")

    def __init__(self, sample_rate_hz: int | None = None, seconds: float | None = None, **common: Any) -> None:
        # absent values are taken from the files when they are first needed
        super().__init__(sample_rate_hz=_or(sample_rate_hz, 16_000), seconds=_or(seconds, 1.0), **common)
        self._rate_given, self._seconds_given = sample_rate_hz, seconds

    @abstractmethod
    def rates_hz(self) -> Int64[Tensor, " n"]:
        """The rate of each readable file.

        Raises:
            DataError: If there is none.
        """

    @abstractmethod
    def longest_seconds(self) -> float:
        """The length of the longest readable clip, more than 0.

        Raises:
            DataError: If there is none.
        """

    @abstractmethod
    def lengths_of(self, sources: Any) -> Int64[Tensor, " m"]:
        """The number of samples of the input of each source."""

    def bytes_of(self, sources: Any) -> int:
        return 4 * int(self.lengths_of(sources).sum())

    def details(self, sources: Any) -> dict[str, Any]:
        return {"lengths": self.lengths_of(sources)}

    @property
    def sample_rate_hz(self) -> int:  # type: ignore[override]
        if self._rate_given is None:
            rates, counts = self.rates_hz().unique(return_counts=True)  # sorted: the highest of equally common rates
            rate_hz = int(rates[counts == counts.max()][-1])
            _refuse_unusable(rate_hz, _or(self._seconds_given, 1.0))
            self._rate_given = rate_hz
        return self._rate_given

    @sample_rate_hz.setter
    def sample_rate_hz(self, value: int) -> None:
        self._rate_given = value

    @property
    def seconds(self) -> float:  # type: ignore[override]
        if self._seconds_given is None:
            longest = math.ceil(round(100 * self.longest_seconds(), 3)) / 100
            self._seconds_given = min(longest, _LONGEST_SECONDS)
            if longest > _LONGEST_SECONDS:
                what = f"the longest clip has {longest:g} s; of each {_LONGEST_SECONDS:g} s are heard"
                say(f"data.seconds: {what}, at random in training, else the middle; give data.seconds")
            _refuse_unusable(self.sample_rate_hz, self._seconds_given)
        return self._seconds_given

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._seconds_given = value


def _or(given: Any, usual: Any) -> Any:
    return usual if given is None else given


def _refuse_unusable(sample_rate_hz: int, seconds: float) -> None:
    """Check a rate and a length.

    Raises:
        ArgumentError: If one of them is out of its range.
    """
    require_in("sample_rate_hz", sample_rate_hz, 1000, 192_000, "8000 is enough for speech")
    is_long_enough = math.isfinite(seconds) and seconds * sample_rate_hz >= 1
    rule = f"at least one sample (1/{sample_rate_hz} s)"
    require(is_long_enough, "seconds", rule, seconds, "give the length of a typical sound")
