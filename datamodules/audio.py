"""The base of data modules for sounds: rate, length, and reading any sound file."""

import io
import math
import os
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import soundfile
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from datamodules.augment import SoundTransform
from datamodules.base import DataModule, Part
from datamodules.decoding.packed import Packed, Source
from datamodules.decoding.sound_files import (
    DECODED_ELSEWHERE,
    SUFFIXES,
    Channels,
    ValuesError,
    change_rate,
    header_of,
    read_until_break,
    too_few_channels,
)
from datamodules.embedding import Embeds
from datamodules.errors import DataError, require, require_in, say
from datamodules.inputs import InputSpec
from datamodules.networks import Network
from datamodules.samples import Clips, Samples
from datamodules.windows import windows_of

_LONGEST_SECONDS = 10.0  # the longest input if `seconds` is not given
_REMEMBERED = 10_000  # the most names of broken files, because a server receives new ones for months


def crop_middle(waveform: Float32[Tensor, "*channels s"], num_samples: int) -> Float32[Tensor, "*channels t"]:
    """The middle of the waveform, num_samples long; a shorter waveform is not changed."""
    start = max(waveform.shape[-1] - num_samples, 0) // 2
    return waveform[..., start : start + num_samples]


class AudioDataModule(DataModule):
    """Sounds as float32 waveforms of one rate and of any lengths.

    Full scale is 1. Values beyond it are not clipped, because encoders normalise their inputs.

    Inputs are {"waveforms": (b, s), "lengths": (b,)}: waveforms, padded with zeros at the end, and their numbers of
    samples. With several channels, the waveforms are (b, channels, s). The sounds of a training batch have similar
    lengths, so that there is little padding.

    Args:
        sample_rate_hz: Samples per second.
        seconds: Length of the longest waveform; longer sounds are cropped: at random in training, else to the middle.
        augment: Transforms of datamodules/augment.py for each sound in training.
        common: Arguments of every data module.

    Attributes:
        channels: What is read of a file with several channels: by default their mean.
        num_channels: The number of channels of an input.
    """

    sample_rate_hz: int
    seconds: float
    channels: Channels = "mean"
    num_channels: int = 1
    predict_suffixes: ClassVar[frozenset[str]] = SUFFIXES | DECODED_ELSEWHERE
    rates_in: ClassVar[tuple[int, int]] = (1000, 192_000)  # the lowest and the highest rate, in Hz
    has_gaps: ClassVar[bool] = False  # whether NaN stands for a missing sample

    def __init__(
        self, sample_rate_hz: int, seconds: float, augment: Sequence[SoundTransform] = (), **common: Any
    ) -> None:
        super().__init__(**common)
        self._refuse_unusable(sample_rate_hz, seconds)
        self.sample_rate_hz, self.seconds = sample_rate_hz, seconds
        self.augment = augment
        self._broken: dict[str, None] = {}  # the last broken files that the user was told about

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (*self._channels, round(self.seconds * self.sample_rate_hz))

    def _refuse_unusable(self, sample_rate_hz: int, seconds: float) -> None:
        """Check a rate and a length.

        Raises:
            ArgumentError: If one of them is out of its range.
        """
        require_in("sample_rate_hz", sample_rate_hz, *self.rates_in, "8000 is enough for speech")
        is_long_enough = math.isfinite(seconds) and seconds * sample_rate_hz >= 1
        rule = f"at least one sample (1/{sample_rate_hz} s)"
        require(is_long_enough, "seconds", rule, seconds, "give the length of a typical sound")

    @property
    def _channels(self) -> tuple[int, ...]:
        """The dimension of channels of an input, which one channel lacks."""
        return (self.num_channels,) if self.num_channels > 1 else ()

    @property
    def inputs(self) -> InputSpec:
        shape = (*self._channels, None)
        return InputSpec("sounds", torch.float32, shape, unit="full scale", rate_hz=self.sample_rate_hz)

    def samples_of(self, inputs: Sequence[Tensor] | Tensor, *arguments: Any, **details: Any) -> Samples:
        return Clips(inputs, *arguments, max_samples=self.shape[-1], **details)

    def header(self, path: str | os.PathLike[str]) -> tuple[float, str]:
        """The length of a file in its header, in seconds; and how it contradicts the file, or "".

        Raises:
            DataError: If the file is missing or of an unknown format.
        """
        return header_of(path)

    def read_until_break(
        self, path: Source, start: float, end: float | None, in_order: bool = False
    ) -> tuple[Float32[Tensor, "*channels s"], float, DataError | None]:
        """The chosen channels of a part of a file, from start to end in seconds; its rate in Hz; and the error of a
        file that is damaged, whose samples before the damage are returned.

        Raises:
            DataError: If the header is broken, or the file has other channels.
        """
        waveform, rate_hz, damage = read_until_break(path, start, end, in_order, self.channels)
        number = waveform.shape[:-1].numel()
        if number != self.num_channels:
            raise DataError(f"{path}: {self._other_channels(number)}")
        return waveform, rate_hz, damage

    def _other_channels(self, number: int) -> str:
        has = "has one channel" if number == 1 else f"has {number} channels"
        remedy = "leave it out, or train with --data.channels mean or one of them"
        return f"{has}, and the data has {self.num_channels}; {remedy}"

    def resized(self, values: Float32[Tensor, "*channels s"], network: Network) -> Float32[Tensor, " t"]:
        assert network.rate_hz is not None
        return change_rate(values if values.ndim == 1 else values.mean(0), self.sample_rate_hz, network.rate_hz)

    def at_rate(self, waveform: Float32[Tensor, "*channels s"], rate_hz: float) -> Float32[Tensor, "*channels t"]:
        """A waveform, resampled to the rate of the inputs."""
        return change_rate(waveform, rate_hz, self.sample_rate_hz)

    def read_whole(self, path: Source, start: float = 0.0, end: float | None = None) -> Float32[Tensor, "*channels s"]:
        """The chosen channels of a part of a file, from start to end in seconds, at the rate of the inputs.

        Raises:
            DataError: If the file is missing, broken, of an unknown format or empty, or has values that are not finite.
        """
        waveform, rate_hz, damage = self.read_until_break(path, start, end)
        if damage is not None:
            raise damage
        return self.at_rate(waveform, rate_hz)

    def read(self, path: str | os.PathLike[str]) -> Float32[Tensor, "*channels s"]:
        """One input from a file of any rate and length: its middle. Only this part is read.

        Raises:
            DataError: If the file is missing, broken, of an unknown format or empty, or has values that are not finite.
        """
        length, _ = self.header(path)
        start = max(length - self.seconds, 0) / 2
        waveform = self.read_whole(path, start, None if length <= self.seconds else start + self.seconds)
        return crop_middle(waveform, self.shape[-1])

    def as_file(self, content: bytes) -> Source:
        """What `read` takes in place of a path: the bytes of a file."""
        return Packed("inputs", content)

    def parts(
        self, path: str, window: float | None = None, hop: float | None = None, any_length: bool = False
    ) -> list[Part]:
        """The whole sound, or windows that cover it (`windows_of`).

        If the header declares more sound than the file has, the user is told.
        """
        length, contradiction = self.header(path)
        if not length:
            raise DataError(f"{path}: holds no sound; leave it out, or give --data.on_error skip")
        if contradiction:
            self._say_once(path, contradiction)
        return windows_of(path, length, self.seconds, 1 / self.sample_rate_hz, window, hop, any_length)

    def read_part(self, part: Part) -> Float32[Tensor, "*channels s"]:
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
        waveform, rate_hz, damage = self.read_until_break(path, start, end, in_order=True)
        num_samples = math.ceil((end - start) * self.sample_rate_hz - 1e-6)
        if (
            end - start <= self.seconds + 1 / self.sample_rate_hz
        ):  # a clip; rounding must not make it longer than others
            num_samples = min(num_samples, self.shape[-1])
        if damage is not None:
            if isinstance(damage, ValuesError) and self.on_error == "raise":
                raise damage
            is_empty = not waveform.numel()
            if is_empty and not (start and self.read_until_break(path, 0.0, min(start, 1.0))[0].numel()):
                raise damage
            what = f"{damage.what} at" if isinstance(damage, ValuesError) else "breaks off after"
            self._say_once(path, f"{what} {start + waveform.shape[-1] / rate_hz:.0f} s")
        resampled = self.at_rate(waveform, rate_hz)[..., :num_samples]
        return resampled if resampled.numel() else torch.full((*self._channels, num_samples), math.nan)

    def _say_once(self, path: str, what: str) -> None:
        """Tell the user what is wrong with a broken file, once for each file."""
        if path not in self._broken:
            self._broken[path] = None
            if len(self._broken) > _REMEMBERED:
                self._broken.pop(next(iter(self._broken)), None)  # the oldest; another thread may have removed it
            say(f"{path}: {what}; used up to this point")

    def _predict_options(self) -> dict[str, Any]:
        longest = self.seconds + 1 / self.sample_rate_hz  # a difference of seconds is rounded
        is_long = any(end is not None and end - start > longest for _, start, end in self.predict_parts)
        return {"batch_size": 1} if is_long else {}  # a batch would pad an hour to the length of a day

    def file_of(self, samples: Samples, index: int) -> tuple[str, bytes]:
        file = io.BytesIO()
        soundfile.write(file, samples.inputs[index].numpy().T, self.sample_rate_hz, "FLOAT", format="WAV")
        return ".wav", file.getvalue()

    def flags_of_shards(self, root: str) -> list[str]:
        rate_hz, seconds = str(self.sample_rate_hz), str(self.seconds)
        flags = ["AudioShards", "--data.root", root, "--data.sample_rate_hz", rate_hz, "--data.seconds", seconds]
        if self.channels == "mean":
            return flags
        channels = str(self.channels).replace(" ", "")
        return [*flags, "--data.channels", channels, "--data.num_channels", str(self.num_channels)]

    def figures(self, samples: Samples) -> dict[str, Any]:
        lengths, powers, peak, silent = [], [], 0.0, 0
        for waveform in samples.inputs:
            lengths.append(waveform.shape[-1] / self.sample_rate_hz)
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


