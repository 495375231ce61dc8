"""Packing of examples into rows: best-fit-decreasing bin packing, and evenly filled bins for several ranks."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from surefit.core.errors import DataError


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put every item into the fullest bin that it still fits into, the longest items first.

    At most 11/9 of the fewest bins possible, plus one (Johnson et al. 1974, doi:10.1137/0203025), in O(n log n).

    Args:
        lengths: tokens of each item, at least 1.
        capacity: tokens a bin holds.

    Returns:
        The items' numbers, bin by bin: the fullest bin first, so that the peak of memory comes first; within a bin the
        longest item first. Ties go by number: the same lengths give the same bins.

    Raises:
        DataError: an item is longer than a bin.
    """
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    if order and lengths[order[0]] > capacity:
        raise DataError(
            f"an example of {lengths[order[0]]:,} tokens does not fit into a packed row of {capacity:,}",
            code="E4081",
            field="data.max_length",
            help="examples must be cut or dropped to data.max_length before they are packed",
        )
    bins: list[list[int]] = []
    bins_by_room: dict[int, list[int]] = {}  # room left → heap of the bins with it, the oldest first
    rooms: list[int] = []  # the keys of `bins_by_room`, ascending: at most one per room, so it stays short
    for item in order:
        length = lengths[item]
        place = bisect_left(rooms, length)
        if place == len(rooms):
            number, room = len(bins), capacity
            bins.append([])
        else:
            room = rooms[place]
            number = heapq.heappop(bins_by_room[room])
            if not bins_by_room[room]:
                del bins_by_room[room], rooms[place]
        bins[number].append(item)
        room_left = room - length
        if room_left and room_left not in bins_by_room:
            insort(rooms, room_left)
            bins_by_room[room_left] = []
        if room_left:
            heapq.heappush(bins_by_room[room_left], number)
    return _fullest_first(bins, lengths)


def pack_for(ranks: int, lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into bins for ranks that wait for one another: evenly filled, and no more per rank than
    best-fit-decreasing needs.

    Bins filled to the brim leave nothing for some ranks: 20,000 tokens are three bins of 8,192, and five of eight ranks
    would wait. Here each rank has as many bins as the others, and an item goes into the bin with the fewest tokens, the
    longest first (LPT; Graham 1969, doi:10.1137/0117039: the fullest bin has at most 4/3 of the least possible). If a
    bin would overflow, the bins are nearly full anyway, and the result is best-fit-decreasing's, as it is for one rank.

    Args and result: as `best_fit_decreasing`. No bin holds more than one rank's part of the items (rounded up) would if
    all were as long as the longest.

    >>> pack_for(2, [5, 4, 3, 2], 16)
    [[0, 3], [1, 2]]
    """
    bins = best_fit_decreasing(lengths, capacity)
    even = _evenly(lengths, min(len(lengths), -(-len(bins) // ranks) * ranks)) if ranks > 1 else bins
    fits = all(sum(lengths[item] for item in bin_) <= capacity for bin_ in even)
    return _fullest_first(even, lengths) if fits else bins


def _evenly(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Distribute the items over `count` bins, the longest first, each into the bin with the fewest tokens."""
    bins: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, number) for number in range(count)]
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        tokens, number = emptiest[0]
        bins[number].append(item)
        heapq.heapreplace(emptiest, (tokens + lengths[item], number))
    return bins


def distribute_bins(bins: Sequence[Sequence[int]], lengths: Sequence[int], world_size: int) -> list[list[list[int]]]:
    """Distribute the bins over the ranks, so that none waits long for another.

    The costliest bin goes to the rank with the least work so far, among the ranks with the fewest bins: ranks have the
    same number of bins, except for one if they do not divide. Work is tokens; among bins with equal tokens, the one
    with the longer documents (the sum of their squares: attention) counts as costlier.

    Returns:
        For each rank its bins, the costliest first. A rank may have none.
    """

    def tokens(bin_: Sequence[int]) -> int:
        return sum(lengths[item] for item in bin_)

    def squares(bin_: Sequence[int]) -> int:
        return sum(lengths[item] ** 2 for item in bin_)

    order = sorted(range(len(bins)), key=lambda number: (-tokens(bins[number]), -squares(bins[number]), number))
    ranks: list[list[list[int]]] = [[] for _ in range(world_size)]
    work = [(0, 0, 0, rank) for rank in range(world_size)]  # bins, tokens, squares, rank: the smallest is next
    for number in order:
        bins_held, tokens_held, squares_held, rank = heapq.heappop(work)
        bin_ = list(bins[number])
        ranks[rank].append(bin_)
        heapq.heappush(work, (bins_held + 1, tokens_held + tokens(bin_), squares_held + squares(bin_), rank))
    return ranks


def _fullest_first(bins: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    used = [sum(lengths[item] for item in bin_) for bin_ in bins]
    return [bins[number] for number in sorted(range(len(bins)), key=lambda number: (-used[number], number))]
