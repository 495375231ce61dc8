"""The allocator's arithmetic: traces worked out by hand from CUDACachingAllocator.cpp, and what always holds."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay import replay_allocations

from surefit.core.units import KIB, MIB
from surefit.plan.allocator import CachingAllocator


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
    totals = replay_allocations([1], [size])
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
    assert replay_allocations(events, sizes).reserved == reserved, what


def test_expandable_segments_grow_by_what_is_missing() -> None:
    events, sizes = [1, -1, 2], [30 * MIB, 50 * MIB]
    assert replay_allocations(events, sizes).reserved == 80 * MIB
    assert replay_allocations(events, sizes, expandable=True).reserved == 60 * MIB


@pytest.mark.parametrize(
    ("what", "events", "sizes", "reserved"),
    [
        ("pages of 20 MiB", [1], [30 * MIB], 40 * MIB),
        ("small ones have pages of 2 MiB of their own", [1, 2], [30 * MIB, MIB], 42 * MIB),
        # The last 10 MiB of the two pages are free, and can grow.
        ("the end grows by the pages that are missing", [1, 2], [30 * MIB, 31 * MIB], 80 * MIB),
        # Free are 40 in the middle and 20 at the end. 15 and 20 go into the 40, for the end counts as all that it can
        # grow to, and the last 35 take the end and one page more. Had the 15 gone to the end: 5, and two pages.
        ("any other block is preferred to the end", [1, 2, 3, 4, -4, -2, 5, 6, 7],
         [20 * MIB, 40 * MIB, 20 * MIB, 20 * MIB, 15 * MIB, 20 * MIB, 35 * MIB], 120 * MIB),
        # Free are 40, 20 and, at the end, 10.
        ("among the others the smallest that fits", [1, 2, 3, 4, 5, -2, -4, 6, 7],
         [10 * MIB, 40 * MIB, 10 * MIB, 20 * MIB, 10 * MIB, 20 * MIB, 40 * MIB], 100 * MIB),
        # Nothing but the end of 20 fits 20: it is taken, without a new page.
        ("the end is taken where nothing else fits", [1, 2, -1, 3], [10 * MIB, 30 * MIB, 20 * MIB], 60 * MIB),
        # A hole of 30 is too small for 35, and memory is added at the end alone: 20 free there, one page more.
        ("holes do not grow", [1, 2, 3, -1, 4], [30 * MIB, 30 * MIB, 20 * MIB, 35 * MIB], 120 * MIB),
    ],
)  # fmt: skip
def test_expandable_traces_worked_out_by_hand(what: str, events: list[int], sizes: list[int], reserved: int) -> None:
    assert replay_allocations(events, sizes, expandable=True).reserved == reserved, what


def test_the_end_is_a_larger_block_than_any() -> None:
    """Free: 40 MiB between two in use, and 20 MiB at the end. 15 fit the 20 more closely; torch takes the 40."""
    allocator = CachingAllocator(expandable=True)
    first, hole, last = (allocator.allocate(size * MIB) for size in (20, 40, 20))
    end = allocator.allocate(20 * MIB)
    allocator.release(end)
    address = hole.address
    allocator.release(hole)
    assert allocator.allocate(15 * MIB).address == address
    assert allocator.totals.reserved == 100 * MIB
    assert first.address < address < last.address


def test_emptying_the_cache_unmaps_whole_pages() -> None:
    """30 of 100 MiB are freed from 10 to 40: the page from 20 to 40 goes, the half of the first stays. Then 25 fit
    neither those 10 nor, alone, the end; the lowest place for them is the freed page with the 10 before it."""
    allocator = CachingAllocator(expandable=True)
    blocks = [allocator.allocate(size * MIB) for size in (10, 30, 60)]
    assert allocator.totals.reserved == 100 * MIB
    start = blocks[1].address
    allocator.release(blocks[1])
    allocator.empty_cache()
    assert allocator.totals.reserved == 80 * MIB
    again = allocator.allocate(25 * MIB)
    assert again.address == start
    assert allocator.totals.reserved == 100 * MIB
    allocator.release(again)
    allocator.empty_cache()
    beyond = allocator.allocate(35 * MIB)
    assert beyond.address == blocks[2].address + 60 * MIB, "30 are not enough, so it lies at the end"
    assert allocator.totals.reserved == 120 * MIB


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
    allocator.empty_cache()
    assert (allocator.totals.allocated, allocator.totals.reserved) == (0, 0)
