"""The shuffle without a table, and where the sampler uses it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from surefit.train import sampler
from surefit.train.permutation import permute_positions


def shuffle(n: int, *key: int) -> np.ndarray:
    return permute_positions(np.arange(n), n, key)


def test_every_number_comes_once_up_to_600_and_at_the_powers_of_two() -> None:
    for n in [*range(600), 1023, 1024, 1025, 65_535, 65_536, 65_537]:
        assert np.array_equal(np.sort(shuffle(n, 7, 0, n)), np.arange(n)), n


def test_it_is_a_function_of_position_and_key() -> None:
    whole = shuffle(1000, 3, 0, 1)
    assert [int(permute_positions(np.array([place]), 1000, (3, 0, 1))[0]) for place in range(1000)] == whole.tolist()
    assert shuffle(1000, 3, 0, 1).tolist() == whole.tolist()
    assert (shuffle(1000, 3, 0, 2) == whole).sum() < 10  # 1 is expected
    assert (shuffle(1000, 4, 0, 1) == whole).sum() < 10


def test_every_number_is_as_likely_everywhere() -> None:
    """Pearson's χ² of 8 × 8 counts; each row and column is fixed, so 49 degrees of freedom: 85.4 is passed by 1 in
    1,000."""
    counts = np.zeros((8, 8))
    for key in range(4000):
        counts[np.arange(8), shuffle(8, key, 0, 0)] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 85.4


@pytest.mark.parametrize("n", [10_000, 16_384])
def test_neighbours_are_not_neighbours_afterwards(n: int) -> None:
    order = shuffle(n, 0, 0, 0).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 4 / np.sqrt(n)
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 4 / np.sqrt(n)
    runs = np.bincount(np.abs(np.diff(order)).astype(int))[1]  # 2 are expected
    assert runs < 12


def test_large_numbers_stay_inside() -> None:
    n = 10**12 + 39
    found = permute_positions(np.arange(n - 1000, n), n, (1, 0, 5))
    assert len(set(found.tolist())) == 1000
    assert found.min() >= 0
    assert found.max() < n
    assert 0.4 < found.mean() / n < 0.6


def test_up_to_the_threshold_the_order_is_that_of_the_table() -> None:
    order = sampler.epoch_order(5, 0, 1000)
    assert sampler.batch_rows(0, 5, 1000, 16) == order[:16].tolist()


def test_above_the_threshold_every_epoch_has_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "TABLE_ROWS", 99)
    stream = [row for step in range(30) for row in sampler.batch_rows(step, 5, 100, 7)]  # 2.1 epochs, of full batches
    first, second = stream[:100], stream[100:200]
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert sampler.batch_rows(14, 5, 100, 7) == stream[98:105]  # over the end of an epoch
    assert len(set(sampler.batch_rows(0, 5, 100, 250)[:100])) == 100


def test_a_billion_rows_need_no_table() -> None:
    tracemalloc.start()
    rows = sampler.batch_rows(10_000, 0, 10**9, 64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(rows)) == 64
    assert peak < 2**20
