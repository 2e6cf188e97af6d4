"""Reading bags of features from .npy, .npz, .safetensors, .pt and .h5 files, and detecting broken ones."""

import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from datamodules.errors import DataError

FEATURES = ("features", "feats", "embeddings")  # the names of an array of features, the first one that is there
COORDINATES = ("coords", "coordinates")
_TIMES = "times"
_STEP = "token_seconds"
_OTHERS = frozenset({*COORDINATES, _TIMES, _STEP})
_BLOCK = 2**22  # numbers that are read at once
_ALIKE = 1e-3  # a difference in the steps of times that rounding makes


class FeatureFile:
    """An open file of the features of one bag.

    Args:
        path: The file, for messages.
        arrays: Its arrays by their names; each has a shape, a dtype and slices.
        notes: What it says of itself, by name.
        key: The name of the array of features. If absent, it is one of FEATURES, or the only array.

    Attributes:
        num_tokens, num_features: The number of tokens, and of the features of each.
        has_coordinates: Whether the tokens have coordinates.
        token_seconds: The time from one token to the next, as stated, or as the equal steps of the tokens' times; None
            if tokens have no such times.

    Raises:
        DataError: If there are no features, no token, or arrays of other shapes and types.
    """

    def __init__(self, path: Path, arrays: Mapping[str, Any], notes: Mapping[str, Any], key: str | None) -> None:
        self.path = path
        name = self._name_of_features(arrays, key)
        self._features = self._rows(name, arrays[name])
        self.num_tokens, self.num_features = self._features.shape
        if not self.num_tokens:
            raise DataError(f"{path}: an empty bag, without any token; leave it out, or give --data.on_error skip")
        if not self.num_features:
            raise DataError(f"{path}: tokens without any number; write them again")
        name = next((name for name in COORDINATES if name in arrays), None)
        self._coordinates = None if name is None else self._rows(name, arrays[name])
        if self._coordinates is not None and self._coordinates.shape != (self.num_tokens, 2):
            wanted = f"{self.num_tokens} tokens need ({self.num_tokens}, 2), x and y of each"
            raise DataError(f"{path}: {name} of shape {self._coordinates.shape}; {wanted}")
        self.has_coordinates = self._coordinates is not None
        stated = _plain(arrays[_STEP]) if _STEP in arrays else notes.get(_STEP)
        self.token_seconds: float | None = None
        if stated is not None:
            self.token_seconds = self._seconds_of(stated)
        elif _TIMES in arrays:
            self.token_seconds = self._step_of(_plain(arrays[_TIMES]))

    def read(self, first: int, stop: int, has_coordinates: bool) -> Float32[Tensor, "n f_and_p"]:
        """The tokens first..stop, with their coordinates in the last two columns if these are asked for.

        Raises:
            DataError: If a number is not finite.
        """
        tokens = torch.empty(stop - first, self.num_features + 2 * has_coordinates)
        for block in self._blocks(first, stop):
            part = tokens[block.start - first : block.stop - first]
            self._features.copy_to(part[:, : self.num_features], block)
            if has_coordinates:
                assert self._coordinates is not None
                self._coordinates.copy_to(part[:, self.num_features :], block)
            if not (finite := part.isfinite().all(1)).all():
                at = block.start + int((~finite).nonzero()[0])
                raise DataError(f"{self.path}: NaN or infinity in token {at}; leave such tokens out")
        return tokens

    def examine(self) -> dict[str, Any]:
        """Read the whole file, and return facts about it as plain values.

        Raises:
            DataError: If a number is not finite.
        """
        extremes: list[Tensor] = []
        for block in self._blocks(0, self.num_tokens):
            tokens = self.read(block.start, block.stop, self.has_coordinates)
            if self.has_coordinates:
                extremes += tokens[:, self.num_features :].aminmax(dim=0)
        corners = torch.stack(extremes).aminmax(dim=0) if extremes else ()
        return {
            "tokens": self.num_tokens,
            "features": self.num_features,
            "coordinates": self.has_coordinates,
            "token_seconds": self.token_seconds,
            "corners": [torch.stack(corners).amin(0).tolist(), torch.stack(corners).amax(0).tolist()]
            if corners
            else [],
        }

    def _blocks(self, first: int, stop: int) -> Iterator[slice]:
        rows = max(_BLOCK // (self.num_features + 2), 1)
        return (slice(start, min(start + rows, stop)) for start in range(first, stop, rows))

    def _name_of_features(self, arrays: Mapping[str, Any], key: str | None) -> str:
        names = list(arrays)
        others = [name for name in names if name not in _OTHERS]
        wanted = [key] if key is not None and names != [""] else [*FEATURES, *(others if len(others) == 1 else [])]
        for name in (*wanted, ""):  # an array without a name is the only one
            if name in arrays:
                return name
        holds = ", ".join(names[:10]) or "no array"
        what = f"no array called {key}" if key is not None else "no features"
        raise DataError(f"{self.path}: {what}, it holds {holds}; name its array of features with --data.key")

    def _rows(self, name: str, array: Any) -> "_Rows":
        shape = tuple(array.shape)
        kind = _kind_of(array)
        if kind is not None:
            raise DataError(
                f"{self.path}: {name or 'the array'} holds {kind}; write numbers, such as floats of 16 bits"
            )
        rows = (1, *shape) if len(shape) == 1 else shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
        if len(rows) != 2:
            what = f"{name or 'an array'} of shape {shape}"
            raise DataError(f"{self.path}: {what}; write (tokens, features), or (features,) for one token")
        return _Rows(array, rows)

    def _seconds_of(self, stated: Any) -> float:
        try:
            seconds = float(stated)
        except (TypeError, ValueError):
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise DataError(f"{self.path}: {_STEP} {stated!r} is no positive number of seconds; write it again")
        return round(seconds, 6)

    def _step_of(self, times: np.ndarray) -> float | None:
        if len(times) != self.num_tokens or times.ndim > 2 or not np.isfinite(times).all():
            what = f"times of shape {times.shape} for {self.num_tokens} tokens, or not finite"
            raise DataError(f"{self.path}: {what}; write the start, or start and end, of each in seconds")
        if times.ndim == 2 and len(times) == 1:  # the start and the end of the only token
            times = times[0]
        starts = times if times.ndim == 1 else times[:, 0]
        steps = np.diff(starts)
        is_even = len(steps) and steps[0] > 0 and np.allclose(steps, steps[0], _ALIKE, 0)
        return round(float(starts[-1] - starts[0]) / len(steps), 6) if is_even else None


class _Rows:
    """An array in an open file, as rows.

    Args:
        array: (n, f), (1, n, f), or (f,) for a single row: of numpy, torch or h5py.
        shape: (n, f).
    """

    def __init__(self, array: Any, shape: tuple[int, int]) -> None:
        self.array, self.shape = array, shape

    def copy_to(self, part: Float32[Tensor, "n f"], rows: slice) -> None:
        """Copy these rows as float32."""
        at = (0, rows) if len(self.array.shape) == 3 else rows if len(self.array.shape) == 2 else slice(None)
        values = self.array[at]
        if isinstance(values, Tensor):
            part.copy_(values.reshape(part.shape))
        else:
            with np.errstate(over="ignore"):  # becomes infinity, which is refused
                part.numpy()[:] = values.reshape(part.shape)


def _kind_of(array: Any) -> str | None:
    """What an array holds if that is no numbers."""
    if isinstance(array, Tensor):
        is_number = not (array.is_complex() or array.dtype == torch.bool)
    else:
        is_number = getattr(array.dtype, "kind", "") in "fiu"
    return None if is_number else str(array.dtype)


def _plain(array: Any) -> np.ndarray:
    return np.asarray(array[()], dtype=np.float64)


_Opened = tuple[Mapping[str, Any], Mapping[str, Any]]  # the arrays of a file and its notes


@contextmanager
def _npy(path: Path) -> Iterator[_Opened]:
    yield {"": np.load(path, mmap_mode="r", allow_pickle=False)}, {}


@contextmanager
def _npz(path: Path) -> Iterator[_Opened]:
    with np.load(path, allow_pickle=False) as arrays:
        yield arrays, {}  # a mapping that reads an array when it is looked up


@contextmanager
def _safetensors(path: Path) -> Iterator[_Opened]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        yield {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


@contextmanager
def _pt(path: Path) -> Iterator[_Opened]:
    # only zip files, which torch writes since 1.6, can be mapped into memory
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    arrays = {"": content} if isinstance(content, Tensor) else content
    notes = {}
    if isinstance(arrays, dict) and isinstance(arrays.get(_STEP), int | float):
        notes = {_STEP: arrays.pop(_STEP)}
    if not isinstance(arrays, dict) or not all(isinstance(tensor, Tensor) for tensor in arrays.values()):
        raise DataError(f"{path}: holds more than tensors; save a tensor, or a dict of tensors")
    yield {str(name): tensor.detach() for name, tensor in arrays.items()}, notes


@contextmanager
def _h5(path: Path) -> Iterator[_Opened]:
    try:
        import h5py
    except ImportError as error:
        raise DataError(f"{path}: needs h5py; pip install 'longseq[hdf5]'") from error
    with h5py.File(path, "r") as file:
        inside = [name for name in map(str, file) if isinstance(file.get(name, getlink=True), h5py.HardLink)]
        sets: dict[str, Any] = {name: file[name] for name in inside if isinstance(file[name], h5py.Dataset)}
        for name, array in sets.items():
            if array.external or array.is_virtual:
                raise DataError(f"{path}: {name} lies in other files; write it into this one")
        notes = {
            name: value for array in (*sets.values(), file) for name, value in array.attrs.items() if name == _STEP
        }
        yield sets, notes


_READERS: dict[str, Callable[[Path], AbstractContextManager[_Opened]]] = {
    ".npy": _npy, ".npz": _npz, ".safetensors": _safetensors, ".pt": _pt, ".h5": _h5,
}  # fmt: skip
SUFFIXES = frozenset(_READERS)


@contextmanager
def opened(source: str | os.PathLike[str], key: str | None = None) -> Iterator[FeatureFile]:
    """A file of features, open for reading.

    Args:
        source: Its path.
        key: See FeatureFile.

    Raises:
        DataError: If it is missing, broken, of an unknown format or empty, or holds something else; also if it breaks
            while it is read.
    """
    path = Path(source)
    if path.suffix.lower() not in _READERS:
        raise DataError(f"{path}: not a file of features; give {', '.join(sorted(SUFFIXES))}")
    if not path.is_file():
        raise DataError(f"{path}: no such file; check the path")
    try:
        with _READERS[path.suffix.lower()](path) as (arrays, notes):
            yield FeatureFile(path, arrays, notes, key)
    except DataError:
        raise
    except PermissionError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    except Exception as error:  # hostile bytes raise errors of zipfile, numpy, h5py, safetensors, KeyError, ...
        what = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        if any(word in what.lower() for word in ("pickle", "python objects")):  # np.load and torch.load refuse them
            raise DataError(f"{path}: holds more than numbers, and is never unpickled; save arrays alone") from error
        raise DataError(f"{path}: cut off or damaged ({what[:200]}); write or copy it again") from error
