"""Deterministic selection of rows, evenly spaced, and splitting into batches of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def evenly_spaced_indices(count: int, limit: int | None) -> list[int]:
    """Return at most `limit` of the positions 0 to `count` - 1, evenly spaced from the first; all of them without a
    limit.

    >>> evenly_spaced_indices(100, 5), evenly_spaced_indices(3, 5), evenly_spaced_indices(2, None)
    ([0, 20, 40, 60, 80], [0, 1, 2], [0, 1])
    """
    selected = count if limit is None else min(max(0, limit), count)
    return [position * count // selected for position in range(selected)]


def evenly_spaced(items: Sequence[T], limit: int | None) -> list[T]:
    """Return at most `limit` of the items, chosen by `evenly_spaced_indices`.

    >>> evenly_spaced("abcdef", 3)
    ['a', 'c', 'e']
    """
    return [items[index] for index in evenly_spaced_indices(len(items), limit)]


def stream_evenly_spaced(items: Iterable[T], count: int, limit: int | None) -> Iterator[T]:
    """Yield at most `limit` of `count` streamed items, chosen by `evenly_spaced_indices`; stop after the last of them.

    >>> list(stream_evenly_spaced(iter("abcdef"), 6, 3))
    ['a', 'c', 'e']
    """
    remaining, position = iter(items), 0
    for index in evenly_spaced_indices(count, limit):
        yield from islice(remaining, index - position, index - position + 1)
        position = index + 1


def split_by_total_size(sizes: Iterable[int], limit: int) -> Iterator[slice]:
    """Yield slices of neighbors whose sizes sum to at most `limit`; an item that is larger is a slice of its own.

    >>> list(split_by_total_size([4, 5, 20, 1], 10))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    start = end = total = 0
    for end, size in enumerate(sizes, start=1):
        if total and total + size > limit:
            yield slice(start, end - 1)
            start, total = end - 1, 0
        total += size
    if end > start:
        yield slice(start, end)
