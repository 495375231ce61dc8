"""Packing: every example once, no bin over its capacity, near the fewest bins, the same every time."""

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefit.core.errors import DataError
from surefit.data.tokens.pack import best_fit_decreasing, distribute_bins, pack_for

CAPACITY = 64
items = st.lists(st.integers(1, CAPACITY), max_size=200)


@given(items)
def test_every_item_is_in_one_bin_and_no_bin_is_over_its_capacity(lengths: list[int]) -> None:
    bins = best_fit_decreasing(lengths, CAPACITY)
    assert sorted(item for bin_ in bins for item in bin_) == list(range(len(lengths)))
    assert all(0 < sum(lengths[item] for item in bin_) <= CAPACITY for bin_ in bins)


@given(items)
def test_it_is_best_fit_decreasing_itself(lengths: list[int]) -> None:
    """The textbook's quadratic loop over all bins gives the same bins."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        fitting = [number for number, room in enumerate(rooms) if room >= lengths[item]]
        number = min(fitting, key=lambda number: (rooms[number], number), default=len(bins))
        if number == len(bins):
            bins.append([])
            rooms.append(CAPACITY)
        bins[number].append(item)
        rooms[number] -= lengths[item]
    assert sorted(best_fit_decreasing(lengths, CAPACITY)) == sorted(bins)


@given(st.lists(st.integers(1, CAPACITY // 2), max_size=200))
def test_it_stays_within_its_bound(lengths: list[int]) -> None:
    """Items of at most half a bin leave at most half of one bin free on average: far from the bound on the optimum."""
    bins = best_fit_decreasing(lengths, CAPACITY)
    assert len(bins) <= 1.5 * math.ceil(sum(lengths) / CAPACITY) + 1


@pytest.mark.parametrize(
    ("lengths", "fewest"),
    [([6, 4, 5, 5, 3, 7, 10], 4), ([5, 5, 5, 5], 2), ([9, 8, 2, 1], 2), ([1] * 100, 10), ([], 0)],
)
def test_it_finds_the_fewest_bins_where_that_is_easy(lengths: list[int], fewest: int) -> None:
    assert len(best_fit_decreasing(lengths, 10)) == fewest


@given(st.integers(1, 30), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_it_needs_at_most_eleven_ninths_of_the_fewest(count: int, random: object) -> None:
    """Full bins cut into pieces at random: the fewest is known."""
    lengths: list[int] = []
    for _ in range(count):
        cuts = sorted(random.sample(range(1, CAPACITY), random.randint(0, 5)))  # type: ignore[attr-defined]
        lengths += [b - a for a, b in zip([0, *cuts], [*cuts, CAPACITY], strict=True)]
    random.shuffle(lengths)  # type: ignore[attr-defined]
    assert count <= len(best_fit_decreasing(lengths, CAPACITY)) <= 11 / 9 * count + 1


@given(items)
def test_the_same_lengths_give_the_same_bins_the_fullest_first(lengths: list[int]) -> None:
    bins = best_fit_decreasing(lengths, CAPACITY)
    assert bins == best_fit_decreasing(tuple(lengths), CAPACITY)
    used = [sum(lengths[item] for item in bin_) for bin_ in bins]
    assert used == sorted(used, reverse=True)
    for bin_ in bins:
        assert [(-lengths[item], item) for item in bin_] == sorted((-lengths[item], item) for item in bin_)


def test_an_example_longer_than_a_row_is_refused_with_both_numbers() -> None:
    with pytest.raises(DataError, match=r"2,049 tokens does not fit into a packed row of 2,048"):
        best_fit_decreasing([5, 2049], 2048)


def test_a_hundred_thousand_items_take_no_quadratic_time() -> None:
    """Ten times as many take about 13 times as long; in quadratic time 100 times. The fastest of three is compared:
    what else the machine does only adds."""

    def seconds(count: int) -> float:
        lengths = [1 + (number * 7919) % 2048 for number in range(count)]
        start = time.process_time()
        best_fit_decreasing(lengths, 2048)
        return time.process_time() - start

    assert min(seconds(100_000) for _ in range(3)) < 40 * max(min(seconds(10_000) for _ in range(3)), 0.01)


@given(items, st.integers(1, 9))
def test_ranks_need_no_more_bins_than_full_ones_would_and_none_has_more_than_its_part(
    lengths: list[int], ranks: int
) -> None:
    bins, full = pack_for(ranks, lengths, CAPACITY), best_fit_decreasing(lengths, CAPACITY)
    assert sorted(item for bin_ in bins for item in bin_) == list(range(len(lengths)))
    assert all(bins)
    used = [sum(lengths[item] for item in bin_) for bin_ in bins]
    assert used == sorted(used, reverse=True)
    assert -(-len(bins) // ranks) == -(-len(full) // ranks)
    assert max(used, default=0) <= min(CAPACITY, -(-len(lengths) // ranks) * max(lengths, default=0))
    assert bins == pack_for(ranks, tuple(lengths), CAPACITY)
    assert pack_for(1, lengths, CAPACITY) == full


def test_short_examples_leave_no_rank_without_work() -> None:
    """64 examples of 305 tokens on average, in bins of 8,192: three full ones would leave five of eight ranks idle."""
    lengths = [100 + (number * 7919) % 410 for number in range(64)]
    assert len(best_fit_decreasing(lengths, 8192)) == 3
    used = [sum(lengths[item] for item in bin_) for bin_ in pack_for(8, lengths, 8192)]
    assert len(used) == 8
    assert max(used) < 1.02 * sum(lengths) / 8


def test_bins_that_are_full_stay_as_best_fit_made_them() -> None:
    """The longest first into the emptiest of two: 3 + 2 + 2 would overflow a bin of 6 that 3 + 3 fills."""
    lengths = [3, 3, 2, 2, 2]
    assert pack_for(2, lengths, 6) == best_fit_decreasing(lengths, 6) == [[0, 1], [2, 3, 4]]


@given(items, st.integers(1, 9))
def test_ranks_share_the_bins(lengths: list[int], world_size: int) -> None:
    bins = best_fit_decreasing(lengths, CAPACITY)
    ranks = distribute_bins(bins, lengths, world_size)
    assert sorted(bin_ for rank in ranks for bin_ in rank) == sorted(bins)
    counts = [len(rank) for rank in ranks]
    assert len(ranks) == world_size
    assert max(counts) - min(counts) <= 1
    assert ranks == distribute_bins(bins, lengths, world_size)


@given(items, st.integers(1, 9))
def test_no_rank_has_more_than_a_bin_of_work_beyond_another(lengths: list[int], world_size: int) -> None:
    ranks = distribute_bins(best_fit_decreasing(lengths, CAPACITY), lengths, world_size)
    work = [sum(lengths[item] for bin_ in rank for item in bin_) for rank in ranks]
    assert max(work) - min(work) <= CAPACITY


def test_bins_of_as_many_tokens_are_dealt_by_their_longest_documents() -> None:
    """Two bins of one long document each, two of many short ones: one of each for both ranks."""
    lengths = [8, 8, *[1] * 16]
    bins = [[0], [1], list(range(2, 10)), list(range(10, 18))]
    first, second = distribute_bins(bins, lengths, 2)
    assert {len(bin_) for bin_ in first} == {len(bin_) for bin_ in second} == {1, 8}
