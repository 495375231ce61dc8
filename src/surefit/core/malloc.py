"""Freed memory goes back to the system: glibc's malloc, set once, before torch allocates anything. Torch-free.

glibc keeps what is freed for the next `malloc`: a block below its threshold is cut out of the heap, and the threshold
grows with every large block that is freed, to 32 MiB. What a step frees then lies in pieces between what is still held,
and the process grows far beyond its tensors. With the threshold fixed, a block from there on is a mapping of its own,
and is gone when it is freed.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

from surefit.core import env
from surefit.core.units import MIB

THRESHOLD = MIB
"""Bytes from which on a block is a mapping of its own."""
TRIM = MIB
"""Free bytes at the top of the heap from which on they are given back."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def give_back_freed() -> bool:
    """Set it for this process, before torch is imported; whether that was done.

    Nothing happens where the C library is not glibc (musl, macOS, Windows), and where the user has set one of malloc's
    own variables (`MALLOC_…`, `GLIBC_TUNABLES`, `LD_PRELOAD` of another malloc): theirs counts.
    """
    if sys.platform != "linux" or env.malloc_chosen():
        return False
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  only glibc has it
        return bool(library.mallopt(_M_MMAP_THRESHOLD, THRESHOLD) and library.mallopt(_M_TRIM_THRESHOLD, TRIM))
    return False
