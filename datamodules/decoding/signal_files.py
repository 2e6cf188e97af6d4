"""Reading signals with several channels: NumPy's arrays, HDF5, WFDB, EDF, CSV, and WAV or FLAC of any rate."""

import csv
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import soundfile

from datamodules.cache import sha256_of, sha256_of_text
from datamodules.decoding.sound_files import contradiction
from datamodules.errors import DataError

_ARRAYS = frozenset({".npy", ".npz", ".h5", ".hdf5"})
_EDF = threading.Lock()  # the library refuses to open a file twice, and keeps 64 files at most
# Names of what else a file of arrays may hold, as keys or as attributes.
_RATES, _NAMES, _UNITS = ("sample_rate_hz", "fs", "sampling_rate"), ("channel_names", "channels"), ("unit", "units")
_SIGNALS = ("signal", "signals", "data", "x", "X")  # the signal, if a file holds several arrays
_TIMES = frozenset({"time", "times", "t", "seconds", "time_s", "time (s)", "time [s]", "timestamp"})  # of a CSV
_UNEVEN = 0.01  # the largest deviation of a step of a time column, as a share of the step


@dataclass(frozen=True)
class Signal:
    """What a file says of its signal. All sequences have an element for each channel.

    Attributes:
        names: The names of the channels; empty if the file has none.
        units: Their units, or "".
        rates_hz: Samples per second; None where the file does not say.
        frames: The numbers of samples.
        read: Takes channels, counted from 0, the first sample and the one after the last; returns their values
            (channels, samples), NaN in gaps.
        is_array: Whether the first axis of an array is taken for the channels.
    """

    names: tuple[str, ...]
    units: tuple[str, ...]
    rates_hz: tuple[float | None, ...]
    frames: tuple[int, ...]
    read: Callable[[Sequence[int], int, int], np.ndarray]
    is_array: bool = False


@contextmanager
def opened_signal(path: str | os.PathLike[str]) -> Iterator[Signal]:
    """A signal in a file, whose values are read inside of the context.

    Arrays of .npy, .npz and .h5 are (channels, samples), or (samples,) for one channel.

    Raises:
        DataError: If the file is missing, broken or of an unknown format, or a library is missing.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder; give the files in it" if path.is_dir() else "no such file; check the path"
        raise DataError(f"{path}: {what}")
    try:
        with _OPENERS[path.suffix.lower()](path) as signal:
            if not signal.frames or not min(signal.frames):
                raise DataError(f"{path}: holds no signal; leave it out")
            yield signal
    except Exception as error:  # hostile bytes raise many kinds of errors in these libraries
        if hasattr(error, "exit_code"):  # a DataError, or a signal that stops the training
            raise
        what = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise DataError(f"{path}: not a readable signal ({what}); write it again") from error


def digest_of(path: Path) -> str:
    """A hash of a signal's content: for WFDB that of the header and of all files that it names."""
    if path.suffix.lower() != ".hea":
        return sha256_of(path)
    return sha256_of_text(sha256_of(path) + "".join(map(sha256_of, named_files(path))))


def named_files(path: Path) -> list[Path]:
    """The files that the header of WFDB names and that exist; none if the file is of another kind, or unreadable."""
    if path.suffix.lower() != ".hea" or not os.access(path, os.R_OK):
        return []
    words = (line.split() for line in path.read_text(errors="replace").splitlines() if not line.startswith("#"))
    # os.path, because Path.is_file raises an error for a name that is too long
    return [file for file in sorted({path.parent / line[0] for line in words if line} - {path}) if os.path.isfile(file)]


def _needed(path: Path, name: str) -> Any:
    """A library of the extra "signals".

    Raises:
        DataError: If it is not installed.
    """
    try:
        module: ModuleType = __import__(name)
    except ImportError as error:
        raise DataError(f"{path}: needs {name}; pip install 'longseq[signals]'") from error
    return module


@contextmanager
def _npy(path: Path) -> Iterator[Signal]:
    yield _of_array(path, np.load(path, mmap_mode="r", allow_pickle=False), {})


@contextmanager
def _npz(path: Path) -> Iterator[Signal]:
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    yield _of_arrays(path, arrays, {})


@contextmanager
def _hdf5(path: Path) -> Iterator[Signal]:
    h5py = _needed(path, "h5py")
    with h5py.File(path, "r") as file:
        arrays: dict[str, Any] = {}
        file.visititems(lambda name, item: arrays.update({name: item} if isinstance(item, h5py.Dataset) else {}))
        yield _of_arrays(path, arrays, file.attrs)


