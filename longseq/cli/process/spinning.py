"""Let waiting OpenMP threads spin, except while other processes need their CPUs."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from longseq.compat.openmp import has_libgomp, spin_briefly

OF_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # if the user has set one of them, longseq changes nothing
_BUSY = 0.2  # seconds per second, summed over the threads, of waiting for a CPU; one other process causes 0.5


@contextmanager
def give_way(every: float = 1.0) -> Iterator[None]:
    """Let OpenMP threads spin only while no other process needs their CPUs.

    A spinning thread occupies a CPU, even if the thread that it waits for has none. With a few other processes,
    training can then take more than twenty times as long. If threads always slept instead, training alone on a machine
    would be slower. So a thread checks every second how long the process's threads have waited for a CPU.
    """
    if any(name in os.environ for name in OF_WAITING) or torch.get_num_threads() == 1 or not has_libgomp():
        yield
        return
    ended = threading.Event()
    threading.Thread(target=_watch, args=(ended, every), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch(ended: threading.Event, every: float) -> None:
    is_idle = threading.Event()
    is_idle.set()
    waited, at = seconds_without_cpu(), time.monotonic()
    while not ended.wait(every):
        before, since = waited, at
        waited, at = seconds_without_cpu(), time.monotonic()
        if waited - before < _BUSY * (at - since):
            is_idle.set()
        elif is_idle.is_set():
            is_idle = threading.Event()
            threading.Thread(target=spin_briefly, args=(is_idle,), daemon=True).start()
    is_idle.set()


def seconds_without_cpu() -> float:
    """How long the present threads of this process have been ready to run without a CPU, in seconds, summed."""
    total = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError, IndexError):  # the thread has ended, or the kernel does not count
            total += int((thread / "schedstat").read_text().split()[1])
    return total / 1e9
