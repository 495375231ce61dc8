"""Freed memory goes back to the system while a model is trained: glibc's malloc, set in the process. Torch-free.

glibc keeps what is freed for the next `malloc`: a block below its threshold is taken from the heap, and the threshold
grows with every large block that is freed, to 32 MiB. The heap is then fragmented by what a step frees between blocks
that are still held, and the process grows far beyond its tensors. With a low threshold, every block from that size on
is a mapping of its own, and is returned when it is freed. The price is the pages of every new mapping, so this is for
training alone: decoding holds as much either way, and takes a third longer; and a small process is exempt
(docs/plan-method.md has the figures).
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
"""Bytes from which on a block is a mapping of its own."""
TRIM = MIB
"""Free bytes at the end of the heap from which on they are given back."""
SMALL = 1536 * MIB
"""A process planned to stay below that has no use for it, and a third of its time would be the price."""
SMALL_THRESHOLD, SMALL_TRIM = 8 * MIB, 64 * MIB
_OWN_THRESHOLD, _OWN_TRIM = 32 * MIB, 64 * MIB
"""Where glibc's own, which cannot be switched on again, end up (DEFAULT_MMAP_THRESHOLD_MAX and twice that)."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def trim_heap() -> None:
    """What is free goes back to the system, this once; where `return_freed_memory` would do nothing, nothing."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


def keep_what_is_freed() -> None:
    """Inside `return_freed_memory`: blocks of a few MiB come from the heap again. For a process that stays `SMALL`."""
    if (library := _glibc()) is not None:
        _set(library, SMALL_THRESHOLD, SMALL_TRIM)


@contextmanager
def return_freed_memory() -> Iterator[bool]:
    """Inside, what is freed goes back to the system; afterwards all that is free does once, and then as glibc has it.

    Whether that was done: not where the C library is not glibc (musl, macOS, Windows), nor where the user has chosen
    how memory is allocated (`MALLOC_…`, `GLIBC_TUNABLES`, `LD_PRELOAD` of another malloc).
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
    """The C library; None where its malloc is not to be set."""
    if sys.platform != "linux" or env.malloc_chosen():
        return None
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  only glibc has it
        return library
    return None


def _set(library: Any, threshold: int, trim: int) -> bool:
    return bool(library.mallopt(_M_MMAP_THRESHOLD, threshold) and library.mallopt(_M_TRIM_THRESHOLD, trim))