def _of_arrays(path: Path, arrays: Mapping[str, Any], attributes: Mapping[str, Any]) -> Signal:
    """The signal among the arrays of a file, with what the others and the attributes say of it."""
    last = {name.rpartition("/")[2]: name for name in arrays}
    notes = {key: arrays[last[key]] for key in (*_RATES, *_NAMES, *_UNITS) if key in last}
    others = [name for key, name in last.items() if key not in notes and arrays[name].ndim in (1, 2)]
    named = [last[key] for key in _SIGNALS if last.get(key) in others]
    chosen = others if len(others) == 1 else named[:1]
    if not chosen:
        held = ", ".join(sorted(arrays)[:5]) or "nothing"
        raise DataError(f"{path}: holds {held}; call the array (channels, samples) {_SIGNALS[0]}")
    same = [name for name in arrays if name.rpartition("/")[2] == chosen[0].rpartition("/")[2]]
    if len(same) > 1:
        raise DataError(f"{path}: holds {' and '.join(same[:2])}; write each signal to a file of its own")
    array = arrays[chosen[0]]
    return _of_array(path, array, {**attributes, **getattr(array, "attrs", {}), **notes})


def _of_array(path: Path, array: Any, notes: Mapping[str, Any]) -> Signal:
    if array.ndim not in (1, 2) or array.dtype.kind not in "fiub":
        what = f"holds {array.dtype} of the shape {tuple(array.shape)}"
        raise DataError(f"{path}: {what}; write numbers (channels, samples)")
    number, frames = (1, *array.shape) if array.ndim == 1 else array.shape

    def read(channels: Sequence[int], first: int, stop: int) -> np.ndarray:
        values = array[first:stop][None] if array.ndim == 1 else array[:, first:stop]
        return np.asarray(values)[list(channels)]

    rate = next((float(np.asarray(notes[key]).item()) for key in _RATES if key in notes), None)
    if rate is not None and not 0 <= rate <= 1_000_000:
        raise DataError(f"{path}: states a rate of {rate:g} Hz; write its samples per second, up to 1,000,000")
    names = next((_texts(notes[key]) for key in _NAMES if key in notes), ())
    units = next((_texts(notes[key]) for key in _UNITS if key in notes), ("",))
    if len(names) not in (0, number):
        raise DataError(f"{path}: names {len(names)} channels and holds {number}; arrays are (channels, samples)")
    units = units * number if len(units) == 1 else units
    return Signal(names, units, (rate,) * number, (frames,) * number, read, is_array=array.ndim == 2)


def _texts(value: Any) -> tuple[str, ...]:
    """A text or an array of texts."""
    texts = np.atleast_1d(np.asarray(value[()] if hasattr(value, "shape") else value)).ravel().tolist()
    return tuple(text.decode() if isinstance(text, bytes) else str(text) for text in texts)


@contextmanager
def _wfdb(path: Path) -> Iterator[Signal]:
    wfdb = _needed(path, "wfdb")
    name = os.path.abspath(path.with_suffix(""))
    header = wfdb.rdheader(name, rd_segments=True)
    segments = getattr(header, "segments", None) or [header]  # None where nothing was recorded
    part = next(segment for segment in segments if segment is not None)
    names, units = tuple(part.sig_name or ()), tuple(part.units or ())

    def read(channels: Sequence[int], first: int, stop: int) -> np.ndarray:
        return wfdb.rdrecord(name, first, stop, list(channels)).p_signal.T

    number = len(names)
    yield Signal(names, units, (float(header.fs),) * number, (int(header.sig_len),) * number, read)


@contextmanager
def _edf(path: Path) -> Iterator[Signal]:
    pyedflib = _needed(path, "pyedflib")
    with _EDF, pyedflib.EdfReader(str(path), pyedflib.DO_NOT_READ_ANNOTATIONS) as file:

        def read(channels: Sequence[int], first: int, stop: int) -> np.ndarray:
            return np.stack([file.readSignal(channel, first, stop - first) for channel in channels])

        number = range(file.signals_in_file)
        yield Signal(
            tuple(label.strip() for label in file.getSignalLabels()),
            tuple(file.getPhysicalDimension(channel).strip() for channel in number),
            tuple(float(rate) for rate in file.getSampleFrequencies()),
            tuple(int(count) for count in file.getNSamples()),
            read,
        )


