"""Sound files that libsndfile reads wrongly: their pieces are counted and joined, or the file is decoded whole.

- An MP3 without a Xing header declares no length; libsndfile guesses it from the first frame.
- Of joined MP3s and chained Ogg files, libsndfile reads the first piece only.
- A FLAC may declare that its length is unknown.
- A recorder that lost power leaves a WAV that declares no samples.
- GSM 6.10, G.721 and NMS ADPCM cannot seek.

All other files are read without changes.
"""

import hashlib
import io
import mmap
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from datamodules.cache import cached, stamp
from datamodules.decoding.packed import Packed, Source
from datamodules.errors import DataError, counted

_VERSION = 1  # increased when files are divided or counted in another way
_UNKNOWN = 2**62  # frames: libsndfile returns 2**63 - 1 if a file does not declare its length
_BLOCK = 2**18  # frames that are decoded at once to count them
# libsndfile guesses the length of an MP3 from its size; the largest frame has 60 times as many bytes as the smallest
_STRETCH = 1024
_SEQUENCE = 8  # this many consecutive frames of MP3 cannot be a coincidence
_FIRST_PAGE = b"OggS\0\x02"  # the first page of a stream in an Ogg file
_SYNC = re.compile(rb"\xff[\xe2-\xff]")  # the beginning of an MP3 frame
_KBPS = {  # bit rates, by (whether it is MPEG 1, not 2 or 2.5; layer)
    (True, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}

_Piece = tuple[int, int, int, int, int]  # of a file: first byte, byte after the last, frames, their rate, channels


def mended(path: Source, file: Any) -> Any:
    """The same file if libsndfile reads all of it, else a StandIn.

    Raises:
        DataError: If its pieces differ in rate or channels.
        soundfile.SoundFileError: If it cannot be decoded.
    """
    if not file.seekable():
        return _Decoded(path, file)
    if file.format in ("WAV", "WAVEX") and not file.frames:
        pieces = _of_dead_recorder(path)
    elif file.format == "MP3" and not _looks(_is_one_mp3, path):
        pieces = _counted(path, _of_mp3)
    elif file.format == "OGG" and not _looks(_is_one_ogg, path):
        pieces = _counted(path, _of_ogg)
    elif file.format == "FLAC" and file.frames > _UNKNOWN:
        pieces = _counted(path, _of_flac)
    else:
        return _Decoded(path, file) if file.frames > _UNKNOWN else file
    return _Joined(path, pieces, file) if pieces else file


class _InOrder(soundfile.SoundFile):
    """A file that is read from start to end. soundfile then does not seek after every read, which loses samples of MP3
    and fails for a FLAC of unknown length."""

    def seekable(self) -> bool:
        return False


class StandIn:
    """A substitute for a SoundFile, with the part of its interface that longseq uses."""

    extra_info = format = subtype = ""
    _at = 0  # the frame that is read next

    def seek(self, frame: int) -> None:
        self._at = frame

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        pass


class _Decoded(StandIn):
    """A file that cannot seek, decoded whole.

    Args:
        path: The file.
        file: The same file, opened by soundfile; it is closed here.
    """

    def __init__(self, path: Source, file: Any) -> None:
        self.samplerate, self.channels, self.format, self.extra_info = _facts(file)
        file.close()
        with _stream(path) as stream, _InOrder(stream) as whole:
            self._frames = np.concatenate([np.zeros((0, self.channels), np.float32), *_blocks(whole)])
        self.frames = len(self._frames)

    def read(self, count: int, **_: Any) -> np.ndarray:
        """The next frames: (frames, channels)."""
        block = self._frames[self._at : self._at + count]
        self._at += len(block)
        return block


class _Joined(StandIn):
    """A file of one or more pieces whose frames were counted.

    Args:
        path: The file.
        pieces: Its pieces.
        file: The same file, opened by soundfile; it is closed here.

    Raises:
        DataError: If the pieces differ in rate or channels.
    """

    def __init__(self, path: Source, pieces: list[_Piece], file: Any) -> None:
        self.samplerate, self.channels, self.format, _ = _facts(file)
        self.subtype = file.subtype
        file.close()
        for *_, rate_hz, channels in pieces:
            if (rate_hz, channels) != (self.samplerate, self.channels):
                first = f"{self.samplerate} samples a second and {counted(self.channels, 'channel')}"
                what = f"sounds follow each other, one of {first}, one of {rate_hz} and {channels}"
                raise DataError(f"{path}: {what}; convert each to a file of its own")
        self._path, self._pieces = path, pieces
        self._starts = np.cumsum([0, *(frames for _, _, frames, *_ in pieces)]).tolist()
        self.frames = self._starts[-1]
        self._open: tuple[int, Any, Any] | None = None  # the number of the open piece, its SoundFile, its _View

    def close(self) -> None:
        if self._open is not None:
            _, file, view = self._open
            file.close()
            view.close()
            self._open = None

    def read(self, count: int, dtype: str = "float32", **_: Any) -> np.ndarray:
        """The next frames: (frames, channels)."""
        blocks = [np.zeros((0, self.channels), dtype)]
        stop = min(self._at + count, self.frames)
        while self._at < stop:
            number = int(np.searchsorted(self._starts, self._at, side="right")) - 1
            file = self._piece(number)
            first = self._at - self._starts[number]
            if file.tell() != first:
                file.seek(first)
            block = file.read(min(stop, self._starts[number + 1]) - self._at, dtype=dtype, always_2d=True)
            if not len(block):
                break
            self._at += len(block)
            blocks.append(block)
        return np.concatenate(blocks)

    def _piece(self, number: int) -> Any:
        if self._open is not None and self._open[0] == number:
            return self._open[1]
        self.close()
        start, stop, frames, *_ = self._pieces[number]
        view: Any = _View(self._path, start, stop, self.format, frames)
        file = soundfile.SoundFile(view)
        self._open = number, file, view
        return file


class _View:
    """The bytes of a piece as an open file with a corrected header.

    Args:
        path: The file.
        start, stop: The first byte of the piece, and the byte after its last one.
        format: Its format, as soundfile names it.
        frames: The number of frames, for the header of a FLAC.
    """

    def __init__(self, path: Source, start: int, stop: int, format: str, frames: int = 0) -> None:
        self._stream, self._start, self._size, self._at = _stream(path), start, stop - start, 0
        self._declared = self._size * (_STRETCH if format == "MP3" else 1)
        self._patches: dict[int, bytes] = {}
        if format == "FLAC":
            with _content(path) as content:
                self._patches = _number_of_frames(content, frames)
        elif format in ("WAV", "WAVEX"):
            with _content(path) as content:
                self._patches = _size_of_data(content)
        self.reached = 0  # the byte after the last one that was read

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._declared)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._stream.close()

    def readinto(self, buffer: Any) -> int:
        whole = memoryview(buffer)
        if self._at > self._size:  # libmpg123 looks for a tag at the end of an MP3, which has the declared size
            count = max(min(len(whole), self._declared - self._at), 0)
            whole[:count] = bytes(count)
            self._at += count
            return count
        self._stream.seek(self._start + self._at)
        count = self._stream.readinto(whole[: self._size - self._at])
        for offset, content in self._patches.items():
            for place, byte in enumerate(content, offset - self._at):
                if 0 <= place < count:
                    whole[place] = byte
        self._at += count
        self.reached = max(self.reached, self._at)
        return count


