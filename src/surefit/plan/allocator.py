"""A model of PyTorch's caching allocator: what a trace of allocations reserves on a GPU.

What `nvidia-smi` shows and what runs out is not the memory of the live tensors but that of the segments the allocator
took from the driver to hold them. It rounds, splits, merges and never gives back on its own; this file does the same.

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.11 to 2.13 (https://github.com/pytorch/pytorch). One stream; no
settings but `expandable_segments`.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from surefit.core.units import MIB

ROUNDING = 512
"""Every block is a multiple of this many bytes (kMinBlockSize)."""
SMALL = MIB
"""Up to here an allocation is served from the small pool (kSmallSize)."""
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
"""What a large allocation under `OWN_SEGMENT` takes from the driver (kLargeBuffer)."""
OWN_SEGMENT = 10 * MIB
"""From here on an allocation gets a segment of its own size (kMinLargeAlloc), a multiple of `SMALL_SEGMENT`."""


class _Block:
    """A stretch of a segment, in use or free, linked to its neighbours."""

    __slots__ = ("address", "following", "free", "pool", "preceding", "segment", "size")

    def __init__(self, address: int, size: int, pool: list[tuple[int, int, _Block]], segment: int) -> None:
        self.address, self.size, self.pool, self.segment = address, size, pool, segment
        self.free = False
        self.preceding: _Block | None = None
        self.following: _Block | None = None

    @property
    def key(self) -> tuple[int, int, _Block]:
        return self.size, self.address, self

    def __lt__(self, other: _Block) -> bool:
        return self.address < other.address


@dataclass
class Totals:
    """Bytes, now and at their highest."""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0


class CachingAllocator:
    """Allocate and free by size; `totals` says what that took.

    Args:
        expandable: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`: one segment per pool that grows.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.expandable = expandable
        self.totals = Totals()
        self._small: list[tuple[int, int, _Block]] = []
        self._large: list[tuple[int, int, _Block]] = []
        self._segments: dict[int, int] = {}
        self._tails: dict[int, _Block] = {}
        self._next_address = 0

    def allocate(self, size: int) -> _Block:
        """A block of at least `size` bytes: the smallest free one that fits, else new memory from the driver."""
        size = max(ROUNDING, -(-size // ROUNDING) * ROUNDING)
        pool = self._small if size <= SMALL else self._large
        block = self._take(pool, size) or self._grow(pool, size)
        self._split(block, size)
        block.free = False
        self.totals.allocated += block.size
        self.totals.peak_allocated = max(self.totals.peak_allocated, self.totals.allocated)
        return block

    def release(self, block: _Block) -> None:
        """Free a block, merging it with free neighbours."""
        self.totals.allocated -= block.size
        block = self._join(block)
        block.free = True
        bisect.insort(block.pool, block.key)

    def empty_cache(self) -> None:
        """Give the segments that hold nothing back to the driver, as `torch.cuda.empty_cache()` does."""
        for pool in (self._small, self._large):
            for _, _, block in list(pool):
                if block.size == self._segments.get(block.segment) and not self.expandable:
                    pool.remove(block.key)
                    self.totals.reserved -= self._segments.pop(block.segment)

    def _take(self, pool: list[tuple[int, int, _Block]], size: int) -> _Block | None:
        at = bisect.bisect_left(pool, (size, -1))
        return pool.pop(at)[2] if at < len(pool) else None

    def _grow(self, pool: list[tuple[int, int, _Block]], size: int) -> _Block:
        wanted = self._segment_size(size)
        self.totals.reserved += wanted
        self.totals.peak_reserved = max(self.totals.peak_reserved, self.totals.reserved)
        if self.expandable:
            return self._extend(pool, size)
        block = _Block(self._next_address, wanted, pool, segment=self._next_address)
        self._segments[block.segment] = wanted
        self._next_address += wanted
        return block

    def _segment_size(self, size: int) -> int:
        if self.expandable:
            page = SMALL_SEGMENT if size <= SMALL else LARGE_SEGMENT
            tail = self._tails.get(0 if size <= SMALL else 1)
            missing = size - (tail.size if tail and tail.free else 0)
            return -(-missing // page) * page
        if size <= SMALL:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // SMALL_SEGMENT) * SMALL_SEGMENT

    def _extend(self, pool: list[tuple[int, int, _Block]], size: int) -> _Block:
        """Grow the pool's only segment; its last block, where it is free, becomes part of the new one."""
        which = 0 if pool is self._small else 1
        grown = self._segment_size(size)
        tail = self._tails.get(which)
        if tail is not None and tail.free:
            pool.remove(tail.key)
            tail.size += grown
            return tail
        # Pools lie far apart, so that their addresses never meet.
        address = tail.address + tail.size if tail else which << 60
        block = _Block(address, grown, pool, segment=which)
        if tail is not None:
            tail.following, block.preceding = block, tail
        self._tails[which] = block
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = block.size - size
        if rest < ROUNDING or (block.pool is self._large and not self.expandable and rest <= SMALL):
            return
        remainder = _Block(block.address + size, rest, block.pool, block.segment)
        remainder.free = True
        remainder.preceding, remainder.following = block, block.following
        if block.following is not None:
            block.following.preceding = remainder
        block.following, block.size = remainder, size
        if self._tails.get(block.segment) is block:
            self._tails[block.segment] = remainder
        bisect.insort(block.pool, remainder.key)

    def _join(self, block: _Block) -> _Block:
        if block.preceding is not None and block.preceding.free:
            self._unlist(block.preceding)
            block = self._absorb(block.preceding)
        if block.following is not None and block.following.free:
            self._unlist(block.following)
            block = self._absorb(block)
        return block

    def _unlist(self, block: _Block) -> None:
        del block.pool[bisect.bisect_left(block.pool, (block.size, block.address))]
        block.free = False

    def _absorb(self, block: _Block) -> _Block:
        """`block` with the one after it."""
        taken = block.following
        assert taken is not None
        block.size += taken.size
        block.following = taken.following
        if taken.following is not None:
            taken.following.preceding = block
        if self._tails.get(block.segment) is taken:
            self._tails[block.segment] = block
        return block


def replay(
    events: Iterable[int],
    sizes: list[int],
    expandable: bool = False,
    empty_at: Collection[int] = (),
) -> Totals:
    """What a recorded trace takes.

    Args:
        events: `+i` where allocation i - 1 is made, `-i` where it is freed, in order.
        sizes: bytes of each allocation.
        expandable: as `CachingAllocator`.
        empty_at: positions before which `torch.cuda.empty_cache()` is called.

    Example: three tensors of 3, 3 and 4 MiB, the first freed before the last is made: the 20 MiB segment of the first
    holds all three.

    >>> replay([1, 2, -1, 3], [3 << 20, 3 << 20, 4 << 20]).peak_reserved >> 20
    20
    """
    allocator = CachingAllocator(expandable)
    blocks: dict[int, _Block] = {}
    for position, event in enumerate(events):
        if position in empty_at:
            allocator.empty_cache()
        if event > 0:
            blocks[event] = allocator.allocate(sizes[event - 1])
        elif -event in blocks:
            allocator.release(blocks.pop(-event))
    return allocator.totals