@contextmanager
def _sound(path: Path) -> Iterator[Signal]:
    name: Any = os.fsencode(path)  # bytes, because text would have to be UTF-8
    with soundfile.SoundFile(name) as file:
        if what := contradiction(file.extra_info):
            raise DataError(f"{path}: {what}; record, copy or convert it again")

        def read(channels: Sequence[int], first: int, stop: int) -> np.ndarray:
            file.seek(first)
            return file.read(stop - first, dtype="float32", always_2d=True).T[list(channels)]

        number = file.channels
        yield Signal((), ("",) * number, (float(file.samplerate),) * number, (file.frames,) * number, read)


@contextmanager
def _csv(path: Path) -> Iterator[Signal]:
    """A column for each channel. Names in the first line are those of the channels. An empty cell is a gap."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        first = file.readline()
        file.seek(0)
        delimiter = max("\t;,", key=first.count)
        lines = list(csv.reader(file, delimiter=delimiter))
    while lines and not lines[-1]:
        lines.pop()
    is_single = max(map(len, lines), default=0) == 1  # then an empty line is an empty cell
    lines = [line or [""] for line in lines if line or is_single]
    names = tuple(name.strip() for name in lines.pop(0)) if lines and _is_of_names(lines) else ()
    if "" in names:
        what = f"column {names.index('') + 1} has no name, as pandas writes its index"
        raise DataError(f"{path}: {what}; write the table without the column (index=False), or name it")
    width = len(names or lines[0]) if lines else 0
    rows = []
    for number, line in enumerate(lines, start=1 + bool(names)):
        values = _numbers(line)
        if values is None or len(values) != width:
            raise DataError(f"{path}: line {number}: {delimiter.join(line)[:60]}; write {width} numbers")
        rows.append(values)
    columns = np.array(rows, np.float64).reshape(len(rows), width).T
    times = [place for place, name in enumerate(names) if name.lower() in _TIMES]
    rate = None
    if times:
        rate = _rate_of(path, columns[times[0]])
        columns = np.delete(columns, times[0], 0)
        names = tuple(name for place, name in enumerate(names) if place != times[0])
    count = len(columns)

    def read(channels: Sequence[int], first: int, stop: int) -> np.ndarray:
        return columns[list(channels), first:stop]

    yield Signal(names, ("",) * count, (rate,) * count, (columns.shape[1],) * count, read)


def _is_of_names(lines: Sequence[Sequence[str]]) -> bool:
    """Whether the first line has names. Names may be the numbers of columns, as pandas writes them, above samples that
    are no integers."""
    if _numbers(lines[0]) is None:
        return True
    numbers = [str(number) for number in range(len(lines[0]) + 1)]
    is_counted = len(lines[0]) > 1 and list(lines[0]) in (numbers[:-1], numbers[1:])
    return is_counted and len(lines) > 1 and not any(cell.strip().lstrip("+-").isdigit() for cell in lines[1])


def _numbers(cells: Sequence[str]) -> list[float] | None:
    """The numbers in the cells of a line; None if a cell is something else."""
    try:
        return [float(cell) if cell.strip() else np.nan for cell in cells]
    except ValueError:
        return None


def _rate_of(path: Path, times: np.ndarray) -> float:
    """The rate of samples at these times, in seconds.

    Raises:
        DataError: If the steps differ.
    """
    steps = np.diff(times)
    step = float(np.median(steps)) if len(steps) else 0.0
    if not step > 0 or not (np.abs(steps - step) <= _UNEVEN * step).all():
        raise DataError(f"{path}: the steps of its time column differ; resample it, or fill the lines that are missing")
    rate = (len(times) - 1) / float(times[-1] - times[0])
    return round(rate, 3) if abs(rate - round(rate)) > 1e-3 * rate else float(round(rate))


_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".npy": _npy, ".npz": _npz, ".h5": _hdf5, ".hdf5": _hdf5, ".hea": _wfdb, ".edf": _edf, ".bdf": _edf, ".csv": _csv,
    ".tsv": _csv, ".wav": _sound, ".flac": _sound,
}  # fmt: skip
SUFFIXES = frozenset(_OPENERS)
COMPANIONS = frozenset({".dat", ".atr"})  # files of WFDB that belong to a header