def _facts(file: Any) -> tuple[int, int, str, str]:
    return file.samplerate, file.channels, file.format, file.extra_info


def _stream(path: Source) -> Any:
    return io.BytesIO(path.getvalue()) if isinstance(path, Packed) else open(path, "rb")


@contextmanager
def _content(path: Source) -> Iterator[Any]:
    """The bytes of a file. Only the bytes that are used are read from the disk."""
    if isinstance(path, Packed):
        yield path.getvalue()
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        yield content


def _blocks(file: Any) -> Iterator[np.ndarray]:
    while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
        yield block


def _counted(path: Source, divide: Callable[[Source], list[_Piece]]) -> list[_Piece]:
    """The pieces of a file. It is decoded to count their frames, and the result is cached."""
    name = hashlib.sha256(path.getvalue()).hexdigest() if isinstance(path, Packed) else stamp(Path(path))
    return cached("lengths", f"{divide.__name__} {_VERSION}\n{name}", partial(divide, path))


def _count(path: Source, start: int, stop: int, format: str) -> tuple[_Piece, int]:
    """A piece with its number of frames, and the byte of the file up to which its decoder reads."""
    view: Any = _View(path, start, stop, format)
    with closing(view), _InOrder(view) as file:
        return (start, stop, sum(map(len, _blocks(file))), file.samplerate, file.channels), start + view.reached


