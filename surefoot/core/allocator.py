"""The C allocator, told to keep what a training step frees, because the next step asks for the same again.

By default glibc returns large blocks to the kernel at once, and every step pays for fresh zeroed pages: 5 to 10 % of a step on a CPU
(`bench/kernels.py` prints both).
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep freed blocks of any size for this process; return whether the C library could be told."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl has no such knob
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST))
