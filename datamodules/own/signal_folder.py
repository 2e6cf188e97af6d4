"""The user's own signals with several channels: ECG, EEG, vibration, accelerometers."""

import math
import os
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from datamodules.decoding.signal_files import COMPANIONS, SUFFIXES, Signal, digest_of, named_files, opened_signal
from datamodules.decoding.sound_files import Channels, change_rate, frames_between, too_few_channels
from datamodules.errors import DataError, counted, require
from datamodules.inputs import InputSpec
from datamodules.own.audio_folder import AudioFolder
from datamodules.own.files import Item
from datamodules.own.scan import Facts
from datamodules.samples import Samples

_MOST_SAMPLES = 100_000  # of the longest input, if its seconds are not given


class SignalFolder(AudioFolder):
    """Signals in one folder for each class, or in such folders inside train, val and test, or listed in a table.

    Files are .npy, .npz and .h5 (arrays (channels, samples)), WFDB (.hea), EDF (.edf, .bdf), .csv (a column for each
    channel), .wav and .flac. Folders, tables, clips and events are those of AudioFolder. Values stay in their unit. NaN
    is a gap: encoders mask it. Files differ in length, but all have the same channels, and one rate unless
    sample_rate_hz is given. Files that state no rate have sample_rate_hz.

    Args:
        channels: "all"; the numbers of one or several channels, from 1; or "mean".
        channel_names: The names of the channels that are read; if absent, those of most files, or their numbers.
        unit: The unit of the values, such as mV; if absent, that of the files, if all have the same. Empty: unknown.
        common: Arguments of AudioFolder.

    Raises:
        DataError: From setup, if files differ in channels or rates, state no rate, or are broken.
    """

    kind: ClassVar[str] = "signal"
    predict_suffixes: ClassVar[frozenset[str]] = SUFFIXES
    companions: ClassVar[frozenset[str]] = COMPANIONS
    rates_in: ClassVar[tuple[int, int]] = (1, 1_000_000)
    has_gaps: ClassVar[bool] = True

    def __init__(
        self,
        root: str,
        channels: Channels = "all",
        channel_names: list[str] | None = None,
        unit: str | None = None,
        **common: Any,
    ) -> None:
        super().__init__(root=root, channels=channels, **common)
        require(self.network is None, "network", "left out: networks take sounds", self.network, "AudioFolder has one")
        self._is_resampled = self._rate_given is not None
        self._is_counted = channels == "all" and self._number_given is not None
        self._names_given, self._unit_given = channel_names, unit
        if channel_names is not None:
            number = len(channel_names) if self._number_given is None else self._number_given
            fits = 1 <= len(channel_names) == number
            require(fits, "channel_names", "a name for each channel", channel_names, f"give {number}, or leave it out")
            self._number_given = number

    @property
    def channel_names(self) -> list[str]:
        if self._names_given is None:
            number, known = self.num_channels, Counter(tuple(of["names"]) for of in self._readable().values())
            names = next((names for names, _ in known.most_common() if len(names) == number), ())
            numbers = range(1, number + 1) if self.channels in ("all", "mean") else np.atleast_1d(self.channels)
            self._names_given = list(names or map(str, numbers))
        return self._names_given

    @property
    def unit(self) -> str:
        if self._unit_given is None:
            units = {unit for of in self._readable().values() for unit in of["units"]}
            self._unit_given = units.pop() if len(units) == 1 else ""
        return self._unit_given

    @property
    def inputs(self) -> InputSpec:
        shape, names = (*self._channels, None), tuple(self.channel_names)
        rate_hz = self.sample_rate_hz
        return InputSpec(
            "signals", torch.float32, shape, unit=self.unit or None, channels=names, rate_hz=rate_hz, has_gaps=True
        )

    @property
    def most_seconds(self) -> float:
        return _MOST_SAMPLES / self.sample_rate_hz

    # Reading

    def _chosen(self, number: int) -> list[int]:
        """The channels that are read of a file with this number of channels, counted from 0."""
        if isinstance(self.channels, str):
            return list(range(number))
        return [number - 1 for number in ([self.channels] if isinstance(self.channels, int) else self.channels)]

    def _rate_and_frames(self, facts: Facts, chosen: list[int]) -> tuple[float, int]:
        """The rate and the number of samples of some channels.

        Raises:
            DataError: If the channels differ in them, or the rate is not known. The message has no path.
        """
        rates = {facts["rates_hz"][number] for number in chosen}
        frames = {facts["frames_of_channels"][number] for number in chosen}
        if len(rates) > 1 or len(frames) > 1:
            differ = " and ".join(f"{rate:g}" for rate in sorted(rate or 0 for rate in rates))
            raise DataError(f"its channels have {differ} Hz; choose some of one rate with --data.channels, such as 1")
        rate = rates.pop()
        if rate is None and self._rate_given is None:
            raise DataError("states no rate; give --data.sample_rate_hz")
        return float(rate or self.sample_rate_hz), frames.pop()

    def _described(self, path: Path | str, signal: Signal) -> tuple[list[int], float, int]:
        """The chosen channels of an open file, their rate, and their number of samples."""
        if what := too_few_channels(len(signal.frames), self.channels):
            raise DataError(f"{path}: {what}")
        chosen = self._chosen(len(signal.frames))
        try:
            facts = {"rates_hz": signal.rates_hz, "frames_of_channels": signal.frames}
            return chosen, *self._rate_and_frames(facts, chosen)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error

    def header(self, path: str | os.PathLike[str]) -> tuple[float, str]:
        with opened_signal(path) as signal:
            _, rate_hz, frames = self._described(str(path), signal)
        return frames / rate_hz, ""

    def read_until_break(
        self, path: Any, start: float, end: float | None, in_order: bool = False
    ) -> tuple[Float32[Tensor, "*channels s"], float, DataError | None]:
        with opened_signal(path) as signal:
            chosen, rate_hz, frames = self._described(path, signal)
            first, stop = frames_between(start, end, rate_hz, frames)
            values = torch.from_numpy(signal.read(chosen, first, stop).astype("float32", order="C"))
            names = [signal.names[number] for number in chosen if signal.names]
        if values.isinf().any():
            raise DataError(f"{path}: holds infinite values; write NaN where a value is missing")
        if self.channels == "mean":
            values = values.mean(0, keepdim=True)
        elif what := self._other_names(names) or self.wrong_channels(len(signal.frames)):
            raise DataError(f"{path}: {what}")
        return values[0] if len(values) == 1 else values, rate_hz, None

    def at_rate(self, waveform: Float32[Tensor, "*channels s"], rate_hz: float) -> Float32[Tensor, "*channels t"]:
        """A signal, resampled to the rate of the inputs. Gaps are filled with the mean of their channel before, so that
        they do not ring, and are gaps after it."""
        if rate_hz == self.sample_rate_hz or not waveform.numel():
            return waveform
        mean, missing = waveform.nanmean(-1, keepdim=True).nan_to_num(), waveform.isnan()
        resampled = change_rate((waveform - mean).masked_fill(missing, 0), rate_hz, self.sample_rate_hz) + mean
        nearest = torch.arange(resampled.shape[-1]) * (rate_hz / self.sample_rate_hz)
        return resampled.masked_fill(missing[..., nearest.round().long().clamp(max=waveform.shape[-1] - 1)], math.nan)

    # The scan

    def examine(self, path: Path) -> Facts:
        with opened_signal(path) as signal:
            num_missing = 0
            for channel, frames in enumerate(signal.frames):
                values = torch.from_numpy(signal.read([channel], 0, frames).astype("float32"))
                if values.isinf().any():
                    raise DataError(f"{path}: holds infinite values; write NaN where a value is missing")
                num_missing += int(values.isnan().sum())
        if num_missing == sum(signal.frames):
            raise DataError(f"{path}: holds gaps (NaN) alone; leave it out")
        return {
            "sha256": digest_of(path), "names_of_channels": signal.names, "units_of_channels": signal.units,
            "rates_hz": signal.rates_hz, "frames_of_channels": signal.frames, "is_array": signal.is_array,
            "missing": num_missing / sum(signal.frames),
        }  # fmt: skip

    def other_files(self, path: Path) -> list[Path]:
        return named_files(path)

    def chosen(self, facts: Facts) -> Facts:
        if "error" in facts:
            return facts
        number = len(facts["frames_of_channels"])
        has_them = not too_few_channels(number, self.channels)  # else bad_files says so
        chosen = self._chosen(number) if has_them else list(range(number))
        try:
            rate_hz, frames = self._rate_and_frames(facts, chosen)
        except DataError as error:
            return {"error": str(error)}
        names, units = ([facts[key][number] for number in chosen if facts[key]]
                        for key in ("names_of_channels", "units_of_channels"))  # fmt: skip
        return {**facts, "rate_hz": rate_hz, "frames": frames, "channels": number, "names": names, "units": units}

    @cached_property
    def _common_rate(self) -> float:
        """The rate of most files."""
        ((rate_hz, _),) = Counter(of["rate_hz"] for of in self._readable().values()).most_common(1)
        return rate_hz

    def rates_hz(self) -> Float64[Tensor, " 1"]:
        rate_hz = self._common_rate
        if rate_hz != round(rate_hz):
            what = f"the files have {rate_hz:g} Hz; give --data.sample_rate_hz, a whole number, to resample them"
            raise DataError(f"{self.root}: {what}")
        return torch.tensor([rate_hz], dtype=torch.float64)

    def numbers_of_channels(self) -> Tensor:
        readable = self._readable().values()
        are_arrays = all(of["is_array"] and of["channels"] > of["frames"] for of in readable)
        if are_arrays and not self._is_counted:
            number, frames = next((of["channels"], of["frames"]) for of in readable)
            what = f"all arrays have more channels than samples ({number} x {frames}); arrays are (channels, samples)"
            raise DataError(f"{self.root}: {what}: transpose them, or give --data.num_channels {number} if they are")
        return super().numbers_of_channels()

    def _other_names(self, names: list[str]) -> str:
        """The error of a file whose channels have other names; empty if they have none, or these."""
        if not names or len(names) != self.num_channels or names == self.channel_names:
            return ""
        what = f"has the channels {', '.join(names)}, and the data {', '.join(self.channel_names)}"
        return f"{what}; leave it out, or choose with --data.channels"

    def bad_files(self) -> dict[str, str]:
        """Also the errors of files with other names of channels, or with another rate that nobody asked to change."""
        bad = super().bad_files()
        wrong = {}
        for path, of in self.facts.items():
            if path in bad:
                continue
            if of["rate_hz"] != self._common_rate and not self._is_resampled:
                what = f"has {of['rate_hz']:g} Hz, and the others {self._common_rate:g}"
                wrong[path] = f"{what}; give --data.sample_rate_hz {self._common_rate:g} to resample it"
            elif self.channels != "mean" and (what := self._other_names(of["names"])):
                wrong[path] = what
        return bad | wrong

    def wrong_part(self, item: Item) -> str:
        if what := super().wrong_part(item):
            return what
        if not self.facts[item.path]["missing"] or self.wrong_channels(self.facts[item.path]["channels"]):
            return ""
        try:
            values, *_ = self.read_until_break(self.folder / item.path, item.start, item.end)
        except DataError:
            return ""  # other channels, which bad_files reports
        line = f"line {item.line} of the table: " if item.line else ""
        return f"{line}holds gaps (NaN) alone; leave it out" if values.isnan().all() else ""

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        if stage == "predict":
            return
        missing = {path: of["missing"] for path, of in self.facts.items() if of.get("missing")}
        if missing:
            most = max(missing, key=missing.__getitem__)
            what = f"the largest share {missing[most]:.1%} in {most}; they are masked"
            has = "has gaps (NaN)" if len(missing) == 1 else "have gaps (NaN)"
            self.remark(f"{counted(len(missing), 'file')} of {len(self.facts)} {has}, {what}")
        units = sorted({unit for of in self.facts.values() for unit in of.get("units", ())})
        if len(units) > 1:
            listed = ", ".join(unit or "none" for unit in units)
            self.remark(f"units differ between channels or files ({listed}); the values are kept as they are")

    def file_of(self, samples: Samples, index: int) -> tuple[str, bytes]:
        raise DataError("data: shards hold images and sounds; train on the signals' own files")

    def figures(self, samples: Samples) -> dict[str, Any]:
        lengths, num_missing, num_samples = [], 0, 0
        for signal in samples.inputs:
            lengths.append(signal.shape[-1] / self.sample_rate_hz)
            num_missing, num_samples = num_missing + int(signal.isnan().sum()), num_samples + signal.numel()
        median = float(torch.tensor(lengths).median())
        return {
            "sample rate (Hz)": self.sample_rate_hz,
            "channels": ", ".join(self.channel_names),
            "unit": self.unit or "unknown",
            "seconds, shortest / median / longest": [round(value, 3) for value in (min(lengths), median, max(lengths))],
            "seconds, in all": round(sum(lengths), 1),
            "share of gaps": round(num_missing / num_samples, 4),
        }
