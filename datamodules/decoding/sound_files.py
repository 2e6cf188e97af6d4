"""Reading sound files of every format that soundfile supports, and detecting broken ones."""

import io
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import soundfile
import torch
from jaxtyping import Float32
from torch import Tensor, nn
from torchaudio.transforms import Resample

from datamodules.cache import stamp
from datamodules.decoding._quiet import without_noise
from datamodules.decoding._sound_mended import StandIn, mended
from datamodules.decoding.packed import Packed, Source
from datamodules.errors import DataError

SUFFIXES = frozenset({".aif", ".aiff", ".au", ".caf", ".flac", ".mp3", ".ogg", ".opus", ".w64", ".wav"})
DECODED_ELSEWHERE = frozenset({".aac", ".m4a", ".mp4", ".webm", ".wma"})  # by torchcodec with FFmpeg, if installed
_LOUDEST = 100.0  # with full scale 1: no recording or mixture exceeds it by 40 dB, so larger values have another unit
_MISSING = 0.02  # some writers estimate the frames in the header; a file that lacks a larger share is truncated
# The lines of libsndfile's log with the length of the sound, and of the file. Other chunks have no sound.
_OF_THE_SOUND = frozenset({"data", "SSND", "Data Size"})
_OF_THE_FILE = frozenset({"RIFF", "riff", "Riff size", "FORM"})
_BLOCK = 2**20  # frames that are read at once to examine a file
# What is read of a file: the mean of its channels, all of them, or those of these numbers, which count from 1.
Channels = Literal["mean", "all"] | int | list[int]
_LAST_PAGE = 2**18  # frames of a page of Ogg: 255 packets of 1024


class ValuesError(DataError):
    """A sound has values that are not finite, or far beyond full scale; `what` describes them."""

    def __init__(self, path: Source, what: str, remedy: str) -> None:
        super().__init__(f"{path}: {what}; {remedy}")
        self.what = what


def read_sound(
    path: Source, start: float = 0.0, end: float | None = None, channels: Channels = "mean"
) -> tuple[Tensor, int]:
    """A part of a sound file, from start to end in seconds: a waveform (s,), or (channels, s) if several channels are
    read; its rate in Hz.

    Raises:
        DataError: If the file is missing, broken, of an unknown format or empty, has too few channels, or has values
            that are not finite or far beyond full scale.
    """
    waveform, rate_hz, damage = read_until_break(path, start, end, channels=channels)
    if damage is not None:
        raise damage
    return waveform, rate_hz


