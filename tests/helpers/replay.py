"""Replays a recorded trace of allocations through the model of PyTorch's caching allocator."""

from collections.abc import Collection, Iterable
from typing import Any

from surefit.plan.allocator import AllocatorTotals, CachingAllocator


def replay_allocations(
    events: Iterable[int],
    sizes: list[int],
    expandable: bool = False,
    empty_at: Collection[int] = (),
) -> AllocatorTotals:
    """What a recorded trace takes.

    Args:
        events: `+i` where allocation i - 1 is made, `-i` where it is freed, in order.
        sizes: bytes of each allocation.
        expandable: as `CachingAllocator`.
        empty_at: positions before which `torch.cuda.empty_cache()` is called.

    Example: three tensors of 3, 3 and 4 MiB, the first freed before the last is made: the 20 MiB segment of the first
    holds all three.

    >>> replay_allocations([1, 2, -1, 3], [3 << 20, 3 << 20, 4 << 20]).peak_reserved >> 20
    20
    """
    allocator = CachingAllocator(expandable)
    blocks: dict[int, Any] = {}
    for position, event in enumerate(events):
        if position in empty_at:
            allocator.empty_cache()
        if event > 0:
            blocks[event] = allocator.allocate(sizes[event - 1])
        elif -event in blocks:
            allocator.release(blocks.pop(-event))
    return allocator.totals
