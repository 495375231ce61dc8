"""A model of PyTorch's caching allocator: the memory that a trace of allocations reserves on a GPU.

`nvidia-smi` shows, and the GPU runs out of, not the memory of the live tensors but the segments that the allocator took
from the driver to hold them. It rounds, splits, merges and never gives back on its own; this file does the same.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.11 to 2.13 (https://github.com/pytorch/pytorch). One stream; no
settings but `expandable_segments`.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from surefit.core.units import MIB

ROUNDING = 512
"""Unit in bytes of which every block is a multiple (kMinBlockSize)."""
SMALL = MIB
"""Largest allocation served from the small pool (kSmallSize)."""
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
"""Segment that the driver gives for a large allocation under `OWN_SEGMENT` (kLargeBuffer)."""
OWN_SEGMENT = 10 * MIB
"""Smallest allocation with a segment of its own size (kMinLargeAlloc), a multiple of `SMALL_SEGMENT`."""


SPACE = LARGE_SEGMENT << 36
"""Addresses that an expandable segment may grow into: more than is ever requested. torch sets aside 9/8 of the GPU's
memory, and begins another segment once that is used up."""


class _Pool:
    """Free blocks by size; `unmapped` are stretches of an expandable segment without memory, by address."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.free: list[tuple[int, int, _Block]] = []
        self.unmapped: list[_Block] = []


class _Block:
    """A stretch of a segment, in use or free, with memory (`mapped`) or without, linked to its neighbors."""

    __slots__ = ("address", "following", "free", "mapped", "pool", "preceding", "segment", "size")

    def __init__(self, address: int, size: int, pool: _Pool, segment: int) -> None:
        self.address, self.size, self.pool, self.segment = address, size, pool, segment
        self.free, self.mapped = False, True
        self.preceding: _Block | None = None
        self.following: _Block | None = None

    @property
    def key(self) -> tuple[int, int, _Block]:
        return self.size, self.address, self

    @property
    def reach(self) -> int:
        """Size that the block can grow to: its own with the stretch without memory behind it."""
        next_block = self.following
        return self.size + (next_block.size if next_block is not None and not next_block.mapped else 0)

    def __lt__(self, other: _Block) -> bool:
        return self.address < other.address

    def cut(self, size: int) -> _Block:
        """Keep `size` bytes; the remainder becomes the block after it, which is in no list yet."""
        remainder = _Block(self.address + size, self.size - size, self.pool, self.segment)
        remainder.mapped = self.mapped
        remainder.preceding, remainder.following = self, self.following
        if self.following is not None:
            self.following.preceding = remainder
        self.following, self.size = remainder, size
        return remainder


@dataclass
class AllocatorTotals:
    """Bytes, now and at their highest."""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0


