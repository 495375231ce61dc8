"""The order of the rows depends on seed, number and step alone, and uses every row equally."""

from collections import Counter

import numpy as np
import pytest

from surefit.core.errors import DataError
from surefit.train.sampler import batch_rows, dropout_seed, epoch_order, fingerprint_training_rows, micro_batches


def test_every_epoch_is_a_shuffle_of_all_rows_and_differs_from_the_last() -> None:
    first, second = epoch_order(3, 0, 100), epoch_order(3, 1, 100)
    assert sorted(first) == sorted(second) == list(range(100))
    assert list(first) != list(second)
    assert list(first) != list(epoch_order(4, 0, 100))


def test_the_order_is_the_same_on_every_machine() -> None:
    # Written down from this code: a change of numpy or of ours that moves it would break every resume.
    assert list(epoch_order(0, 0, 10)) == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]


def test_batches_read_one_endless_stream() -> None:
    stream = [row for step in range(25) for row in batch_rows(step, 7, 10, 4)]
    assert all(len(batch_rows(step, 7, 10, 4)) == 4 for step in range(25))
    for epoch in range(10):
        assert sorted(stream[epoch * 10 : (epoch + 1) * 10]) == list(range(10))


def test_fewer_rows_than_a_batch() -> None:
    assert sum(Counter(batch_rows(0, 0, 3, 8)).values()) == 8
    assert max(Counter(batch_rows(0, 0, 3, 8)).values()) == 3


def test_the_size_of_micro_batches_does_not_change_the_batch() -> None:
    lengths = np.random.default_rng(0).integers(5, 500, 64)
    batch = batch_rows(2, 0, 64, 16)
    for size in (1, 2, 8, 16):
        parts = micro_batches(batch, lengths, size)
        assert [len(part) for part in parts] == [size] * (16 // size)
        assert sorted(row for part in parts for row in part) == sorted(batch)


def test_sorting_inside_the_batch_removes_padding() -> None:
    lengths = np.random.default_rng(0).integers(5, 500, 64)
    batch = batch_rows(0, 0, 64, 64)

    def computed(parts: list[list[int]]) -> int:
        return sum(len(part) * int(max(lengths[row] for row in part)) for part in parts)

    unsorted = [batch[start : start + 8] for start in range(0, 64, 8)]
    assert computed(micro_batches(batch, lengths, 8)) < 0.7 * computed(unsorted)


def test_dropout_seeds_differ_between_steps_and_runs() -> None:
    seeds = {dropout_seed(seed, step) for seed in range(3) for step in range(100)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_survey_notices_any_change_of_the_rows() -> None:
    rows = [(np.array([1, 2, 3]), np.array([-100, 2, 3])), (np.array([4, 5]), np.array([4, 5]))]
    found = fingerprint_training_rows(rows)
    assert list(found.lengths) == [3, 2]
    changed = [(np.array([1, 2, 3]), np.array([-100, -100, 3])), rows[1]]
    assert fingerprint_training_rows(rows).sha256 == found.sha256 != fingerprint_training_rows(changed).sha256


def test_rows_that_teach_nothing_are_refused() -> None:
    with pytest.raises(DataError, match="no rows"):
        fingerprint_training_rows([])
    masked = [(np.array([1, 2]), np.array([1, -100]))]  # a label on the first token has nothing before it
    with pytest.raises(DataError, match="row 0 has no supervised token among its 2"):
        fingerprint_training_rows(masked)
