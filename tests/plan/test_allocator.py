"""The allocator's arithmetic: traces worked out by hand from CUDACachingAllocator.cpp, and what always holds."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefit.core.units import KIB, MIB
from surefit.plan.allocator import CachingAllocator, replay


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # A rest of at most 1 MiB is not split off and counts as allocated; half a MiB more is.
        (11 * MIB, 12 * MIB, 12 * MIB),
        (10 * MIB + 512 * KIB, 10 * MIB + 512 * KIB, 12 * MIB),
    ],
)
def test_one_allocation(size: int, allocated: int, reserved: int) -> None:
    totals = replay([1], [size])
    assert (totals.allocated, totals.reserved) == (allocated, reserved)


@pytest.mark.parametrize(
    ("what", "events", "sizes", "reserved"),
    [
        ("small ones share a segment", [1, 2], [MIB, MIB], 2 * MIB),
        ("a third does not", [1, 2, 3], [MIB, MIB, 512], 4 * MIB),
        ("large ones under 10 MiB share 20", [1, 2, 3], [6 * MIB, 6 * MIB, 8 * MIB], 20 * MIB),
        ("small and large never share", [1, 2], [6 * MIB, MIB], 22 * MIB),
        ("a freed segment serves what fits", [1, -1, 2], [30 * MIB, 12 * MIB], 30 * MIB),
        ("its rest serves the next", [1, -1, 2, 3], [30 * MIB, 12 * MIB, 18 * MIB], 30 * MIB),
        ("a rest of 1 MiB stays with the block", [1, -1, 2, 3], [30 * MIB, 29 * MIB, MIB + 512], 50 * MIB),
        ("what does not fit is new", [1, -1, 2], [30 * MIB, 32 * MIB], 62 * MIB),
        ("the smallest that fits", [1, 2, -1, -2, 3, 4], [40 * MIB, 20 * MIB, 20 * MIB, 40 * MIB], 60 * MIB),
        ("neighbours merge", [1, 2, -1, -2, 3], [8 * MIB, 8 * MIB, 18 * MIB], 20 * MIB),
        ("a hole between two does not", [1, 2, 3, -1, -3, 4], [6 * MIB, 6 * MIB, 8 * MIB, 12 * MIB], 32 * MIB),
    ],
)
def test_traces_worked_out_by_hand(what: str, events: list[int], sizes: list[int], reserved: int) -> None:
    assert replay(events, sizes).reserved == reserved, what


def test_expandable_segments_grow_by_what_is_missing() -> None:
    events, sizes = [1, -1, 2], [30 * MIB, 50 * MIB]
    assert replay(events, sizes).reserved == 80 * MIB
    assert replay(events, sizes, expandable=True).reserved == 60 * MIB


def test_emptying_the_cache_gives_back_whole_segments_alone() -> None:
    allocator = CachingAllocator()
    kept, whole, half = (allocator.allocate(size) for size in (6 * MIB, 30 * MIB, 6 * MIB))
    allocator.release(whole)
    allocator.release(half)
    allocator.empty_cache()
    assert allocator.totals.reserved == 20 * MIB
    allocator.release(kept)
    allocator.empty_cache()
    assert (allocator.totals.reserved, allocator.totals.allocated) == (0, 0)


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Up to 40 allocations, some freed again, in any order."""
    sizes = draw(st.lists(st.integers(1, 4096).map(lambda n: n * 16 * KIB + n), min_size=1, max_size=40))
    events: list[int] = []
    live: list[int] = []
    for number in range(1, len(sizes) + 1):
        events.append(number)
        live.append(number)
        while live and draw(st.booleans()):
            events.append(-live.pop(draw(st.integers(0, len(live) - 1))))
    return events, sizes


@given(traces(), st.booleans())
def test_what_is_reserved_holds_what_is_allocated(trace: tuple[list[int], list[int]], expandable: bool) -> None:
    events, sizes = trace
    allocator = CachingAllocator(expandable)
    blocks = {}
    for event in events:
        if event > 0:
            blocks[event] = allocator.allocate(sizes[event - 1])
        else:
            allocator.release(blocks.pop(-event))
        totals = allocator.totals
        assert sum(block.size for block in blocks.values()) == totals.allocated <= totals.reserved
        spans = sorted((block.address, block.address + block.size) for block in blocks.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "blocks overlap"
        assert all(block.size >= sizes[number - 1] for number, block in blocks.items())
    for block in blocks.values():
        allocator.release(block)
    reserved = allocator.totals.reserved
    allocator.empty_cache()
    assert allocator.totals.allocated == 0
    assert allocator.totals.reserved == (reserved if expandable else 0)