class CachingAllocator:
    """Caching allocator that allocates and frees by size; `totals` counts the memory.

    Args:
        expandable: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`: one segment per pool that grows by pages.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.expandable = expandable
        self.totals = AllocatorTotals()
        self._small, self._large = _Pool(SMALL_SEGMENT), _Pool(LARGE_SEGMENT)
        self._segments: dict[int, int] = {}
        self._next_address = 0
        if expandable:
            for start, pool in ((0, self._small), (SPACE, self._large)):
                space = _Block(start, SPACE, pool, segment=start)
                space.mapped = False
                self._list(space)

    def allocate(self, size: int) -> _Block:
        """Return a block of at least `size` bytes: the smallest free one that fits, else new memory from the driver."""
        size = max(ROUNDING, -(-size // ROUNDING) * ROUNDING)
        pool = self._small if size <= SMALL else self._large
        block = self._take(pool, size) or self._grow(pool, size)
        self._split(block, size)
        block.free = False
        self.totals.allocated += block.size
        self.totals.peak_allocated = max(self.totals.peak_allocated, self.totals.allocated)
        return block

    def release(self, block: _Block) -> None:
        """Free a block, merging it with free neighbors."""
        self.totals.allocated -= block.size
        self._list(self._join(block))

    def empty_cache(self) -> None:
        """Return unused memory to the driver, as `torch.cuda.empty_cache()` does: whole segments, of expandable ones
        whole pages."""
        for pool in (self._small, self._large):
            for _, _, block in list(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.size == self._segments.get(block.segment):
                    self._unlist(block)
                    self.totals.reserved -= self._segments.pop(block.segment)

    def _take(self, pool: _Pool, size: int) -> _Block | None:
        """Remove and return the smallest free block that fits (`get_free_block`), where a block that can grow counts
        with the size it can grow to: the end of an expandable segment is used only if no other fits."""
        index = bisect.bisect_left(pool.free, (size, -1))
        if index == len(pool.free):
            return None
        while index + 1 < len(pool.free) and pool.free[index + 1][2].reach < pool.free[index][2].reach:
            index += 1
        return pool.free.pop(index)[2]

    def _grow(self, pool: _Pool, size: int) -> _Block:
        if self.expandable:
            return self._extend(pool, size)
        if size <= SMALL:
            segment_size = SMALL_SEGMENT
        else:
            segment_size = LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        block = _Block(self._next_address, segment_size, pool, segment=self._next_address)
        self._segments[block.segment] = segment_size
        self._next_address += segment_size
        self._reserve(segment_size)
        return block

    def _reserve(self, size: int) -> None:
        self.totals.reserved += size
        self.totals.peak_reserved = max(self.totals.peak_reserved, self.totals.reserved)

    def _extend(self, pool: _Pool, size: int) -> _Block:
        """Join free memory and the stretch without memory behind it, mapped page by page
        (`try_allocate_expandable_block`)."""
        block = self._room(pool, size)
        if not block.mapped:
            block = self._map(block, size)
        while block.size < size:
            assert block.following is not None
            block = self._map(block.following, size - block.size)
        self._unlist(block)
        return block

    def _room(self, pool: _Pool, size: int) -> _Block:
        """Return the lowest stretch of free and unmapped blocks of this size that begins with or just before one
        without memory (`find_expandable_block`)."""
        for unmapped in pool.unmapped:
            before = unmapped.preceding
            start = before if before is not None and before.free else unmapped
            room, block = start.size, start.following
            while room < size and block is not None and block.free:
                room, block = room + block.size, block.following
            if room >= size:
                return start
        raise AssertionError("more than an expandable segment can hold")

    def _map(self, block: _Block, size: int) -> _Block:
        """Map whole pages of memory for `size` bytes at the beginning of a stretch, as far as it goes, and return the
        free block that results with its neighbors."""
        self._unlist(block)
        pages = min(-(-size // block.pool.page) * block.pool.page, block.size)
        if pages < block.size:
            self._list(block.cut(pages))
        block.mapped = True
        self._reserve(pages)
        return self._list(self._join(block))

    def _unmap(self, block: _Block) -> None:
        """Give back the whole pages of a free block."""
        page = block.pool.page
        start, end = -(-block.address // page) * page, (block.address + block.size) // page * page
        if end <= start:
            return
        self._unlist(block)
        if block.address < start:
            before, block = block, block.cut(start - block.address)
            self._list(before)
        if block.size > end - start:
            self._list(block.cut(end - start))
        block.mapped = False
        self.totals.reserved -= block.size
        self._list(self._join(block))

    def _split(self, block: _Block, size: int) -> None:
        remainder = block.size - size
        if remainder < ROUNDING or (block.pool is self._large and not self.expandable and remainder <= SMALL):
            return
        self._list(block.cut(size))

    def _join(self, block: _Block) -> _Block:
        previous_block, next_block = block.preceding, block.following
        if previous_block is not None and previous_block.free and previous_block.mapped == block.mapped:
            self._unlist(previous_block)
            block = self._absorb(previous_block)
        if next_block is not None and next_block.free and next_block.mapped == block.mapped:
            self._unlist(next_block)
            block = self._absorb(block)
        return block

    def _list(self, block: _Block) -> _Block:
        """Add a block to the free ones."""
        block.free = True
        if block.mapped:
            bisect.insort(block.pool.free, block.key)
        else:
            bisect.insort(block.pool.unmapped, block)
        return block

    def _unlist(self, block: _Block) -> None:
        if block.mapped:
            del block.pool.free[bisect.bisect_left(block.pool.free, (block.size, block.address))]
        else:
            block.pool.unmapped.remove(block)
        block.free = False

    def _absorb(self, block: _Block) -> _Block:
        """Merge the block after `block` into it."""
        absorbed = block.following
        assert absorbed is not None
        block.size += absorbed.size
        block.following = absorbed.following
        if absorbed.following is not None:
            absorbed.following.preceding = block
        return block
