"""The memory that a step frees: the process keeps it for the next step, or returns it to the system."""

import ctypes
import mmap
import os
from contextlib import suppress

# glibc's own variables: if the user has set one of them, longseq changes nothing
_OF_USERS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # the names of malloc.h, with M_ before them


def keep_freed_memory() -> None:
    """Let glibc keep the memory that a step frees for the next one.

    By default glibc returns every block above 32 MiB, such as a tensor of 65,536 tokens, to the system, which fills the
    next block with zeros page by page. In bfloat16, shorter sequences lose time in this way too. A step of 65,536
    tokens takes 5.5 s of one core with this setting and 7.1 s without it (docs/performance.md). With it the process
    takes up to a quarter more memory, and keeps what is freed. A training by Lightning does this by itself on a CPU
    (``Classifier.setup``); a loop of your own calls it once, before the first step. Other C libraries are not affected,
    and nothing changes if MALLOC_MMAP_MAX_, MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ or GLIBC_TUNABLES is set.
    """
    if not any(name in os.environ for name in _OF_USERS):
        _set((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1))  # no block gets a mapping of its own, and the heap never shrinks


def stop_keeping_freed_memory() -> None:
    """Undo `keep_freed_memory`: free memory goes back to the system, and so do blocks above 32 MiB from now on."""
    if not any(name in os.environ for name in _OF_USERS):
        _set((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, 2**25), (_TRIM_THRESHOLD, 2**26))  # what glibc itself ends with
        give_back_freed_memory()


def give_back_freed_memory() -> None:
    """Let glibc return its free memory to the system, once."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def map_large_blocks() -> None:
    """Undo `keep_freed_memory`: from now on blocks above 1 MiB get mappings of their own, and glibc unmaps them when
    they are freed, so that a failed step leaves as much free memory as there was before it."""
    _set((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, 2**20))


def _set(*settings: tuple[int, int]) -> None:
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for name, value in settings:
            mallopt(name, value)


def room_for_code() -> mmap.mmap:
    """Reserved addresses without memory; close them when memory has run out. oneDNN maps code for each new shape. If
    addresses are limited (`ulimit -v`, some clusters), a failed step may leave none for this code."""
    return mmap.mmap(-1, 2**25)
