"""Memory of the host that the program has no more use for."""

from __future__ import annotations

import ctypes
import linecache
import os

import torch

from torchstrategy import patches

__all__ = ["forget_sources", "keep_freed_memory"]

#: Of glibc's <malloc.h>: what to keep at the end of the heap, to fetch beyond a request, and to map by itself.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_WHAT = "the C library's mallopt: freed memory is kept"


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for the next training step on the CPU.

    By default the C library gives large blocks back to the kernel, and every step asks for its activations and
    gradients anew: the kernel then clears thousands of pages in each step. The process's memory stays at its peak
    instead. Call it at the start of the program; it changes the whole process. Strategies with ``concurrent=True`` and
    several replicas on the CPU call it, because threads that ask for memory at the same time wait for each other.

    Returns:
        Whether it worked: the C library must be glibc (Linux).

    Example:
        >>> worked = ts.utils.keep_freed_memory()
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    largest = 2**31 - 1
    worked = all(  # blocks of over 32 MiB, glibc's limit, are mapped by themselves all the same
        mallopt(option, value)
        for option, value in ((_M_TRIM_THRESHOLD, largest), (_M_TOP_PAD, 64 << 20), (_M_MMAP_THRESHOLD, 32 << 20))
    )
    if worked and not any(patch.what == _WHAT for patch in patches.active()):
        patches.note(_WHAT, "steps find the memory that the last one freed", patches.PROCESS)
    return worked


def forget_sources() -> None:
    """Drop the sources that torch's import has read and left in memory, 2 MB; a traceback reads what it shows again."""
    folder = os.path.dirname(torch.__file__)
    for name in [name for name in linecache.cache if name.startswith(folder)]:
        del linecache.cache[name]
