"""The model of glibc's malloc: numbers worked out by hand from malloc.c, and what always holds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefit.core.units import KIB, MIB
from surefit.plan.malloc import PAGE, Malloc

QUARTER = 256 * KIB
"""In the heap 64 bytes more, of which the end is kept at least 128 KiB long when it grows: 97 pages for the first,
64 for each further one."""


def replayed(events: list[int], sizes: list[int]) -> Malloc:
    """`+i` allocates sizes[i - 1], `-i` frees it."""
    malloc, blocks = Malloc(threshold=MIB, trim=MIB), dict[int, Any]()
    for event in events:
        if event > 0:
            blocks[event] = malloc.allocate(sizes[event - 1])
        else:
            malloc.release(blocks.pop(-event))
    return malloc


@pytest.mark.parametrize(
    ("what", "events", "sizes", "resident", "peak"),
    [
        ("a large block is a mapping", [1], [2 * MIB], 513, 513),
        ("which is gone when it is freed", [1, -1, 2, -2], [2 * MIB, 2 * MIB], 0, 513),
        ("the heap grows for a small one", [1], [QUARTER], 97, 97),
        ("its end stays while it is short", [1, -1], [QUARTER], 97, 97),
        ("and goes when it is over a MiB", [1, 2, 3, 4, 5, -5, -4, -3, -2, -1], 5 * [QUARTER], 97, 97 + 4 * 64),
        ("a hole stays", [1, 2, 3, -2], 3 * [QUARTER], 97 + 2 * 64, 97 + 2 * 64),
        ("and is filled", [1, 2, 3, -2, 4], [*3 * [QUARTER], 128 * KIB], 97 + 2 * 64, 97 + 2 * 64),
        (
            "by a large block, too, where holes have become one",
            [1, 2, 3, 4, 5, 6, -1, -3, -5, -2, -4, 7], [*6 * [QUARTER], MIB], 97 + 5 * 64, 97 + 5 * 64,
        ),
        ("but not in pieces", [1, 2, 3, -1, -3, 4], [*3 * [QUARTER], MIB], 97 + 2 * 64 + 257, 97 + 2 * 64 + 257),
    ],
)  # fmt: skip
def test_one_trace(what: str, events: list[int], sizes: list[int], resident: int, peak: int) -> None:
    malloc = replayed(events, sizes)
    assert (malloc.resident / PAGE, malloc.peak / PAGE) == (resident, peak)


@given(st.lists(st.tuples(st.integers(1, 3 * MIB), st.booleans()), max_size=60))
def test_what_is_held_is_resident_and_what_is_freed_goes_back(wanted: list[tuple[int, bool]]) -> None:
    malloc, blocks, live = Malloc(threshold=MIB, trim=MIB), list[tuple[Any, int]](), 0
    for size, free in wanted:
        blocks.append((malloc.allocate(size), size))
        live += size
        assert live <= malloc.resident <= malloc.peak
        in_heap = sorted(block for block, _ in blocks if block[0] >= 0)
        assert all(a[0] + a[1] <= b[0] for a, b in pairwise(in_heap))
        if free:
            block, size = blocks.pop(len(blocks) // 2)
            malloc.release(block)
            live -= size
    for block, _ in blocks:
        malloc.release(block)
    assert malloc.resident <= MIB + 2 * PAGE
