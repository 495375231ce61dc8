"""How sure a score is: 95 % intervals by resampling the rows.

Which interval, and why (docs/evaluation.md has the coverage of each, measured):

- **A proportion** (every value 0 or 1): Wilson's score interval (Wilson 1927; recommended by Brown, Cai & DasGupta
  2001). The bootstrap's quantiles are too narrow there near 0 and 1, which is where a good fine-tune ends up.
- **Any other mean, and paired differences**: the percentile bootstrap (Efron 1979) with 10,000 resamples of the rows.
  BCa is meant to be more accurate, but on paired differences with few discordant pairs it covers less.
- **Values that are all equal**: resampling would give an interval of width zero, as if 20 right answers out of 20
  proved that the model is never wrong. A value never seen in n rows may still have a share of up to z²/(n + z²)
  (Wilson's upper limit for 0 of n), and the interval is where the mean would be if that share lay at either bound.

Everything is deterministic for a given seed. The interval speaks about *these* rows as a sample of such rows; it does
not know about another training seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from surefit.core.errors import DataError
from surefit.task import Scores

RESAMPLES = 10_000
AGGREGATE_RESAMPLES = 1_000
"""For scores that are not the mean of the rows' scores: each resample calls the recipe's `aggregate`."""
Floats = NDArray[np.float64]
_FEW_VALUES = 16
_CHUNK = 20_000_000  # random numbers held at once: 160 MB


@dataclass(frozen=True)
class Interval:
    """A mean over n rows and its confidence interval."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Paired:
    """b against a on the same rows: the mean difference b - a with its interval, and on how many rows b scored more
    (wins), less (losses) or the same (ties)."""

    difference: float
    low: float
    high: float
    wins: int
    losses: int
    ties: int


def bootstrap_mean(values: ArrayLike, confidence: float = 0.95, seed: int = 0) -> Interval:
    """The mean of scores in [0, 1] and its interval.

    Raises:
        DataError: no values, or one that is not a number.

    188 right answers of 200:

    >>> interval = bootstrap_mean([1.0] * 188 + [0.0] * 12)
    >>> print(f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]")
    0.940 [0.898, 0.965]

    Twenty of twenty is not certainty:

    >>> interval = bootstrap_mean([1.0] * 20)
    >>> print(f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]")
    1.000 [0.839, 1.000]
    """
    sample = _sample(values)
    mean = float(sample.mean())
    if np.isin(sample, (0.0, 1.0)).all():
        low, high = _wilson(mean, len(sample), _z(confidence))
    elif sample.min() == sample.max():
        low, high = _all_equal(mean, len(sample), _z(confidence), 0.0, 1.0)
    else:
        low, high = percentiles(_resampled_means(sample, seed), confidence)
    return Interval(mean, low, high, len(sample))


def paired_bootstrap(a: ArrayLike, b: ArrayLike, confidence: float = 0.95, seed: int = 0) -> Paired:
    """Scores of two models on the same rows: is b better than a by more than chance?

    Rows are resampled as pairs, so what makes a row hard for both models cancels.

    Raises:
        DataError: no values, one that is not a number, or different numbers of rows.

    Of 200 rows b wins 30, loses 10 and ties on 160:

    >>> a = [0.0] * 30 + [1.0] * 10 + [1.0] * 160
    >>> b = [1.0] * 30 + [0.0] * 10 + [1.0] * 160
    >>> result = paired_bootstrap(a, b)
    >>> print(f"{result.difference:+.3f} [{result.low:+.3f}, {result.high:+.3f}]")
    +0.100 [+0.040, +0.160]
    >>> result.wins, result.losses, result.ties
    (30, 10, 160)
    """
    before, after = _sample(a), _sample(b)
    if len(before) != len(after):
        raise DataError(f"{len(before)} scores cannot be paired with {len(after)}", help="score the same rows twice")
    differences = after - before
    mean = float(differences.mean())
    if differences.min() == differences.max():
        low, high = _all_equal(mean, len(differences), _z(confidence), -1.0, 1.0)
    else:
        low, high = percentiles(_resampled_means(differences, seed), confidence)
    wins, losses = int((differences > 0).sum()), int((differences < 0).sum())
    return Paired(mean, low, high, wins, losses, len(differences) - wins - losses)


def resampled_aggregates(
    rows: Sequence[Scores], aggregate: Callable[[Sequence[Scores]], Scores], seed: int = 0
) -> dict[str, Floats]:
    """Metric → its corpus score on 1,000 resamples of the rows, for recipes whose `aggregate` is not the mean.

    The same seed and number of rows give the same resamples: subtract two models' results for paired differences.
    """
    rng = np.random.default_rng(seed)
    draws = (rng.integers(0, len(rows), len(rows)) for _ in range(AGGREGATE_RESAMPLES))
    results = [aggregate([rows[i] for i in draw]) for draw in draws]
    return {name: np.array([result[name] for result in results if name in result]) for name in results[0]}


def percentiles(resampled: Floats, confidence: float = 0.95) -> tuple[float, float]:
    """The quantiles that hold `confidence` of the resampled values between them."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return float(low), float(high)


def _sample(values: ArrayLike) -> Floats:
    sample = np.asarray(values, dtype=np.float64)
    if sample.size == 0:
        raise DataError("there are no scores to average", help="give at least one row to evaluate")
    if not np.isfinite(sample).all():
        raise DataError("a score is not a finite number", help="correct the recipe's score function")
    return sample


def _resampled_means(sample: Floats, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    n = len(sample)
    distinct, counts = np.unique(sample, return_counts=True)
    if len(distinct) <= _FEW_VALUES:  # how often each value is drawn is multinomial: no need to draw rows
        means: Floats = rng.multinomial(n, counts / n, size=RESAMPLES) @ distinct / n
        return means
    size = max(1, _CHUNK // n)
    sizes = [min(size, RESAMPLES - start) for start in range(0, RESAMPLES, size)]
    return np.concatenate([sample[rng.integers(0, n, (rows, n))].mean(axis=1) for rows in sizes])


def _wilson(share: float, n: int, z: float) -> tuple[float, float]:
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At 0 and 1 a limit is the share itself; rounding must not carry it past.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def _all_equal(value: float, n: int, z: float, lowest: float, highest: float) -> tuple[float, float]:
    unseen = z * z / (n + z * z)
    return value - unseen * max(0.0, value - lowest), value + unseen * max(0.0, highest - value)


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)