class SoundsOfAnyRate(Embeds, AudioDataModule):
    """Sounds of any rate and length in files, which are read as inputs of one rate.

    Args:
        sample_rate_hz: Rate of the inputs; if absent, the most common rate of the files. A network takes its own rate.
        seconds: Length of the longest input; if absent, the length of the longest clip, but 10 s at most without a
            network.
        channels: What is read of a file with several channels: "mean", one waveform; "all"; or the numbers of one or
            several channels, from 1.
        num_channels: The number of channels of an input; if absent, with "all" that of most files.
        common: Arguments of Embeds and AudioDataModule.
    """

    reading: ClassVar[tuple[str, ...]] = ("sample_rate_hz", "seconds")

    def __init__(
        self,
        sample_rate_hz: int | None = None,
        seconds: float | None = None,
        channels: Channels = "mean",
        num_channels: int | None = None,
        **common: Any,
    ) -> None:
        # absent values are taken from the files when they are first needed
        super().__init__(sample_rate_hz=_or(sample_rate_hz, 16_000), seconds=_or(seconds, 1.0), **common)
        self._rate_given, self._seconds_given = sample_rate_hz, seconds
        self.channels, self._number_given = channels, num_channels
        if channels == "all":
            is_count = num_channels is None or num_channels >= 1
            require(is_count, "num_channels", "1 or more", num_channels, "leave it out")
            return
        numbers = [channels] if isinstance(channels, int) else [1] if channels == "mean" else list(channels)
        is_list = len({*numbers}) == len(numbers) > 0 and min(numbers) >= 1
        require(is_list, "channels", "mean, all, or numbers from 1, each once", channels, "[1, 2] are the first two")
        is_count = num_channels in (None, len(numbers))
        require(is_count, "num_channels", "that of data.channels", num_channels, "leave it out")
        self._number_given = len(numbers)

    def numbers_of_channels(self) -> Int64[Tensor, " n"]:
        """The number of channels of each readable file.

        Raises:
            DataError: If there is none, or if it is not known.
        """
        raise DataError(f"{type(self).__name__}: does not know the files' channels; give --data.num_channels")

    @property
    def num_channels(self) -> int:  # type: ignore[override]
        if self._number_given is None:
            self._number_given = int(self.numbers_of_channels().mode().values)
        return self._number_given

    @num_channels.setter
    def num_channels(self, value: int) -> None:
        self._number_given = value

    def wrong_channels(self, number: int) -> str:
        """The error, with its remedy, of a file with this number of channels; empty if it has what is asked for."""
        if self.channels == "all" and number != self.num_channels:
            return self._other_channels(number)
        return too_few_channels(number, self.channels)

    def settings_of_reading(self) -> list[Any]:
        # the mean is left out, as all data had it before there was a choice
        return super().settings_of_reading() + ([] if self.channels == "mean" else [f"channels {self.channels}"])

    def reader_for(self, network: Network) -> Self:
        assert self.seconds  # read from the files before the rate is another
        reader = super().reader_for(network)
        reader.channels, reader._number_given = "mean", 1  # networks take one channel
        return reader

    @property
    def most_seconds(self) -> float:
        """The length of the longest input if ``seconds`` is not given and clips are longer."""
        return _LONGEST_SECONDS

    @abstractmethod
    def rates_hz(self) -> Tensor:
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
        return 4 * self.num_channels * int(self.lengths_of(sources).sum())

    def details(self, sources: Any) -> dict[str, Any]:
        return {"lengths": self.lengths_of(sources)}

    @property
    def sample_rate_hz(self) -> int:  # type: ignore[override]
        if self.network is not None and self.network.rate_hz is not None:
            return self.network.rate_hz
        if self._rate_given is None:
            rates, counts = self.rates_hz().unique(return_counts=True)  # sorted: the highest of equally common rates
            rate_hz = int(rates[counts == counts.max()][-1])
            self._refuse_unusable(rate_hz, _or(self._seconds_given, 1.0))
            self._rate_given = rate_hz
        return self._rate_given

    @sample_rate_hz.setter
    def sample_rate_hz(self, value: int) -> None:
        self._rate_given = value

    @property
    def seconds(self) -> float:  # type: ignore[override]
        if self._seconds_given is None:
            longest = math.ceil(round(100 * self.longest_seconds(), 3)) / 100
            most = self.most_seconds if self.network is None else math.inf
            self._seconds_given = min(longest, most)
            if longest > most:
                what = f"the longest clip has {longest:g} s; {most:g} s of each are used"
                say(f"data.seconds: {what}, at random in training, otherwise the middle; give data.seconds")
            self._refuse_unusable(self.sample_rate_hz, self._seconds_given)
        return self._seconds_given

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._seconds_given = value


def _or(given: Any, usual: Any) -> Any:
    return usual if given is None else given
