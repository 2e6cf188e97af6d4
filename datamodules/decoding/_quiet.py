"""What C decoders write to the standard error: left out, or printed with the name of the file."""

import ctypes
import fcntl
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from datamodules.decoding.packed import Source
from datamodules.errors import say

# After a seek in an MP3, libmpg123 lacks bits of earlier frames and says so; sound_files discards these frames.
# Its messages on garbage between frames are not needed either, and a truncated file is detected by its length.
_NOISE = re.compile(rb"\[src/libmpg123/|Note: |Warning: ")

# C's stderr is a variable, a pointer to a FILE. While files are read, it points to another FILE, in memory. File
# descriptor 2 does not change, so the output of Python, other threads and other processes is not affected.
_libc: Any = ctypes.CDLL(None)
_lock = threading.Lock()
_inside: list[Source] = []  # the files that all threads read now


class _Memory:
    """An unbuffered C FILE in memory. It is never closed, because another thread may still write to it."""

    def __init__(self) -> None:
        self._descriptor, self._seen = os.memfd_create("stderr"), 0
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, os.O_APPEND)
        _libc.fdopen.restype, _libc.fdopen.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_char_p]
        _libc.setvbuf.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        self._file = _libc.fdopen(self._descriptor, b"a")
        _libc.setvbuf(self._file, None, 2, 0)  # _IONBF
        self._pointer = ctypes.c_void_p.in_dll(_libc, "stderr")
        self._before = self._pointer.value

    def begin(self) -> None:
        self._pointer.value = self._file

    def restore(self) -> None:
        self._pointer.value = self._before

    def end(self) -> None:
        self.restore()
        os.ftruncate(self._descriptor, 0)
        self._seen = 0

    def written(self) -> bytes:
        """The bytes that were written since the last call."""
        size = os.fstat(self._descriptor).st_size
        content = os.pread(self._descriptor, size - self._seen, self._seen) if size > self._seen else b""
        self._seen = size
        return content


_has_glibc = hasattr(_libc, "gnu_get_libc_version")  # in other C libraries, stderr may be a constant
_memory: _Memory | None = None


@contextmanager
def without_noise(path: Source) -> Iterator[None]:
    """Suppress what libmpg123 writes to the standard error while a file is read.

    The messages of other C libraries, such as libtiff's on a damaged image, become one line with the name of the file,
    or with the names of all files that were read at that time.
    """
    global _memory
    if not _has_glibc:
        yield
        return
    with _lock:
        _memory = memory = _memory or _Memory()
        if not _inside:
            memory.begin()
        _inside.append(path)
    try:
        yield
    finally:
        with _lock:
            content, names = memory.written(), dict.fromkeys(map(str, _inside))
            if path in _inside:  # it is not if the process was forked meanwhile
                _inside.remove(path)
            if not _inside:
                memory.end()
        lines = [line for line in content.splitlines() if line.strip() and not _NOISE.match(line)]
        if lines:
            more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            say(f"{' or '.join(names)}: {lines[0].decode(errors='backslashreplace')}{more}")


def _after_fork() -> None:
    """A child process uses its own standard error, and does not read the files of its parent's other threads."""
    global _memory, _lock
    if _memory is not None:
        _memory.restore()
    _memory, _lock = None, threading.Lock()
    _inside.clear()


os.register_at_fork(after_in_child=_after_fork)
