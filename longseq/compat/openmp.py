"""libgomp, the OpenMP of torch's wheels for Linux: how long its threads wait for each other without sleeping.

libgomp reads a variable of the environment for this when torch is imported, and has no call that changes it. But a
thread spins 300,000 times only where the process has at most as many threads of OpenMP as CPUs, and 100 times where it
has more (gomp_managed_threads and gomp_available_cpus in its config/linux/wait.h). Threads that sleep count too.
"""

import ctypes
import os
import threading
from pathlib import Path

import torch


def spin_briefly(until: threading.Event) -> None:
    """Let libgomp's threads spin briefly before they sleep, in all of this process, until an event comes.

    The calling thread waits for the event. It makes a team with more threads than there are CPUs. They sleep, and
    libgomp frees them when the calling thread ends.
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
    """What torch is linked with. By its name, libgomp could be another library's copy, such as scikit-learn's."""
    path = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    return ctypes.CDLL(str(path)) if path.exists() else None
