"""Let signals end a process while C++ code waits, such as for another rank: Python's handlers do not run meanwhile.

CPython writes the number of each signal into a socket at once. A handler that runs removes the numbers. A thread
watches the socket: a number that is still there after some seconds was not answered.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from select import POLLERR, POLLHUP, poll

import torch.distributed as dist

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PATIENCE = 5.0  # seconds until a signal counts as unanswered: C++ code may only be computing for a while


def _is_one_of_many(numbers: bytes) -> bool:
    """Whether C++ code may wait for another process. If not, it soon returns to Python, and a handler runs."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class _Watched:
    """What the thread needs to know. There is one for the process, because signals go to the process."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.lock = threading.RLock()  # a handler may interrupt another one
        self.patience = PATIENCE
        self.is_last: Callable[[bytes], bool] = _is_one_of_many
        self.clean_up: Callable[[], None] = lambda: None

    def unanswered(self) -> bytes:
        """The signals that end a process and that no handler has answered."""
        with self.lock:
            numbers = _received(self.socket, socket.MSG_PEEK)
            ending = bytes(number for number in numbers if number in ENDING)
            if not ending:
                _received(self.socket)  # drop others, such as SIGCHLD
            return ending


_watched = _Watched()


def _received(source: socket.socket | None, flags: int = 0) -> bytes:
    with suppress(OSError):  # nothing is there, or it was closed
        return source.recv(4096, flags | socket.MSG_DONTWAIT) if source is not None else b""
    return b""


def stopped_line(number: int) -> str:
    """The message for a command that a signal has stopped before anything was saved."""
    return f"{signal.Signals(number).name}: stopped; start it again (a training with --resume)"


def answer() -> None:
    """Every handler calls this first. It replaces a closed terminal by /dev/null, because printing would fail."""
    with _watched.lock:
        _received(_watched.socket)
    for number in (1, 2):
        stream = poll()
        stream.register(number, 0)
        if any(event & (POLLHUP | POLLERR) for _, event in stream.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)


@contextmanager
def watched() -> Iterator[None]:
    """End the process with 128 + n, and one line, if a handler does not answer signal n. The main thread calls this."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    _watched.socket = ours
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(ours,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        _watched.socket = None
        theirs.close()  # this ends the thread


def _watch(source: socket.socket) -> None:
    # a signal that nobody has answered stays in the socket: without the second condition the thread would spin for ever
    while source.recv(1, socket.MSG_PEEK) and _watched.socket is source:
        since = time.monotonic()
        while numbers := _watched.unanswered():
            if time.monotonic() - since > _watched.patience and _watched.is_last(numbers):
                _end(numbers[0])
            time.sleep(0.05)
    source.close()


def _end(number: int) -> None:
    with suppress(Exception):  # whatever fails, the process ends
        _watched.clean_up()
        sys.stdout.flush()
        print(stopped_line(number), file=sys.stderr, flush=True)
    os._exit(128 + number)


def _forget() -> None:
    """A forked process, such as a loader's worker, must not write into the socket of this one."""
    if _watched.socket is not None:
        _watched.socket, _watched.lock = None, threading.RLock()  # the thread may have held the old lock
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget)


@contextmanager
def ends_at_once(clean_up: Callable[[], None]) -> Iterator[None]:
    """While the process waits for others, let a signal end it at once, after a call of clean_up."""
    before = _watched.patience, _watched.is_last, _watched.clean_up
    _watched.patience, _watched.is_last, _watched.clean_up = 0.3, lambda numbers: True, clean_up
    try:
        yield
    finally:
        _watched.patience, _watched.is_last, _watched.clean_up = before


def end_only_if(is_last: Callable[[bytes], bool] | None) -> None:
    """Let unanswered signals end the process only if this function of their numbers is true; None: as usual."""
    _watched.is_last = is_last or _is_one_of_many