def read_until_break(
    path: Source, start: float = 0.0, end: float | None = None, in_order: bool = False, channels: Channels = "mean"
) -> tuple[Tensor, int, DataError | None]:
    """Like read_sound, but for a damaged file return the samples before the damage, which may be none, and the error.

    The error is None if the part is not damaged. An error in the header is raised.
    """
    blocks: list[np.ndarray] = []
    rate_hz, damage = 0, None
    for blocks_a_second in (1, 100):  # an error loses a whole block, so short ones are tried after it
        damage = None
        try:
            with opened(path, in_order) as file:
                if what := too_few_channels(file.channels, channels):
                    raise DataError(f"{path}: {what}")
                rate_hz = file.samplerate
                first, stop = frames_between(start, end, rate_hz, file.frames)
                for block in _read(file, first + sum(map(len, blocks)), stop, rate_hz // blocks_a_second):
                    waveform = _picked(block, channels)
                    _peak(path, waveform)
                    blocks.append(waveform)
                if stop - file.tell() > _MISSING * file.frames or (first < stop and not blocks):
                    damage = _cut_off(path, file.tell(), file.frames)
            break
        except DataError as error:
            if not rate_hz:
                raise
            damage = error
    frames = np.concatenate(blocks or [np.zeros(0, np.float32)])
    if not len(frames) and damage is None:
        raise DataError(
            f"{path}: holds no sound{f' from {start:g} s' if start else ''}; leave it out or record it again"
        )
    return _waveform(frames), rate_hz, damage


def _read(file: Any, first: int, stop: int, most: int, dtype: str = "float32") -> Iterator[np.ndarray]:
    """The frames first..stop of a file, in blocks of at most `most` frames.

    Decoding starts one second earlier for MP3, Opus and Vorbis. MP3: soundfile seeks before every read, and the first
    frames after a seek lack bits that they share with earlier frames, so they would be silent. Opus: the decoder needs
    some time to be exact. Vorbis: after a seek into the last page, libsndfile returns other samples.
    """
    if file.format == "OGG" and file.tell() != first:
        file.seek(max(min(first, file.frames - _LAST_PAGE) - file.samplerate, 0))
        while file.tell() < first and len(file.read(min(_BLOCK, first - file.tell()), dtype=dtype, always_2d=True)):
            pass
    else:
        file.seek(first)
    is_mp3 = file.format == "MP3"
    while (at := file.tell()) < stop:
        before = min(at, file.samplerate) if is_mp3 else 0
        if before:
            file.seek(at - before)
        block = file.read(before + min(most, stop - at), dtype=dtype, always_2d=True)[before:]
        if not len(block):
            return
        yield block


def _is_same_in_any_blocks(file: Any) -> bool:
    """Whether the samples do not depend on where reading starts, as they do in MP3, Ogg and what FFmpeg decodes."""
    return file.format not in ("MP3", "OGG") and not isinstance(file, StandIn)


def _cut_off(path: Source, there: int, declared: int) -> DataError:
    return DataError(f"{path}: cut off, {there} of {declared} samples are there; copy it again")


def frames_between(start: float, end: float | None, rate_hz: float, frames: int) -> tuple[int, int]:
    """The first frame of a part of a recording, and the frame after its last one.

    Args:
        start, end: The part, in seconds; None is the end of the recording.
        rate_hz: Frames per second.
        frames: Number of frames of the whole recording.
    """
    return round(min(start * rate_hz, frames)), frames if end is None else round(min(end * rate_hz, frames))


def clip_of(path: str | os.PathLike[str], start: float, end: float | None) -> tuple[str, bytes]:
    """A part of a recording as a new file with the same samples: its suffix and its bytes.

    It is FLAC if the recording has integers of 16 or 24 bits at a rate that FLAC supports, else WAV with floats.

    Raises:
        DataError: If the file cannot be read.
    """
    with opened(path) as file:
        first, stop = frames_between(start, end, file.samplerate, file.frames)
        bits = file.subtype
        has_rate = file.samplerate <= 65535 or (file.samplerate % 10 == 0 and file.samplerate <= 655350)  # in FLAC
        is_integer = bits in ("PCM_16", "PCM_24") and file.channels <= 8 and has_rate
        blocks = [*_read(file, first, stop, file.samplerate, "int32" if is_integer else "float32")]
        clip = np.concatenate(blocks or [np.zeros((0, file.channels), np.float32)])
        rate_hz, written = file.samplerate, io.BytesIO()
    if is_integer:
        soundfile.write(written, clip, rate_hz, bits, format="FLAC")
    else:
        soundfile.write(written, clip, rate_hz, "FLOAT", format="WAV")
    return ".flac" if is_integer else ".wav", written.getvalue()


def header_of(path: str | os.PathLike[str]) -> tuple[float, str]:
    """The length that the header of a sound file declares, in seconds; and how it contradicts the file, or "".

    Raises:
        DataError: If the file is missing or of an unknown format.
    """
    with opened(path) as file:
        return file.frames / file.samplerate, contradiction(file.extra_info)


def seconds_of(path: str | os.PathLike[str]) -> float:
    """The length of a sound file in its header, in seconds. Errors are those of `header_of`."""
    return header_of(path)[0]


def examine_sound(path: Source, waveform: list[Tensor] | None = None, channels: Channels = "mean") -> dict[str, Any]:
    """Read a whole sound file, and return its frames, rate_hz, channels, and peak, the largest value of any channel.

    For several channels there is also "kept": the power of their mean, as a share of their own power. It is 0 if they
    cancel each other, and 1 if they are the same.

    Args:
        path: The file.
        waveform: A list to which the waveform is added that `read_sound` returns, unless that reads in another way.
        channels: The channels of that waveform.

    Raises:
        DataError: If the file is broken, even if it could be read: truncated, or with values that are not finite or far
            beyond full scale.
    """
    with opened(path) as file:
        declared = file.frames
        what = contradiction(file.extra_info)
        num_frames, peak, power, power_kept = 0, 0.0, 0.0, 0.0
        is_same = waveform is not None and _is_same_in_any_blocks(file)
        is_same = is_same and not too_few_channels(file.channels, channels)
        parts: list[np.ndarray] = []
        while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
            num_frames += len(block)
            peak = max(peak, _peak(path, block))
            average = _averaged(block)
            if is_same:
                parts.append(average if channels == "mean" else _picked(block, channels))
            if block.shape[1] > 1:
                power += float(np.vdot(block, block)) / block.shape[1]
                power_kept += float(np.vdot(average, average))
        rate_hz, num_channels = file.samplerate, file.channels
    if what:
        raise DataError(f"{path}: {what}; record, copy or convert it again")
    if num_frames < (1 - _MISSING) * declared:
        raise _cut_off(path, num_frames, declared)
    if not num_frames:
        raise DataError(f"{path}: holds no sound; leave it out or record it again")
    if waveform is not None and is_same and num_frames == declared:
        waveform.append(_waveform(np.concatenate(parts)))
    facts = {"frames": num_frames, "rate_hz": rate_hz, "channels": num_channels, "peak": peak}
    return {**facts, "kept": power_kept / power} if power else facts


_last = threading.local()  # the last open MP3 of a thread: `file`, by its `key`


@contextmanager
def opened(path: Source, in_order: bool = False) -> Iterator[Any]:
    """An open soundfile.SoundFile. Its errors become DataErrors, and libmpg123's messages are suppressed.

    Args:
        path: The file.
        in_order: Whether the parts of the file are read one after the other. An MP3 then stays open, because a new
            handle searches for every part from the start of the file, which takes long in a recording of a day. Earlier
            reads change the last bits of what a decoder returns. Trainings must be bit-equal in any order, so they do
            not use this.
    """
    with without_noise(path):
        file, key = _open(path, in_order)
        stays_open = False
        try:
            yield file
            stays_open = key is not None and (file.format == "MP3" or isinstance(file, StandIn))
        except (soundfile.SoundFileError, OSError) as error:
            raise _unreadable(path, error) from error
        finally:
            if stays_open:
                _last.key, _last.file = key, file
            else:
                file.close()


def _open(path: Source, in_order: bool) -> tuple[Any, tuple[int, str] | None]:
    """An open file, and the key for `_last`, if its parts are read in order."""
    source: Any = path
    key = None
    if not isinstance(path, Packed):
        if not Path(path).is_file():
            what = "is a folder; give the files in it" if Path(path).is_dir() else "no such file; check the path"
            raise DataError(f"{path}: {what}")
        if Path(path).suffix.lower() in DECODED_ELSEWHERE:
            return _Decoded(path), None
        if in_order:  # with the process id, because a forked process would share the position in the file
            key = os.getpid(), stamp(Path(path))
        source = os.fsencode(path)  # a path as text would have to be UTF-8
    else:
        path.seek(0)  # it is read once for each window
    if key is not None and getattr(_last, "key", None) == key:
        file, _last.key = _last.file, None
        return file, key
    try:
        file = soundfile.SoundFile(source)
    except Exception as error:
        raise _unreadable(path, error) from error
    if not 1000 <= file.samplerate <= 1_000_000:
        rate_hz = file.samplerate
        file.close()
        raise DataError(f"{path}: says {rate_hz} samples a second; give it its true rate")
    try:
        return mended(path, file), key
    except (soundfile.SoundFileError, OSError, ValueError) as error:  # mmap raises ValueError for an empty file
        raise _unreadable(path, error) from error


def _unreadable(path: Source, error: Exception) -> DataError:
    what = str(getattr(error, "error_string", error)).strip().rstrip(".") or "its data is cut off or damaged"
    return DataError(f"{path}: not a readable sound ({what}); convert it to WAV or FLAC")


class _Decoded(StandIn):
    """A file that torchcodec decodes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if Path(path).suffix.lower() == ".aac":  # FFmpeg guesses the length from the bit rate, some percent off
            what = "a bare AAC stream does not state its length; put it into a file that does"
            raise DataError(f"{path}: {what}: ffmpeg -i NAME.aac -c copy NAME.m4a")
        try:
            from torchcodec.decoders import AudioDecoder  # type: ignore[import-not-found]

            self._decoder = AudioDecoder(str(path))
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            suffix = Path(path).suffix
            raise DataError(
                f"{path}: {suffix} needs torchcodec and FFmpeg, which are not installed or fail; install them, "
                "or convert it to FLAC"
            ) from error
        facts: Any = self._decoder.metadata
        self.samplerate, self.channels, self._begin = facts.sample_rate, facts.num_channels, facts.begin_stream_seconds
        self.frames = round(facts.duration_seconds * self.samplerate)
        self._path = path

    def read(self, count: int, **_: Any) -> np.ndarray:
        """The next frames (frames, channels); FFmpeg decodes no others."""
        stop = min(self._at + count, self.frames)
        if stop <= self._at:
            return np.zeros((0, self.channels), np.float32)
        times = (self._begin + frame / self.samplerate for frame in (self._at, stop))
        try:
            block = self._decoder.get_samples_played_in_range(*times).data.T.numpy()[: stop - self._at]
        except (RuntimeError, ValueError) as error:
            raise DataError(f"{self._path}: cannot be decoded ({str(error).splitlines()[0]}); copy it again") from error
        self._at += len(block)
        return block


@lru_cache(maxsize=64)
def _resampler(from_hz: float, to_hz: int) -> nn.Module:
    """The resampler for a pair of rates, made once.

    A ratio of large numbers is replaced by a near one, because the filter of the exact ratio would take minutes and
    gigabytes: 16001 Hz is taken for 16000 Hz, an inaudible error of 6e-5. The largest error is 3e-4, and
    ``change_rate`` prevents it from adding up.
    """
    exact = Fraction(to_hz) / Fraction(from_hz)
    ratio = exact.limit_denominator(2000) if exact * 2000 >= 1 else Fraction(1, round(1 / exact))
    return Resample(ratio.denominator, ratio.numerator)


def change_rate(waveform: Float32[Tensor, "*channels s"], from_hz: float, to_hz: int) -> Float32[Tensor, "*channels t"]:
    """Resample, if the rates differ.

    If a near ratio would shift the end by more than 10 ms, single samples are dropped or repeated, at equal distances.
    """
    if from_hz == to_hz:
        return waveform
    resampled = _resampler(from_hz, to_hz)(waveform)
    missing = round(waveform.shape[-1] * to_hz / from_hz) - resampled.shape[-1]
    if abs(missing) <= to_hz / 100:
        return resampled
    *pieces, last = resampled.tensor_split(abs(missing) + 1, dim=-1)
    changed = [torch.cat([piece, piece[..., -1:]], -1) if missing > 0 else piece[..., :-1] for piece in pieces]
    return torch.cat([*changed, last], dim=-1)


def too_few_channels(number: int, channels: Channels) -> str:
    """The error, with its remedy, of a file of this number of channels from which others are to be read; else ""."""
    if isinstance(channels, str):
        return ""
    most = max([channels] if isinstance(channels, int) else channels)
    has = "has one channel" if number == 1 else f"has {number} channels"
    return f"{has}, and data.channels asks for channel {most}; leave it out, or choose others" if number < most else ""


def _picked(frames: np.ndarray, channels: Channels) -> np.ndarray:
    """The chosen channels (n, chosen) of frames (n, channels); (n,) if it is one."""
    if channels == "mean":
        return _averaged(frames)
    if channels != "all":
        frames = frames[:, [number - 1 for number in ([channels] if isinstance(channels, int) else channels)]]
    return frames[:, 0].copy() if frames.shape[1] == 1 else frames


def _waveform(frames: np.ndarray) -> Float32[Tensor, "*channels n"]:
    """The waveform (n,) or (channels, n) of frames (n,) or (n, channels)."""
    return torch.from_numpy(np.ascontiguousarray(frames.T))


def _averaged(frames: np.ndarray) -> np.ndarray:
    return frames[:, 0].copy() if frames.shape[1] == 1 else frames.mean(axis=1)


def _peak(path: Source, frames: np.ndarray) -> float:
    peak = float(np.abs(frames).max())
    if not np.isfinite(peak):
        raise ValuesError(path, "holds values that are not finite", "write it again")
    if peak > _LOUDEST:
        what = f"values up to {peak:g}, beyond full scale 1"
        raise ValuesError(path, what, "divide by full scale, such as 32768, or write 16 bits")
    return peak


def contradiction(header: str) -> str:
    """How a header contradicts its file, according to libsndfile's log; empty if it does not."""
    for chunk, declared, actual in re.findall(r"(\w[\w ]*?) *: (\d+) \(should be (\d+)\)", header):
        missing = int(declared) - int(actual)
        # many writers declare 8 bytes too many for RIFF, the file; for W64 and RF64 no other line shows a truncation
        least = 0 if chunk in _OF_THE_SOUND else max(8, _MISSING * int(declared))
        is_judged = chunk in _OF_THE_SOUND | _OF_THE_FILE
        if is_judged and missing > least and int(declared) < 2**31:  # a recorder that streams declares 2**32 - 1
            return f"cut off, {actual} of {declared} bytes are there"
    bits = re.search(r"WAVE_FORMAT_PCM.*?Bit Width\s+: (\d+)", header, re.DOTALL)
    if bits and int(bits[1]) % 8:
        return f"says {bits[1]} bits a sample, which no player writes"
    return ""
