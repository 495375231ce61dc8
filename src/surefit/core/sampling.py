"""A choice that nobody made: rows spread evenly over all there are."""

from __future__ import annotations


def evenly(count: int, limit: int | None) -> list[int]:
    """At most `limit` of the positions 0 to `count` - 1, evenly spaced from the first; all of them without a limit.

    >>> evenly(100, 5), evenly(3, 5), evenly(2, None)
    ([0, 20, 40, 60, 80], [0, 1, 2], [0, 1])
    """
    chosen = count if limit is None else min(max(0, limit), count)
    return [position * count // chosen for position in range(chosen)]
