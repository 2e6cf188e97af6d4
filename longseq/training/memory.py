"""The memory that a step frees: the process keeps it for the next step, or returns it to the system."""

import ctypes
import mmap
from contextlib import suppress


def keep_freed_memory() -> None:
    """Let glibc keep the memory that a step frees for the next one.

    By default glibc returns every block above 32 MiB, such as a tensor of 65,536 tokens, to the system, which fills the
    next block with zeros page by page. A step of that length takes 2.4 s with this setting and 3.1 s without it.
    With it the process takes a quarter more memory (docs/performance.md). Other C libraries are not affected.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def give_back_freed_memory() -> None:
    """Let glibc return its free memory to the system, once."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def map_large_blocks() -> None:
    """Undo `keep_freed_memory`: from now on blocks above 1 MiB get mappings of their own, and glibc unmaps them when
    they are freed, so that a failed step leaves as much free memory as there was before it."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-4, 65536)  # M_MMAP_MAX, its default
        mallopt(-3, 2**20)  # M_MMAP_THRESHOLD


def room_for_code() -> mmap.mmap:
    """Reserved addresses without memory; close them when memory has run out. oneDNN maps code for each new shape. If
    addresses are limited (`ulimit -v`, some clusters), a failed step may leave none for this code."""
    return mmap.mmap(-1, 2**25)
