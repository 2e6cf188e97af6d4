"""Spoken digits hidden in backgrounds of any duration: does a model find one second in an hour?"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from datamodules.audio import AudioDataModule, crop_middle
from datamodules.errors import DataError, require, require_in
from datamodules.labels import Labels, labels_of
from datamodules.samples import Clips, Files, Samples
from datamodules.sets.esc50 import ESC50
from datamodules.sets.fsdd import FSDD

_LONGEST_DIGIT = 1.0  # seconds
_BACKGROUND_SECONDS = 5.0  # of a clip of ESC-50
_FADE_SECONDS = 0.02
_BACKGROUND_LEVEL = 0.02  # root mean square of each background clip
_GAINS_DB = (-10.0, 10.0)  # of a whole recording
_TRAINING_GAINS_DB = (-12.0, 0.0)  # of each background clip in training
_TRAINING_SPEEDS = {"digits": (0.85, 1.18), "backgrounds": (0.7, 1.4)}
_TRAINING_COLOURS_DB = {"digits": 4.0, "backgrounds": 12.0}  # the largest change at a frequency, up or down
_ONE_NOISE_IN = 4  # of mixed backgrounds; the others are pairs of clips
_TILTS_DB = {"clips": (-3.0, 3.0), "noise": (-6.0, 3.0)}  # an octave, of mixed backgrounds
_SECOND_GAINS_DB = (-10.0, 0.0)  # of the second clip of a pair
_COLOUR_GAINS = 9  # the number of these frequencies, equally spaced from 0 to half of the sample rate
_CLASSES = {
    "digit": [str(digit) for digit in range(10)],
    "same": ["different", "same"],
    "order": ["falling", "rising"],
    "digits": [str(digit) for digit in range(10)],
}
_MOST_SPOKEN = {"digit": 1, "same": 2, "order": 2, "digits": 3}


class Needles(AudioDataModule):
    """Recordings of any duration with spoken digits hidden in background sounds.

    The digits are from FSDD with its official split. The backgrounds are from ESC-50: fold 5 for the test, fold 4 for
    the validation, the others for training. So no model was trained on the digits and backgrounds of the test. A
    background is a sequence of random clips, all with the same level.

    Every training epoch makes new recordings from changed sounds. Digits change in speed and colour (louder at some
    frequencies, softer at others). Backgrounds change in speed, colour, direction and level, and two may overlap.
    The recordings of validation and test are always the same, and their sounds are not changed.

    There are four questions. ``digit``: which digit is spoken? A window can answer it. ``same``: two digits are
    spoken; are they the same? ``order``: two different digits are spoken; is the second one higher (rising) or lower
    (falling)? The two digits are in different halves of the recording, so in a long one no window contains both.
    ``digits``: one to three different digits are spoken; which? This is for the task MultiLabel.

    Args:
        root: Folder that holds free-spoken-digit-dataset and ESC-50-master.
        question: ``digit``, ``same``, ``order`` or ``digits``.
        level_db: Level of a digit relative to the background, in decibels.
        background: ``recordings``; ``noise``: noise with the spectra of the recordings, which never repeats; or
            ``mixed``: in every split, random pairs of recordings, each with a random spectral tilt, and noise with one.
        num_train: Recordings of a training epoch.
        num_test: Recordings of the test split, and of the validation split.
        sample_rate_hz: Rate of the recordings.
        seconds: Length of the longest recording.
        shortest: Length of the shortest recording, in seconds; lengths are random between the two.
        test_speakers: See FSDD; if absent, training and test have the same speakers.
        val_speakers: The same for the validation split.
        held_out_digits: With ``same``, digits that the recordings of the test compare, and those of training and
            validation never hold; with ``digit``, digits that no recording holds, so that a training of ``same`` can
            start from this one. If empty, all splits have all digits.
        common: Arguments of AudioDataModule.

    Raises:
        ValueError: If an argument is out of its range.
        DataError: From setup, if one of the data sets is missing or broken.
    """

    def __init__(
        self,
        root: str,
        question: Literal["digit", "same", "order", "digits"] = "digit",
        level_db: float = 15.0,
        background: Literal["recordings", "noise", "mixed"] = "recordings",
        num_train: int = 2000,
        num_test: int = 300,
        sample_rate_hz: int = 8000,
        seconds: float = 10.0,
        shortest: float = 2.5,
        test_speakers: Sequence[str] = (),
        val_speakers: Sequence[str] = (),
        held_out_digits: Sequence[int] = (),
        **common: Any,
    ) -> None:
        super().__init__(sample_rate_hz=sample_rate_hz, seconds=seconds, **common)
        require(question in _CLASSES, "question", ", ".join(_CLASSES), question, "digit is the easiest")
        require_in("level_db", level_db, -60, 60, "15 is easy to hear, 0 is not")
        is_known = background in ("recordings", "noise", "mixed")
        require(is_known, "background", "recordings, noise or mixed", background, "recordings are those of ESC-50")
        self.class_names = list(_CLASSES[question])
        for name, count in {"num_train": num_train, "num_test": num_test}.items():
            require(count >= len(self.class_names), name, f"{len(self.class_names)} or more", count, "1000 is usual")
        least = _MOST_SPOKEN[question] * (_LONGEST_DIGIT + 0.1)
        require(least <= shortest <= seconds, "shortest", f"in {least}..seconds", shortest, "digits must fit into it")
        self.root, self.question, self.level_db, self.background = root, question, level_db, background
        self.num_train, self.num_test, self.shortest = num_train, num_test, shortest
        self.test_speakers, self.val_speakers = list(test_speakers), list(val_speakers)
        held_out = self.held_out_digits = list(held_out_digits)
        what = "two to eight different digits of 0..9, with question same or digit"
        is_possible = question in ("same", "digit") and 2 <= len(held_out) <= 8
        are_known = is_possible and len({*held_out} & {*range(10)}) == len(held_out)
        require(not held_out or are_known, "held_out_digits", what, held_out, "[7, 8, 9] leaves seven to train on")

    def load(self) -> tuple[Samples, Samples, Samples]:
        digits = FSDD(
            self.root,
            self.sample_rate_hz,
            seconds=_LONGEST_DIGIT,
            test_speakers=self.test_speakers,
            val_speakers=self.val_speakers,
            val_fraction=0.1,
        )
        digits.setup()
        backgrounds = ESC50(self.root, sample_rate_hz=self.sample_rate_hz, seconds=_BACKGROUND_SECONDS)
        backgrounds.setup()
        names = ("train", "val", "test")
        held_out = self.held_out_digits
        others = [digit for digit in range(10) if digit not in held_out]
        makers = [
            Maker(
                self,
                digits.splits()[name],
                backgrounds.splits()[name],
                is_training=name == "train",
                spoken=held_out if held_out and name == "test" and self.question == "same" else others,
            )
            for name in names
        ]
        self._test_maker = makers[2]
        counts = (self.num_train, self.num_test, self.num_test)
        train, val, test = (Recordings(makers[split], counts[split], split) for split in range(3))
        return train, val, test

    def recording(self, seconds: float, trial: int) -> tuple[Float32[Tensor, " s"], int]:
        """A recording of any duration from the test's digits and backgrounds, and its class; available after setup.

        Args:
            seconds: Its duration.
            trial: Decides the digits, the backgrounds and the positions.

        Raises:
            DataError: If recordings may have several classes.
        """
        if self.question == "digits":
            raise DataError("data.question: digits has recordings of several classes; the figures are those of a fit")
        label = self._test_maker.label(trial)
        num_samples, generator = round(seconds * self.sample_rate_hz), _generator_of(seconds, trial)
        return self._test_maker(torch.tensor(label), num_samples, generator), label

    def empty_recording(self, seconds: float, trial: int) -> Float32[Tensor, " s"]:
        """A recording of the test's backgrounds without any digit; the arguments are those of ``recording``."""
        return self._test_maker.empty(round(seconds * self.sample_rate_hz), _generator_of(seconds, trial))


