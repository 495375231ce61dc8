"""A model of glibc's malloc as SureFit configures it (`core.malloc`): the memory that a trace of allocations makes
resident on a CPU.

A block is searched for among the free ones of the heap, the smallest that fits first, then at the heap's end. Only
where there is none does its size decide: from the threshold on it is a mapping of its own, which is gone when it is
freed, below it the heap grows. Free memory inside the heap stays resident; free memory at its end is given back.

Source: malloc/malloc.c of glibc 2.36 (`_int_malloc`, `sysmalloc`, `_int_free`, `systrim`). One thread; every requested
page counts as touched, and Python's own allocations between the tensors are not modeled.
"""

from __future__ import annotations

import bisect

from surefit.core.malloc import THRESHOLD, TRIM
from surefit.core.units import KIB

PAGE = 4 * KIB
ALIGNMENT = 64
"""Alignment of a tensor's storage in bytes (`c10::alloc_cpu`)."""
HEADER = 16
TOP_PAD = 128 * KIB
"""Bytes that the heap grows by beyond a request, and keeps when it is trimmed (`DEFAULT_TOP_PAD`)."""

Block = tuple[int, int]
"""(address, size) in the heap; a mapping has the address -1."""
MAPPED = -1


class Malloc:
    """Malloc that allocates and frees by size.

    Args:
        threshold: bytes from which on a block may be a mapping of its own.
        trim: free bytes at the heap's end from which on they are given back.

    Attributes:
        resident: bytes that the process has of the system now.
        peak: maximum of `resident`; reset by the caller that measures a phase.

    Example: of three blocks of half a MiB, then 3 MiB, the first three are in the heap and the last is a mapping. Freed
    in order, the heap keeps the hole between the remaining blocks, and the mapping goes.

    >>> malloc = Malloc(threshold=1 << 20)
    >>> first, second, third = [malloc.allocate(1 << 19) for _ in range(3)]
    >>> large = malloc.allocate(3 << 20)
    >>> before = malloc.resident
    >>> malloc.release(large)
    >>> malloc.release(first)
    >>> (before - malloc.resident) // PAGE == (3 << 20) // PAGE + 1
    True
    """

    def __init__(self, threshold: int = THRESHOLD, trim: int = TRIM) -> None:
        self.threshold, self.trim = threshold, trim
        self.resident = self.peak = 0
        self._by_size: list[Block] = []  # (size, address)
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._top = self._end = 0

    def allocate(self, size: int) -> Block:
        """Return a block of at least `size` bytes."""
        needed = -(-(size + HEADER) // ALIGNMENT) * ALIGNMENT
        block = self._from_free(needed) or self._from_top(needed)
        if block is None and size >= self.threshold:
            block = MAPPED, -(-(needed + HEADER) // PAGE) * PAGE
            self._take(block[1])
        elif block is None:
            self._grow(needed)
            block = self._from_top(needed)
        assert block is not None
        return block

    def release(self, block: Block) -> None:
        """Free a block: a mapping is gone, another is joined with its free neighbors."""
        address, size = block
        if address == MAPPED:
            self._take(-size)
            return
        if size_before := self._ends.get(address):
            self._unlist(address - size_before, size_before)
            address, size = address - size_before, size + size_before
        if size_after := self._starts.get(address + size):
            self._unlist(address + size, size_after)
            size += size_after
        if address + size != self._top:
            self._list(address, size)
            return
        self._top = address
        if self._end - self._top > self.trim:
            kept = -(-(self._top + TOP_PAD) // PAGE) * PAGE
            self._take(kept - self._end)
            self._end = kept

    def _from_free(self, needed: int) -> Block | None:
        index = bisect.bisect_left(self._by_size, (needed, -1))
        if index == len(self._by_size):
            return None
        size, address = self._by_size[index]
        self._unlist(address, size)
        if size - needed < ALIGNMENT:
            return address, size
        self._list(address + needed, size - needed)
        return address, needed

    def _from_top(self, needed: int) -> Block | None:
        if self._end - self._top < needed:
            return None
        self._top += needed
        return self._top - needed, needed

    def _grow(self, needed: int) -> None:
        more = -(-(needed - (self._end - self._top) + TOP_PAD) // PAGE) * PAGE
        self._end += more
        self._take(more)

    def _take(self, more: int) -> None:
        self.resident += more
        self.peak = max(self.peak, self.resident)

    def _list(self, address: int, size: int) -> None:
        bisect.insort(self._by_size, (size, address))
        self._starts[address], self._ends[address + size] = size, size

    def _unlist(self, address: int, size: int) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, (size, address))]
        del self._starts[address], self._ends[address + size]
