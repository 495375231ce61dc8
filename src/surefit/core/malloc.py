"""Settings of glibc's malloc that return freed memory to the system while a model is trained. Torch-free.

glibc keeps freed memory for the next `malloc`: a block below its threshold comes from the heap, and the threshold grows
with every large block that is freed, to 32 MiB. The heap is then fragmented by the blocks that a step frees between
blocks that are still in use, and the process grows far beyond its tensors. With a low threshold, every block from that
size on is a mapping of its own, and is returned when it is freed. The price is the page faults of every new mapping, so
this is for training alone: decoding needs the same memory either way, and a third more time; and a small process is
exempt (docs/plan-method.md has the figures).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from surefit.core import env
from surefit.core.units import MIB

THRESHOLD = MIB
"""Smallest block, in bytes, that is a mapping of its own."""
TRIM = MIB
"""Free bytes at the end of the heap above which they are returned."""
SMALL = 1536 * MIB
"""A process planned to stay below this size gains nothing, and would lose a third of its time."""
SMALL_THRESHOLD, SMALL_TRIM = 8 * MIB, 64 * MIB
_OWN_THRESHOLD, _OWN_TRIM = 32 * MIB, 64 * MIB
"""Values that glibc's own dynamic thresholds, which cannot be switched on again, reach (DEFAULT_MMAP_THRESHOLD_MAX and
twice that).
"""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def trim_heap() -> None:
    """Return free heap memory to the system once; do nothing where `return_freed_memory` would do nothing."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


def keep_what_is_freed() -> None:
    """Allocate blocks of a few MiB from the heap again, inside `return_freed_memory`; for a process that stays
    `SMALL`.
    """
    if (library := _glibc()) is not None:
        _set(library, SMALL_THRESHOLD, SMALL_TRIM)


@contextmanager
def return_freed_memory() -> Iterator[bool]:
    """Return freed memory to the system inside the context; afterwards trim the heap once and restore glibc's
    thresholds.

    Yields whether that was done: not if the C library is not glibc (musl, macOS, Windows), nor if the user has
    configured the allocator (`MALLOC_…`, `GLIBC_TUNABLES`, `LD_PRELOAD` of another malloc).
    """
    library = _glibc()
    if library is None or not _set(library, THRESHOLD, TRIM):
        yield False
        return
    try:
        yield True
    finally:
        _set(library, _OWN_THRESHOLD, _OWN_TRIM)
        library.malloc_trim(0)


def _glibc() -> Any:
    """Return the C library; None where its malloc must not be configured."""
    if sys.platform != "linux" or env.malloc_chosen():
        return None
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  only glibc has it
        return library
    return None


def _set(library: Any, threshold: int, trim: int) -> bool:
    return bool(library.mallopt(_M_MMAP_THRESHOLD, threshold) and library.mallopt(_M_TRIM_THRESHOLD, trim))