def _looks(is_one: Callable[[Any], bool], path: Source) -> bool:
    """The answer of `is_one` for the bytes of a file, which is remembered."""
    if isinstance(path, Packed):
        return is_one(path.getvalue())
    return _looked(is_one, os.fspath(path), stamp(Path(path)))


@lru_cache(maxsize=10_000)
def _looked(is_one: Callable[[Any], bool], path: str, _: str) -> bool:
    with _content(path) as content:
        return is_one(content)


# FLAC


def _of_flac(path: Source) -> list[_Piece]:
    with _stream(path) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        with _InOrder(stream) as file:
            return [(0, size, sum(map(len, _blocks(file))), file.samplerate, file.channels)]


def _number_of_frames(content: Any, frames: int) -> dict[int, bytes]:
    """The bytes to change, by offset, so that a header declares its frames: 36 bits of STREAMINFO, the first block."""
    at = content.find(b"fLaC") + 21
    return {at: ((content[at] >> 4 << 36) | frames).to_bytes(5, "big")}


# WAV


def _of_dead_recorder(path: Source) -> list[_Piece]:
    """One piece for a WAV that declares no samples, if samples follow and no other chunks; else none."""
    with _content(path) as content:
        size = len(content)
        if not _size_of_data(content):
            return []
    view: Any = _View(path, 0, size, "WAV")
    with closing(view), soundfile.SoundFile(view) as file:
        return [(0, size, file.frames, file.samplerate, file.channels)]


def _size_of_data(content: Any) -> dict[int, bytes]:
    """The bytes to change in the header of such a WAV, by offset; empty for other files."""
    chunks = dict(_chunks(content, 12)) if content[:4] == b"RIFF" else {}
    at = chunks.get(b"data")
    if at is None or content[at + 4 : at + 8] != bytes(4) or at + 8 == len(content):
        return {}
    *_, (_, last) = [(b"", 0), *_chunks(content, at + 8)]
    if last and last + 8 + int.from_bytes(content[last + 4 : last + 8], "little") in (len(content), len(content) - 1):
        return {}  # other chunks, up to the end of the file
    unknown = b"\xff" * 4  # the size in a stream: libsndfile then reads to the end
    return {4: unknown, at + 4: unknown}


def _chunks(content: Any, at: int) -> Iterator[tuple[bytes, int]]:
    """The names and offsets of consecutive chunks, up to the first one without a valid name."""
    while at + 8 <= len(content) and (name := bytes(content[at : at + 4])).isascii() and name.decode().isprintable():
        yield name, at
        size = int.from_bytes(content[at + 4 : at + 8], "little")
        at += 8 + size + size % 2


# Ogg


