"""Intervals: they cover what they promise, agree with published values, and say so when there is nothing to say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from surefit.core.errors import DataError
from surefit.evaluate import stats
from surefit.evaluate.stats import bootstrap_mean, paired_bootstrap, percentiles, resampled_aggregates
from surefit.task import mean_scores

TOLERANCE = 0.015


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 0.5, 0.62, 0.8, 0.9, 0.97])
def test_the_interval_of_a_proportion_covers_95_percent_of_the_time(share):
    """Exactly: the interval depends on the number of right answers only, and that is binomial."""
    n = 200
    covered = 0.0
    for right in range(n + 1):
        interval = bootstrap_mean([1.0] * right + [0.0] * (n - right))
        log_ways = math.lgamma(n + 1) - math.lgamma(right + 1) - math.lgamma(n - right + 1)
        chance = math.exp(log_ways + right * math.log(share) + (n - right) * math.log(1 - share))
        covered += chance * (interval.low <= share <= interval.high)
    coarse = min(share, 1 - share) * n <= 10  # few expected counts: the coverage jumps by more than the tolerance
    assert covered == pytest.approx(0.95, abs=0.02 if coarse else TOLERANCE)


@pytest.mark.parametrize(("win", "lose"), [(0.03, 0.01), (0.05, 0.02), (0.1, 0.1), (0.3, 0.05), (0.7, 0.02)])
def test_the_interval_of_a_paired_difference_covers_95_percent_of_the_time(win, lose):
    n, trials = 200, 3000
    rng = np.random.default_rng(7)
    counts, how_often = np.unique(rng.multinomial(n, [win, lose, 1 - win - lose], trials), axis=0, return_counts=True)
    covered = 0
    for (wins, losses, _), times in zip(counts, how_often, strict=True):
        before = np.r_[np.zeros(wins), np.ones(n - wins)]
        after = np.r_[np.ones(wins), np.zeros(losses), np.ones(n - wins - losses)]
        result = paired_bootstrap(before, after, seed=int(wins))
        covered += times * (result.low - 1e-12 <= win - lose <= result.high + 1e-12)
    # Where about six rows differ no interval can be exact; it must not be too narrow.
    assert 0.935 <= covered / trials <= (0.985 if n * (win + lose) < 15 else 0.965)


def few_that_differ(rng, n):
    return np.where(rng.random(n) < 0.1, np.clip(rng.normal(0.1, 0.3, n), -1, 1), 0.0)


@pytest.mark.parametrize(
    ("n", "draw", "truth"),
    [
        (30, lambda rng, n: rng.beta(3, 9, n), 0.25),
        (30, lambda rng, n: np.where(rng.random(n) < 0.6, 0.0, rng.beta(2, 2, n)), 0.2),
        (30, lambda rng, n: np.where(rng.random(n) < 0.9, 1.0, rng.beta(4, 4, n)), 0.95),
    ],
)
def test_means_of_few_and_skewed_rows_are_covered_too(monkeypatch, n, draw, truth):
    """benchmarks/coverage.py in small; plain quantiles hold it in 0.90 to 0.94 of such tests."""
    monkeypatch.setattr(stats, "RESAMPLES", 2_000)
    rng = np.random.default_rng(11)
    intervals = [bootstrap_mean(draw(rng, n)) for _ in range(800)]
    assert 0.935 <= sum(i.low <= truth <= i.high for i in intervals) / 800 <= 0.975


def test_differences_that_rest_on_few_rows_are_covered_too(monkeypatch):
    """Ten graded rows of a hundred differ: plain quantiles hold it in about 0.90 of such tests."""
    monkeypatch.setattr(stats, "RESAMPLES", 2_000)
    rng = np.random.default_rng(11)
    truth = few_that_differ(rng, 2_000_000).mean()
    found = [paired_bootstrap(np.zeros(100), few_that_differ(rng, 100)) for _ in range(600)]
    assert 0.935 <= sum(i.low <= truth <= i.high for i in found) / 600 <= 0.985


@pytest.mark.slow
def test_the_interval_of_graded_scores_covers_95_percent_of_the_time():
    rng = np.random.default_rng(3)
    trials, truth = 600, 0.6
    samples = rng.binomial(4, rng.beta(3, 2, (trials, 200))) / 4
    covered = sum(interval.low <= truth <= interval.high for interval in map(bootstrap_mean, samples))
    assert covered / trials == pytest.approx(0.95, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3 (Wilson's score without continuity correction)
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0000, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_proportions_equal_the_published_score_intervals(right, n, low, high):
    interval = bootstrap_mean([1] * right + [0] * (n - right))
    assert (interval.low, interval.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    assert (interval.mean, interval.n) == (right / n, n)


def test_the_bootstrap_of_many_values_agrees_with_the_normal_limit():
    values = np.random.default_rng(1).random(2000)
    interval = bootstrap_mean(values)
    half = 1.96 * values.std() / math.sqrt(2000)
    assert interval.low == pytest.approx(values.mean() - half, abs=half / 20)
    assert interval.high == pytest.approx(values.mean() + half, abs=half / 20)


def test_drawing_counts_and_drawing_rows_are_the_same_bootstrap(monkeypatch):
    values = np.random.default_rng(1).integers(0, 4, 300) / 4
    counts = stats._resampled_means(values, seed=0)
    monkeypatch.setattr(stats, "_FEW_VALUES", 0)
    monkeypatch.setattr(stats, "_CHUNK", 300 * 64)
    rows = stats._resampled_means(values, seed=0)
    assert len(rows) == len(counts) == 10_000
    assert rows.mean() == pytest.approx(counts.mean(), abs=4 * rows.std() / 100)
    assert percentiles(rows) == pytest.approx(percentiles(counts), abs=rows.std() / 10)


def test_equal_values_do_not_claim_certainty():
    unseen = 1.959964**2 / (50 + 1.959964**2)
    graded = bootstrap_mean([0.4] * 50)
    assert (graded.low, graded.high) == (pytest.approx(0.4 - 0.4 * unseen), pytest.approx(0.4 + 0.6 * unseen))
    tied = paired_bootstrap([0.4] * 50, [0.4] * 50)
    bound = 1.959964 * math.sqrt(2 / 52 / 52)  # Bonett & Price 2012 with no row won or lost
    assert (tied.low, tied.high, tied.ties) == (pytest.approx(-bound), pytest.approx(bound), 50)
    equal = paired_bootstrap([0.4] * 50, [0.5] * 50)
    assert (equal.low, equal.high) == (pytest.approx(0.1 - 1.1 * unseen), pytest.approx(0.1 + 0.9 * unseen))
    all_won = paired_bootstrap([0.0] * 50, [1.0] * 50)
    assert (all_won.difference, all_won.high, all_won.wins) == (1.0, 1.0, 50)
    assert all_won.low == pytest.approx(50 / 52 - 1.959964 * math.sqrt((1 - (50 / 52) ** 2) / 52))


def test_wins_losses_and_ties():
    result = paired_bootstrap([0.0, 1.0, 0.5, 0.5, 1.0], [1.0, 0.0, 0.6, 0.5, 1.0])
    assert (result.wins, result.losses, result.ties) == (2, 1, 2)
    assert result.difference == pytest.approx(0.1 / 5)


def test_pairing_takes_the_difficulty_of_rows_out():
    hardness = np.random.default_rng(0).random(400)
    result = paired_bootstrap(hardness * 0.8, hardness * 0.8 + 0.1)
    assert result.high - result.low < 0.002
    single = bootstrap_mean(hardness * 0.8)
    assert single.high - single.low > 0.03


def test_the_same_seed_gives_the_same_interval():
    values = np.random.default_rng(0).random(100)
    assert bootstrap_mean(values, seed=5) == bootstrap_mean(values, seed=5)
    assert bootstrap_mean(values, seed=5) != bootstrap_mean(values, seed=6)


def test_less_confidence_is_narrower():
    values = np.random.default_rng(0).random(100)
    wide, narrow = bootstrap_mean(values, confidence=0.99), bootstrap_mean(values, confidence=0.8)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_corpus_scores_are_resampled_through_the_recipes_aggregate():
    """A ratio of sums (as corpus Smatch or BLEU are) against the delta method; and the mean as a special case."""
    rng = np.random.default_rng(2)
    rows = [{"right": float(right), "all": float(right + wrong)} for right, wrong in rng.integers(1, 9, (300, 2))]

    def micro(rows):
        return {"micro": sum(row["right"] for row in rows) / sum(row["all"] for row in rows)}

    right, total = (np.array([row[key] for row in rows]) for key in ("right", "all"))
    ratio = right.sum() / total.sum()
    error = (right - ratio * total).std() / total.mean() / math.sqrt(len(rows))
    low, high = percentiles(resampled_aggregates(rows, micro)["micro"])
    assert low == pytest.approx(ratio - 1.96 * error, abs=error / 4)
    assert high == pytest.approx(ratio + 1.96 * error, abs=error / 4)

    graded = [{"score": float(value)} for value in rng.random(300)]
    means = resampled_aggregates(graded, mean_scores)["score"]
    interval = bootstrap_mean([row["score"] for row in graded])
    assert percentiles(means) == pytest.approx((interval.low, interval.high), abs=0.005)


@pytest.mark.parametrize("values", [[], [0.5, float("nan")], [float("inf")]])
def test_nothing_and_not_a_number_are_refused(values):
    with pytest.raises(DataError):
        bootstrap_mean(values)
    with pytest.raises(DataError):
        paired_bootstrap(values, values)


def test_different_numbers_of_rows_cannot_be_paired():
    with pytest.raises(DataError, match="3 scores cannot be paired with 2"):
        paired_bootstrap([1, 0, 1], [1, 0])
