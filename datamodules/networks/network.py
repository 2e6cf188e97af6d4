"""The base of frozen networks: from one sound or image to tokens, in windows or tiles of the network's size."""

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from datamodules.cache import sha256_of
from datamodules.errors import DataError, require
from datamodules.networks._session import Form, Session, SettingError, form_of, vectors
from datamodules.networks._values import Values, checked_numbers
from datamodules.windows import starts_of_windows

_VERSION = 1  # increased when the tokens change
_BATCH = 16  # windows or tiles at once


class Network(ABC):
    """A frozen network. It is called with one input and returns its tokens.

    A sound (samples,) becomes windows of the network's length; the last one is filled with zeros. An image (c, h, w)
    becomes tiles of the network's size; the last ones of a row and of a column end with the image, and an image that is
    smaller than a tile is filled with zeros. One vector of each is a token.

    The file is opened when it is first needed, in each process again. What is not given is read from the file.

    Args:
        output: The tensor to take, by its name; if absent, the only output.
        rate_hz: Samples per second of its sounds.
        window_seconds: The length of its windows, if it takes sounds of any length.
        hop_seconds: Seconds from the start of one window to the start of the next; if absent, the window.
        size: Height and width of its tiles, if it takes images of any size.
        value_range: The numbers for the lowest and the highest value of an input, such as [0, 1]: for -1 and 1 in
            sounds, for 0 and 255 in images.
        mean: What is subtracted then, for each channel.
        std: By what the difference is divided, for each channel.
        sha256: The digest of its file, to refuse another one; it is set once the file was opened.

    Attributes:
        key: The key of this network in flags, for messages.
    """

    key = "data.network"
    file: str | None = None
    _file_argument = "file"  # the argument with the path of the file

    def __init__(
        self,
        output: str | None = None,
        rate_hz: int | None = None,
        window_seconds: float | None = None,
        hop_seconds: float | None = None,
        size: list[int] | None = None,
        value_range: list[float] | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        sha256: str | None = None,
    ) -> None:
        require(rate_hz is None or rate_hz > 0, "rate_hz", "positive", rate_hz, "48000 is usual")
        for name, seconds in (("window_seconds", window_seconds), ("hop_seconds", hop_seconds)):
            is_length = seconds is None or 0 < seconds < math.inf
            require(is_length, name, "a positive number of seconds", seconds, "3 is usual")
        is_size = size is None or (len(size) == 2 and min(size) >= 1)
        require(is_size, "size", "height and width", size, "[224, 224] is usual")
        is_range = value_range is None or (len(value_range) == 2 and value_range[0] < value_range[1])
        require(is_range, "value_range", "two numbers, the lower first", value_range, "[0, 1] is usual")
        require(std is None or min(std, default=0) > 0, "std", "positive numbers", std, "[0.5, 0.5, 0.5] is usual")
        self.output, self._rate_hz, self.window_seconds, self.hop_seconds = output, rate_hz, window_seconds, hop_seconds
        self._size, self.value_range, self.mean, self.std = size, value_range, mean, std
        self.sha256 = sha256
        self._start()

    # What a subclass defines

    @abstractmethod
    def _open(self) -> Session:
        """Open the file of the network.

        Raises:
            DataError: If it cannot be opened.
            SettingError: If it is not what the arguments say.
        """

    # What it takes and gives

    @property
    def kind(self) -> Literal["sounds", "images"]:
        return self._form.kind

    @property
    def num_features(self) -> int:
        """The numbers of a token, without its coordinates."""
        return self._num_features

    @property
    def num_coordinates(self) -> int:
        """The coordinates of a token, which are its last numbers: 2 for images, x and y of its centre in pixels."""
        return 2 if self.kind == "images" else 0

    @property
    def rate_hz(self) -> int | None:
        """Samples per second of the sounds that it takes; None for images."""
        if self.kind == "images":
            return None
        rate_hz = self._needed("rate_hz", self._rate_hz, "48000 for sounds of 48 kHz")
        (rate_hz,) = self._numbers("rate_hz", [rate_hz])
        return round(rate_hz)

    @property
    def token_seconds(self) -> float | None:
        """Seconds from one token to the next; None for images."""
        return None if self.rate_hz is None else self._hop / self.rate_hz

    @property
    def window(self) -> int:
        """The samples of a window."""
        assert self.rate_hz is not None
        if self._form.sides[0] is not None:
            return self._form.sides[0]
        (seconds,) = self._numbers(
            "window_seconds", [self._needed("window_seconds", self.window_seconds, "3 is usual")]
        )
        return max(round(seconds * self.rate_hz), 1)

    @property
    def channels(self) -> int:
        """The channels of the images that it takes. One of grey is repeated for a network of colours."""
        return self._form.channels

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of a tile."""
        given = self._size or [None, None]
        sides = [own or asked for own, asked in zip(self._form.sides, given, strict=True)]
        if None in sides:
            raise self._refusal("size", f"is not in {self._name}; give it, [224, 224] for images of 224 x 224 pixels")
        return sides[0], sides[1]  # type: ignore[return-value]

    @property
    def class_names(self) -> list[str] | None:
        """The names of the classes that the file states; None if it states none."""
        names = self._session().stated.get("class_names")
        return [str(name) for name in names] if isinstance(names, list) else None

    def num_tokens(self, size: int | Sequence[int]) -> int:
        """The number of tokens of an input, without making them.

        Args:
            size: The samples of a sound at `rate_hz`, or the height and width of an image.
        """
        if self.kind == "sounds":
            assert isinstance(size, int)
            return 1 + max(math.ceil((size - self.window) / self._hop), 0)
        assert not isinstance(size, int)
        return math.prod(len(starts) for starts in self._tiles(*size))

    @property
    def identity(self) -> str:
        """A text that changes when the tokens of an input might change: the digest of the file, and all settings."""
        settings = {name: value for name, value in sorted(vars(self).items()) if _is_setting(name)}
        return f"{type(self).__name__} {_VERSION} {self.digest} {settings}"

    @cached_property
    def digest(self) -> str:
        """The digest of the file.

        Raises:
            DataError: If there is no such file, or if it is not the one of `sha256`.
        """
        digest = self._digest()
        if self.sha256 is not None and self.sha256 != digest:
            what = f"{self._name} is another network than the model was trained with ({digest[:12]})"
            raise self._refusal(self._file_argument, f"{what}; give the file of {self.sha256[:12]}")
        self.sha256 = digest
        return digest

    # Tokens

    def mean_of(self, values: Tensor) -> Float[Tensor, " f"]:
        """The mean token of one sound or image, without coordinates."""
        return self(values)[:, : self.num_features].mean(0)

    def __call__(self, values: Tensor) -> Float[Tensor, "n f_and_p"]:
        """The tokens of one sound, float32 (samples,) at `rate_hz`, or of one image, uint8 (c, h, w).

        Raises:
            DataError: If it is an input of another kind.
        """
        if self.kind == "sounds":
            is_sound = values.ndim == 1 and values.is_floating_point()
            if not is_sound:
                self._refuse(values)
            return self._of_sound(values)
        is_image = values.ndim == 3 and values.dtype == torch.uint8 and values.shape[0] in (1, self.channels)
        if not is_image:
            self._refuse(values)
        return self._of_image(values.expand(self.channels, -1, -1))

    def _of_sound(self, waveform: Tensor) -> Tensor:
        number = self.num_tokens(len(waveform))
        filled = pad(waveform, (0, (number - 1) * self._hop + self.window - len(waveform)))
        windows = filled.unfold(0, self.window, self._hop)
        return self._run([*windows])

    def _of_image(self, image: Tensor) -> Tensor:
        height, width = self.size
        rows, columns = self._tiles(*image.shape[1:])
        filled = pad(image, (0, max(width - image.shape[2], 0), 0, max(height - image.shape[1], 0)))
        corners = [(top, left) for top in rows for left in columns]
        tiles = [filled[:, top : top + height, left : left + width] for top, left in corners]
        centres = [[left + width / 2, top + height / 2] for top, left in corners]
        return torch.cat([self._run(tiles), torch.tensor(centres)], dim=1)

    def _tiles(self, height: int, width: int) -> tuple[list[int], list[int]]:
        """The upper edges of the rows of tiles, and the left edges of the columns."""
        edges = [
            [round(start) for start in starts_of_windows(length, side, side, 0)]
            for length, side in zip((height, width), self.size, strict=True)
        ]
        return edges[0], edges[1]

    def _run(self, parts: list[Tensor]) -> Float[Tensor, "n f"]:
        """The vector of each window or tile."""
        most = self._form.batch or _BATCH
        with self._naming():
            return torch.cat([self._vectors(parts[at : at + most]) for at in range(0, len(parts), most)])

    def _vectors(self, parts: list[Tensor]) -> Tensor:
        form, session = self._form, self._session()
        inputs = self._values(torch.stack(parts))
        least = max(form.batch or 1, session.fewest)
        if len(parts) < least:  # only what was asked for is returned
            inputs = torch.cat([inputs, inputs[-1:].expand(least - len(parts), *inputs.shape[1:])])
        batch = inputs.reshape(inputs.shape[1:]) if not form.has_batch else inputs
        if form.has_batch and form.kind == "sounds" and len(session.input_shape) == 3:
            batch = batch[:, None]
        with self._lock, torch.inference_mode():
            outputs = session.run((batch.movedim(1, -1) if form.is_channels_last else batch).contiguous())
        if not form.has_batch and (outputs.ndim == 1 or len(outputs) != 1):
            outputs = outputs[None]
        return vectors(outputs, len(inputs))[: len(parts)].float().clone()

    # The open network

    def _start(self) -> None:
        self._lock, self._opened, self._process = threading.RLock(), None, os.getpid()

    def _session(self) -> Session:
        if self._process != os.getpid():  # the threads and locks of a library do not survive a fork
            self._start()
        with self._lock:
            if self._opened is None:
                with self._naming():
                    assert self.digest
                    self._opened = self._open()
            return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _OF_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def _path(self) -> Path:
        assert self.file is not None
        path = Path(self.file).expanduser()
        if not path.is_file():
            what = f"{self.key}.{self._file_argument}: {path}: no such file"
            raise DataError(f"{what}; give the file of the network")
        return path

    def _digest(self) -> str:
        return sha256_of(self._path())

    @property
    def _name(self) -> str:
        return Path(self.file or "").name

    @cached_property
    def _form(self) -> Form:
        with self._naming():
            return form_of(self._session().input_shape)

    @cached_property
    def _num_features(self) -> int:
        shape = self._session().output_shape[1 if self._form.has_batch else 0 :]
        if shape and None not in shape and sum(size != 1 for size in shape) <= 1:
            return math.prod(shape)  # type: ignore[arg-type]
        sides = (self.window,) if self.kind == "sounds" else (self.channels, *self.size)
        dtype = torch.float32 if self.kind == "sounds" else torch.uint8
        return self._run([torch.zeros(sides, dtype=dtype)]).shape[1]

    @property
    def _hop(self) -> int:
        """Samples from the start of one window to that of the next."""
        if self.hop_seconds is None:
            return self.window
        assert self.rate_hz is not None
        hop = round(self.hop_seconds * self.rate_hz)
        if not 1 <= hop <= self.window:
            most = self.window / self.rate_hz
            raise self._refusal(
                "hop_seconds", f"must be in 0..{most:g} s, the window, got {self.hop_seconds:g}; lower it"
            )
        return hop

    @cached_property
    def _values(self) -> Values:
        stated, form = self._session().stated, self._form
        of = {
            name: self._numbers(name, value)
            for name in ("value_range", "mean", "std")
            if (value := getattr(self, name) or stated.get(name)) is not None
        }
        is_scaled = form.kind == "images" and self._session().dtype.is_floating_point
        if is_scaled and not {"value_range", "mean"} & {*of}:
            self._needed(
                "value_range", None, "[0, 1], [-1, 1] or [0, 255]; and mean and std, if it was trained with them"
            )
        return Values(form.kind, self._session().dtype, form.channels, **of)

    def _needed(self, name: str, given: Any, remedy: str) -> Any:
        value = self._session().stated.get(name) if given is None else given
        if value is None:
            raise self._refusal(name, f"is not in {self._name}; give it, {remedy}")
        return value

    def _numbers(self, name: str, value: Any) -> list[float]:
        with self._naming():
            return checked_numbers(name, value, self._form.channels)

    def _refuse(self, values: Tensor) -> NoReturn:
        is_image = self.kind == "images"
        takes = f"images of {self.channels} channels, uint8 (c, h, w)" if is_image else "sounds, float (samples)"
        got = f"{str(values.dtype).removeprefix('torch.')} {tuple(values.shape)}"
        error = DataError(f"{self.key}: {self._name} takes {takes}, got {got}; choose a network for such inputs")
        error.exit_code = 2
        raise error

    def _refusal(self, argument: str, what: str) -> DataError:
        error = DataError(f"{self.key}.{argument}: {what}")
        error.exit_code = 2  # a setting is wrong, not the data
        return error

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Give errors about an argument its key."""
        try:
            yield
        except SettingError as error:
            raise self._refusal(error.argument, error.what) from error


def refuse_other_inputs(network: Any, kind: str, data: Any) -> None:
    """Check that a network, or longseq's Trained, takes inputs of the kind that a data module has.

    Raises:
        DataError: If it takes others.
    """
    if network.kind != kind:
        what = f"{type(network).__name__} takes {network.kind}, and {type(data).__name__} has {kind}"
        raise DataError(f"{network.key}: {what}; choose a network for {kind}")


_OF_PROCESS = frozenset({"_lock", "_opened", "_process"})
_SETTINGS = frozenset({"_rate_hz", "_size"})  # settings whose names without the underscore are of what they come to
_NO_SETTINGS = frozenset({"file", "weights", "sha256", "digest", "key"})  # the digest tells what the file contains


def _is_setting(name: str) -> bool:
    return name in _SETTINGS or not (name.startswith("_") or name in _NO_SETTINGS)
