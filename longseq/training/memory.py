"""Memory that a step frees: kept for the next one, or given back to the system."""

import ctypes
from contextlib import suppress


def keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next one, and not give it back to the system.

    By default glibc gives back every block above 32 MiB, such as a tensor of 65,536 tokens, and the system fills the
    next block with zeros page by page. A step of that length takes 2.4 s with this setting and 3.1 s without; with it
    the process takes a quarter more memory (docs/performance.md). Other C libraries are left as they are.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block has a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def give_back_freed_memory() -> None:
    """Have glibc give its free memory back to the system, once."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
