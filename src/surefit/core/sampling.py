"""Choices that nobody made: rows spread evenly over all there are, and many taken in portions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def evenly_spaced_indices(count: int, limit: int | None) -> list[int]:
    """At most `limit` of the positions 0 to `count` - 1, evenly spaced from the first; all of them without a limit.

    >>> evenly_spaced_indices(100, 5), evenly_spaced_indices(3, 5), evenly_spaced_indices(2, None)
    ([0, 20, 40, 60, 80], [0, 1, 2], [0, 1])
    """
    chosen = count if limit is None else min(max(0, limit), count)
    return [position * count // chosen for position in range(chosen)]


def split_by_total_size(sizes: Iterable[int], limit: int) -> Iterator[slice]:
    """Slices of neighbours whose sizes add up to `limit` at most; what is larger by itself stands alone.

    >>> list(split_by_total_size([4, 5, 20, 1], 10))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    start = end = held = 0
    for end, size in enumerate(sizes, start=1):
        if held and held + size > limit:
            yield slice(start, end - 1)
            start, held = end - 1, 0
        held += size
    if end > start:
        yield slice(start, end)