def _of_ogg(path: Source) -> list[_Piece]:
    with _content(path) as content:
        starts = [*_starts_of_ogg(content)]
        stops = [*starts[1:], len(content)]
    spans = zip(starts, stops, strict=True)
    return [_count(path, start, stop, "OGG")[0] for start, stop in spans]


def _is_one_ogg(content: Any) -> bool:
    return len([*_starts_of_ogg(content)]) < 2


def _starts_of_ogg(content: Any) -> Iterator[int]:
    """The offsets of the links of a chain. A link begins with the first pages of its streams."""
    at, behind = content.find(_FIRST_PAGE), -1
    while at >= 0 and at + 27 < len(content):
        if at != behind:
            yield at
        num_segments = content[at + 26]
        behind = at + 27 + num_segments + sum(content[at + 27 : at + 27 + num_segments])
        at = content.find(_FIRST_PAGE, at + 1)


# MP3


def _of_mp3(path: Source) -> list[_Piece]:
    pieces: list[_Piece] = []
    with _content(path) as content:
        at = 0
        while (first := _first_frame(content, at)) is not None:
            stop = _end_by_header(content, first)
            piece, reached = _count(path, first if pieces else 0, stop or len(content), "MP3")
            pieces.append(piece)
            at = max(stop or reached, first + 1)
    return [piece for piece in pieces if piece[2]]


def _is_one_mp3(content: Any) -> bool:
    """Whether a header declares the length, and no other MP3 follows."""
    first = _first_frame(content, 0)
    if first is None:
        return True
    stop = _end_by_header(content, first)
    return stop is not None and _first_frame(content, stop) is None


def _first_frame(content: Any, at: int) -> int | None:
    """The offset of the first frame from `at` on. Bytes that only look like a frame, as in a picture, are skipped."""
    for match in _SYNC.finditer(content, at):
        first = end = match.start()
        kind, number = None, 0
        while number < _SEQUENCE and (frame := _frame(content, end)) is not None and kind in (None, frame[0]):
            kind, number, end = frame[0], number + 1, end + frame[1]
        is_all = not at and number > 0 and (end >= len(content) or content[end : end + 3] == b"TAG")  # a short file
        if number == _SEQUENCE or is_all:
            return first
    return None


def _frame(content: Any, at: int) -> tuple[tuple[int, int, int], int] | None:
    """The kind of a frame (version, layer, rate) and its size in bytes, from its header; None if there is none."""
    if at + 4 > len(content) or content[at] != 0xFF or content[at + 1] < 0xE0:
        return None
    version, layer = content[at + 1] >> 3 & 3, 4 - (content[at + 1] >> 1 & 3)
    bits, rate, padding = content[at + 2] >> 4, content[at + 2] >> 2 & 3, content[at + 2] >> 1 & 1
    if version == 1 or layer == 4 or not 0 < bits < 15 or rate == 3:
        return None
    rate_hz = (44_100, 48_000, 32_000)[rate] // (4, 0, 2, 1)[version]
    bytes_a_second = _KBPS[version == 3, layer][bits - 1] * 125
    samples = 384 if layer == 1 else 576 if layer == 3 and version != 3 else 1152
    slot = 4 if layer == 1 else 1
    return (version, layer, rate), (samples * bytes_a_second // rate_hz // slot + padding) * slot


def _end_by_header(content: Any, first: int) -> int | None:
    """The end of an MP3 according to its Xing or Info header; None if that does not declare the number of frames."""
    is_first_version, is_mono = content[first + 1] >> 3 & 3 == 3, content[first + 3] >> 6 == 3
    at = first + 4 + ((17 if is_mono else 32) if is_first_version else (9 if is_mono else 17))
    flags = int.from_bytes(content[at + 4 : at + 8], "big")
    if content[at : at + 4] not in (b"Xing", b"Info") or not flags & 1:
        return None
    size = int.from_bytes(content[at + 12 : at + 16], "big") if flags & 2 else 0
    return min(first + size, len(content)) if size else len(content)