class Maker:
    """Makes recordings from the digits and the backgrounds of a split.

    Args:
        data: The data module, with the question and the levels.
        digits: Labelled spoken digits.
        backgrounds: Background sounds; their labels are not used.
        is_training: Whether sounds are changed at random.
        spoken: The digits of ``digit``, ``same`` and ``order``.
    """

    def __init__(
        self, data: Needles, digits: Samples, backgrounds: Samples, is_training: bool, spoken: Sequence[int]
    ) -> None:
        self.data, self.is_training, self.spoken = data, is_training, spoken
        of_digit = [(digits.labels == digit).nonzero()[:, 0].tolist() for digit in range(10)]
        longest = round(_LONGEST_DIGIT * data.sample_rate_hz)
        self.digits = [[crop_middle(digits.inputs[index], longest) for index in indices] for indices in of_digit]
        self.backgrounds = [_levelled(waveform) for waveform in backgrounds.inputs]
        self.digest = f"{digits.digest()} {backgrounds.digest()}"

    def __call__(
        self, label: Int64[Tensor, " *classes"], num_samples: int, generator: torch.Generator
    ) -> Float32[Tensor, " s"]:
        """A recording of num_samples samples with this label."""
        recording = self._background(num_samples, generator)
        self._speak(recording, label, generator)
        return recording * 10 ** (_between(_GAINS_DB, generator) / 20)

    def empty(self, num_samples: int, generator: torch.Generator) -> Float32[Tensor, " s"]:
        """A recording of num_samples samples without digits."""
        return self._background(num_samples, generator) * 10 ** (_between(_GAINS_DB, generator) / 20)

    def _speak(
        self, recording: Float32[Tensor, " s"], label: Int64[Tensor, " *classes"], generator: torch.Generator
    ) -> None:
        """Add the digits of a label to a recording, in place."""
        num_samples = len(recording)
        spoken = self._spoken(label, generator)
        share = num_samples // len(spoken)
        for number, digit in enumerate(spoken):
            clips = self.digits[digit]
            clip = clips[_draw(len(clips), generator)]
            if self.is_training:
                clip = _changed(clip, "digits", generator)
            clip = clip[:share]
            begin = number * share + _draw(share - len(clip) + 1, generator)
            level = _BACKGROUND_LEVEL * 10 ** (self.data.level_db / 20)
            recording[begin : begin + len(clip)] += clip * (level / _level_of(clip))

    def label(self, index: int) -> int:
        """The class of the recording of an index: every class equally often, of digits only those that are spoken."""
        if self.data.question == "digit":
            return self.spoken[index % len(self.spoken)]
        return index % self.data.num_classes

    def labels(self, count: int, generator: torch.Generator) -> Labels:
        """The labels of `count` recordings: every class equally often, or one to three random classes for each."""
        if self.data.question != "digits":
            return torch.tensor([self.label(index) for index in range(count)])
        numbers = torch.randint(1, _MOST_SPOKEN["digits"] + 1, (count,), generator=generator).tolist()
        classes = [torch.randperm(10, generator=generator)[:number].tolist() for number in numbers]
        return labels_of(classes, 10, are_many=True)

    def _spoken(self, label: Int64[Tensor, " *classes"], generator: torch.Generator) -> list[int]:
        """The digits of a recording, in their order."""
        if self.data.question == "digit":
            return [int(label)]
        if self.data.question == "digits":
            digits = label.nonzero()[:, 0]
            return digits[torch.randperm(len(digits), generator=generator)].tolist()
        drawn = torch.randperm(10, generator=generator).tolist()
        first, second = [digit for digit in drawn if digit in self.spoken][:2]
        if self.data.question == "same":
            return [first, first] if label else [first, second]
        return [min(first, second), max(first, second)] if label else [max(first, second), min(first, second)]

    def _background(self, num_samples: int, generator: torch.Generator) -> Float32[Tensor, " s"]:
        recording = torch.zeros(num_samples)
        fade = max(round(_FADE_SECONDS * self.data.sample_rate_hz), 1)
        begin = 0
        while begin < num_samples:
            clip = self._background_clip(generator)
            if begin == 0:
                clip = clip[_draw(len(clip) // 2, generator) :]  # else clips would begin at the same times everywhere
            ramp = torch.linspace(0, 1, fade)
            clip = torch.cat([clip[:fade] * ramp, clip[fade:-fade], clip[-fade:] * ramp.flip(0)])
            part = clip[: num_samples - begin]
            recording[begin : begin + len(part)] += part
            begin += len(clip) - fade
        return recording

    def _background_clip(self, generator: torch.Generator) -> Float32[Tensor, " s"]:
        clip = self._mixed(generator) if self.data.background == "mixed" else self._single(generator)
        if self.data.background == "noise":
            clip = _noise_like(clip, generator)
        clip = _levelled(clip)
        return clip * 10 ** (_between(_TRAINING_GAINS_DB, generator) / 20) if self.is_training else clip

    def _single(self, generator: torch.Generator) -> Float32[Tensor, " s"]:
        """One clip; in training a changed one, or this and another."""
        clip = self._clip(generator)
        if self.is_training and _draw(2, generator):
            clip = _together(clip, self.backgrounds[_draw(len(self.backgrounds), generator)])
        return clip

    def _mixed(self, generator: torch.Generator) -> Float32[Tensor, " s"]:
        """Noise, or two clips, of which the second is softer and begins anywhere in its sound."""
        if not _draw(_ONE_NOISE_IN, generator):
            noise = torch.randn(round(_BACKGROUND_SECONDS * self.data.sample_rate_hz), generator=generator)
            return _tilted(noise, _between(_TILTS_DB["noise"], generator))
        first, second = (
            _levelled(_tilted(self._clip(generator), _between(_TILTS_DB["clips"], generator))) for _ in range(2)
        )
        second = second.roll(_draw(len(second), generator)) * 10 ** (_between(_SECOND_GAINS_DB, generator) / 20)
        return _together(first, second)

    def _clip(self, generator: torch.Generator) -> Float32[Tensor, " s"]:
        """A clip; in training at a random speed, with a random colour, and in a random direction."""
        clip = self.backgrounds[_draw(len(self.backgrounds), generator)]
        if self.is_training:
            clip = _changed(clip, "backgrounds", generator)
            if _draw(2, generator):
                clip = clip.flip(0)
        return clip


class Recordings(Clips):
    """The recordings of a split. Every training epoch makes new ones.

    Args:
        maker: Makes the recordings.
        count: The number of recordings.
        split: The number of the split, so that each split has different recordings.
    """

    def __init__(self, maker: Maker, count: int, split: int) -> None:
        data = maker.data
        generator = torch.Generator().manual_seed(data.seed + split)
        spread = torch.rand(count, generator=generator, dtype=torch.float64)
        seconds = data.shortest + (data.seconds - data.shortest) * spread
        self.labels = maker.labels(count, generator)
        self.whole_lengths = (seconds * data.sample_rate_hz).round().long()
        self.maker, self.seed = maker, 7919 * data.seed + split
        settings = [data.question, data.level_db, data.background, data.seconds, data.shortest, data.sample_rate_hz]
        settings += [data.held_out_digits] if data.held_out_digits else []  # the digest of older trainings has none
        super().__init__(
            Files(range(count), self.fixed),
            self.labels,
            digest=f"{maker.digest} {settings} {count} {split} {data.seed}",
            lengths=self.whole_lengths,
        )

    @property
    def is_cropped(self) -> bool:
        """True, so that every training epoch makes new recordings."""
        return True

    def fixed(self, index: int) -> Float32[Tensor, " s"]:
        """The recording of this index in evaluations."""
        return self.sample(index, torch.Generator().manual_seed(1_000_003 * self.seed + index))

    def sample(self, index: int, generator: torch.Generator | None = None) -> Float32[Tensor, " s"]:
        if generator is None:
            return self.fixed(index)
        return self.maker(self.labels[index], int(self.whole_lengths[index]), generator)


def _generator_of(seconds: float, trial: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * round(seconds * 1000) + trial)


def _draw(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(max(count, 1), (), generator=generator))


def _between(limits: tuple[float, float], generator: torch.Generator) -> float:
    low, high = limits
    return low + (high - low) * float(torch.rand((), generator=generator))


def _changed(
    waveform: Float32[Tensor, " s"], kind: Literal["digits", "backgrounds"], generator: torch.Generator
) -> Float32[Tensor, " t"]:
    """A training sound at a random speed and with a random colour."""
    waveform = _at_speed(waveform, _between(_TRAINING_SPEEDS[kind], generator))
    most = _TRAINING_COLOURS_DB[kind]
    return _coloured(waveform, most * (2 * torch.rand(_COLOUR_GAINS, generator=generator) - 1))


def _coloured(waveform: Float32[Tensor, " s"], gains_db: Float32[Tensor, " gains"]) -> Float32[Tensor, " s"]:
    """A waveform after a filter with these gains, at frequencies equally spaced from 0 to half of the sample rate."""
    reach = len(gains_db) - 1  # the filter has taps from -reach to reach, and half of its last tap at each end
    taps = torch.fft.irfft(10 ** (gains_db / 20)).roll(reach)
    taps = torch.cat([taps[:1] / 2, taps[1:], taps[:1] / 2])
    padded = torch.nn.functional.pad(waveform, (reach, reach))
    filtered = torch.zeros_like(waveform)
    for delay, tap in enumerate(taps.tolist()):  # conv1d is slower, because it is compiled for every length
        filtered.add_(padded[delay : delay + len(waveform)], alpha=tap)
    return filtered


def _at_speed(waveform: Float32[Tensor, " s"], speed: float) -> Float32[Tensor, " t"]:
    """A waveform played faster, which raises its pitch, or slower, which lowers it."""
    length = max(round(len(waveform) / speed), 1)
    return torch.nn.functional.interpolate(waveform[None, None], length, mode="linear")[0, 0]


def _tilted(waveform: Float32[Tensor, " s"], decibels: float) -> Float32[Tensor, " s"]:
    """A waveform whose level changes by so many decibels an octave, below 1/16 of the sample rate by less."""
    frequencies = torch.arange(_COLOUR_GAINS).clamp(min=0.5) / (_COLOUR_GAINS - 1)
    return _coloured(waveform, decibels * frequencies.log2())


def _together(first: Float32[Tensor, " s"], second: Float32[Tensor, " t"]) -> Float32[Tensor, " u"]:
    """The sum of two waveforms, as long as the shorter one."""
    shorter = min(len(first), len(second))
    return first[:shorter] + second[:shorter]


def _level_of(waveform: Tensor) -> float:
    return max(float(waveform.square().mean().sqrt()), 1e-6)


def _levelled(waveform: Tensor) -> Tensor:
    return waveform * (_BACKGROUND_LEVEL / _level_of(waveform))


def _noise_like(waveform: Float32[Tensor, " s"], generator: torch.Generator) -> Float32[Tensor, " s"]:
    """Noise with the spectrum of a waveform: its phases are replaced by random ones."""
    spectrum = torch.fft.rfft(waveform)
    phases = 2 * math.pi * torch.rand(len(spectrum), generator=generator)
    return torch.fft.irfft(torch.polar(spectrum.abs(), phases), n=len(waveform))
