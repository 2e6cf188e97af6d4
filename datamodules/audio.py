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
from datamodules.errors import DataError, require, say
from datamodules.inputs import InputSpec
from datamodules.samples import Clips, Samples
from datamodules.windows import starts_of_windows

LONGEST_SECONDS = 10.0  # the most if `seconds` is not given
_REMEMBERED = 10_000  # names of broken files: a server gets others for months


def crop_middle(waveform: Float32[Tensor, " s"], num_samples: int) -> Float32[Tensor, " t"]:
    """The middle of a longer waveform; a shorter one as it is."""
    start = max(len(waveform) - num_samples, 0) // 2
    return waveform[start : start + num_samples]


class AudioDataModule(DataModule):
    """Sounds as float32 waveforms, all with one rate and each with its own length.

    Full scale is 1. Floats and decoded sounds may be beyond it, and are kept: encoders normalise their inputs.

    Inputs are {"waveforms": (b, s), "lengths": (b,)}: waveforms, the shorter ones with zeros at the end, and how many
    samples each has. A training batch holds sounds of similar lengths, so that there is little padding.

    Args:
        sample_rate_hz: Samples per second.
        seconds: Length of the longest waveform; longer sounds are cropped at random in training, else to the middle.
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
        refuse_unusable(sample_rate_hz, seconds)
        self.sample_rate_hz, self.seconds = sample_rate_hz, seconds
        self.augment = augment
        self._broken: dict[str, None] = {}  # the last files of which a line has said that they break off

    @property
    def shape(self) -> tuple[int]:  # type: ignore[override]
        return (round(self.seconds * self.sample_rate_hz),)

    @property
    def inputs(self) -> InputSpec:
        return InputSpec("sounds", torch.float32, (None,), unit="full scale", rate_hz=self.sample_rate_hz)

    def samples_of(self, inputs: Sequence[Tensor] | Tensor, *arguments: Any, **details: Any) -> Samples:
        if not details and not isinstance(inputs, Tensor | list):  # files to predict: `read` has cropped them
            details = {"lengths": torch.zeros(len(inputs), dtype=torch.int64)}
            return Clips(inputs, *arguments, **details)
        return Clips(inputs, *arguments, max_samples=self.shape[0], **details)

    def read(self, path: str | os.PathLike[str]) -> Float32[Tensor, " s"]:
        """One input from a sound file of any rate, length and number of channels (which are averaged).

        Raises:
            DataError: If the file is absent, broken, of an unknown format, empty, or holds values that are not finite.
        """
        waveform = change_rate(*read_middle(path, self.seconds), self.sample_rate_hz)
        return crop_middle(waveform, self.shape[0])

    def parts(
        self, path: str, window: float | None = None, hop: float | None = None, any_length: bool = False
    ) -> list[Part]:
        """The whole sound; or windows that cover it, if they are asked for, or if the sound is longer than `seconds`
        and the model takes no longer ones.

        All windows have the same length; the last one ends with the sound, and may overlap the one before it more.
        Where the header declares more than is there, a line says so.
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
        require(
            least <= window <= longest, "window", rule, window, "10 is usual" if any_length else "clips are no longer"
        )
        require(
            least <= hop <= window, "hop", f"positive and at most {window:g} s", hop, "else some sound is not heard"
        )
        starts = starts_of_windows(length, window, hop, least)
        return [(path, start, min(start + window, length)) for start in starts]

    def read_part(self, part: Part) -> Float32[Tensor, " s"]:
        """One model input from a part of a file, as `parts` gives it.

        Where a file breaks off, a line says so, once for each file. What a part has before the break is returned; a
        part without anything is not a number throughout, and so are the model's scores for it. With ``on_error`` skip
        values that are not finite, or far beyond full scale, are a break too.

        Raises:
            DataError: If the file cannot be read from the start, or holds such values.
        """
        path, start, end = part
        if end is None:
            return self.read(path)
        waveform, rate_hz, damage = read_until_break(path, start, end, in_order=True)
        num_samples = math.ceil((end - start) * self.sample_rate_hz - 1e-6)
        if end - start <= self.seconds + 1 / self.sample_rate_hz:  # a clip, and by its rounding no longer than others
            num_samples = min(num_samples, self.shape[0])
        if damage is not None:
            if isinstance(damage, ValuesError) and self.on_error == "raise":
                raise damage
            if not len(waveform) and not (start and len(read_until_break(path, 0.0, min(start, 1.0))[0])):
                raise damage
            what = f"{damage.what} at" if isinstance(damage, ValuesError) else "breaks off after"
            self._say_once(path, f"{what} {start + len(waveform) / rate_hz:.0f} s")
        heard = change_rate(waveform, rate_hz, self.sample_rate_hz)[:num_samples]
        return heard if len(heard) else torch.full((num_samples,), math.nan)

    def _say_once(self, path: str, what: str) -> None:
        """Say of a broken file what is wrong, if nothing was said of it yet."""
        if path not in self._broken:
            self._broken[path] = None
            if len(self._broken) > _REMEMBERED:
                self._broken.pop(next(iter(self._broken)), None)  # the oldest, unless another thread was first
            say(f"{path}: {what}; heard as far as it goes")

    def _predict_options(self) -> dict[str, Any]:
        longest = self.seconds + 1 / self.sample_rate_hz  # a difference of seconds is rounded
        is_long = any(end is not None and end - start > longest for _, start, end in self.predict_parts)
        return {"batch_size": 1} if is_long else {}  # an hour must not be padded to a day

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


class SoundsOfAnyRate(AudioDataModule):
    """Sounds of any rate and length in files, which are read as inputs of one rate.

    Args:
        sample_rate_hz: Rate of the inputs; if absent, the most common rate of the files.
        seconds: Length of the longest input; if absent, that of the longest clip, but 10 s at most.
        common: Arguments of AudioDataModule.
    """

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

    @property
    def sample_rate_hz(self) -> int:  # type: ignore[override]
        if self._rate_given is None:
            rates, counts = self.rates_hz().unique(return_counts=True)  # sorted: of equally common ones the highest
            rate_hz = int(rates[counts == counts.max()][-1])
            refuse_unusable(rate_hz, _or(self._seconds_given, 1.0))
            self._rate_given = rate_hz
        return self._rate_given

    @sample_rate_hz.setter
    def sample_rate_hz(self, value: int) -> None:
        self._rate_given = value

    @property
    def seconds(self) -> float:  # type: ignore[override]
        if self._seconds_given is None:
            longest = math.ceil(round(100 * self.longest_seconds(), 3)) / 100
            self._seconds_given = min(longest, LONGEST_SECONDS)
            if longest > LONGEST_SECONDS:
                what = f"the longest clip has {longest:g} s; of each {LONGEST_SECONDS:g} s are heard"
                say(f"data.seconds: {what}, at random in training, else the middle; give data.seconds")
            refuse_unusable(self.sample_rate_hz, self._seconds_given)
        return self._seconds_given

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._seconds_given = value


def _or(given: Any, usual: Any) -> Any:
    return usual if given is None else given


def refuse_unusable(sample_rate_hz: int, seconds: float) -> None:
    """Check a rate and a length.

    Raises:
        ValueError: If one of them is out of its range.
    """
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
