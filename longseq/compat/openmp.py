"""libgomp, the OpenMP of torch's wheels for Linux: how long its threads spin before they sleep.

libgomp reads this from an environment variable when torch is imported, and has no call that changes it later. But a
thread spins 300,000 times only if the process has no more OpenMP threads than CPUs, and 100 times if it has more
(gomp_managed_threads and gomp_available_cpus in its config/linux/wait.h). Sleeping threads count too.
"""

import ctypes
import os
import threading
from pathlib import Path

import torch


def spin_briefly(until: threading.Event) -> None:
    """Make all libgomp threads of this process spin only briefly, until an event is set.

    The calling thread waits for the event. It starts a team with more threads than CPUs, which sleep; libgomp frees
    them when the calling thread ends.
    """
    library = _library()
    assert library is not None
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # each thread of the team calls free(NULL)
    library.GOMP_parallel(nothing, None, ctypes.c_uint(len(os.sched_getaffinity(0)) + 1), ctypes.c_uint(0))
    until.wait()


def has_libgomp() -> bool:
    """Whether torch uses libgomp, or an OpenMP with its interface."""
    return hasattr(_library(), "GOMP_parallel")


def _library() -> ctypes.CDLL | None:
    """torch's library, which is linked with its libgomp. Loading libgomp by name could find another copy, such as
    scikit-learn's."""
    path = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    return ctypes.CDLL(str(path)) if path.exists() else None
