"""What decoders write to the standard error by themselves, kept from the user."""

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

# After a seek in an MP3 libmpg123 lacks bits of the frames before, and says so; sound_files throws these frames away.
_NOISE = b"[src/libmpg123/"
_lock = threading.Lock()
_held: list[tuple[int, Any]] = []  # the standard error, and the file in its place, of all threads
_inside = 0


@contextmanager
def without_noise() -> Iterator[None]:
    """Leave out what libmpg123 writes to the standard error within the context. Other lines follow at its end."""
    global _inside
    with _lock:
        if not _inside:
            with suppress(OSError):  # it is closed
                _held.append((os.dup(2), tempfile.TemporaryFile()))  # noqa: SIM115 (closed by the last to leave)
                os.dup2(_held[0][1].fileno(), 2)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _held:
                stderr, file = _held.pop()
                os.dup2(stderr, 2)
                os.close(stderr)
                with file:
                    file.seek(0)
                    for line in file:
                        if not line.startswith(_NOISE):
                            os.write(2, line)
