"""Confidence intervals by resampling the rows, for the small numbers of rows that tasks really have.

The intervals, with reasons (docs/compare.md has the measured coverage of each; benchmarks/coverage.py measures it):

- **A proportion** (every value 0 or 1): Wilson's score interval (Wilson 1927; recommended by Brown, Cai & DasGupta
  2001). The bootstrap's quantiles are too narrow near 0 and 1, where the score of a good fine-tune lies.
- **Any other mean**: the bootstrap (Efron 1979) with 10,000 resamples of the rows. Its plain quantiles are too narrow
  for 30 rows and ignore the skewness of scores, so they are taken at the levels of Efron's BCa (1987) with the
  acceleration and the bias of a mean, both skewness / 6√n, and with Student's t in place of the normal quantile
  (Hesterberg 2015).
- **Paired differences of right and wrong answers**: Bonett & Price's interval (2012), which adds one row won and one
  lost. Resampling 3 discordant rows of 200 gives an interval that is too narrow.
- **Any other paired difference**: also with these two rows added, of typical size, then the bootstrap with the
  quantiles of Student's t for the number of rows that differ, since only these carry information.
- **Corpus scores**, which are no mean of rows: the bootstrap through the recipe's `aggregate`; for differences the
  rows' jackknife pseudo-values (Tukey 1958; Miller 1974) replace the rows.
- **Values that are all equal**, or all but one for a corpus score: resampling would give an interval of width zero or
  little more, as if 20 right answers out of 20 proved that the model is never wrong.
  A value never seen in n rows may still have a share of up to u = z²/(n + z²) (Wilson's upper limit for 0 of n), and
  the interval extends to the mean that scores in [0, 1] with mean m would have if that share lay at either bound:
  [m − u·m, m + u·(1 − m)]. 4 rows with Smatch 0.8: u = 3.84/7.84 = 0.49, so [0.408, 0.898]. The same for corpus
  scores, between the bounds of `score_bounds`, and for paired differences with Bonett & Price's ± z√2/(n + 2), the
  interval of rows that all tie. The resamples show whether all rows but one are alike: one row of n is missing from
  (1 − 1/n)ⁿ of them, 25 to 37 %, and two rows from at most 13.5 %.

Everything is deterministic for a given seed. The interval treats the rows as a sample of such rows; it does not cover
the variance between training seeds.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from surefit.core.errors import DataError
from surefit.task import Scores, mean_scores

RESAMPLES = 10_000
AGGREGATE_RESAMPLES = 1_000
"""Number of resamples for scores that are not the mean of the rows' scores: each resample calls the recipe's
`aggregate`."""
POWER = 0.8
"""Probability with which a difference of the detectable size is found."""
Verdict = Literal["better", "worse", "undecided"]
Floats = NDArray[np.float64]
FEW = 2
"""Number of rows that differ from all others below which resampling is unreliable, for corpus scores and paired
differences. (For means, with quantiles corrected for skewness, one such row is enough: measured.)"""
_FEW_VALUES = 16
_NEARLY_EQUAL = 0.01  # relative to the largest difference: rows that hardly differ carry no information
_ALIKE = 0.2  # share of resamples that are equal, between 13.5 % with two rows that differ and 25 % with one
_GROUPS = 1_000
_MOST_ROWS = 10**9  # more than anyone scores
_CHUNK = 20_000_000  # random numbers held at once: 160 MB


@dataclass(frozen=True)
class MeanInterval:
    """A mean over n rows and its confidence interval."""

    mean: float
    low: float
    high: float
    n: int

    def document(self) -> dict[str, Any]:
        """Return the mean as artefacts and `--json` show it; the key is ci95 whatever the confidence."""
        return {"mean": self.mean, "ci95": [self.low, self.high], "n": self.n}


@dataclass(frozen=True)
class PairedDifference:
    """Difference of b from a on the same rows: the mean of b - a with its interval, and the number of rows where b
    scored more (wins), less (losses) or the same (ties)."""

    difference: float
    low: float
    high: float
    wins: int
    losses: int
    ties: int

    @property
    def verdict(self) -> Verdict:
        """Verdict on b: better, worse, or undecided if the interval contains zero."""
        return "better" if self.low > 0 else "worse" if self.high < 0 else "undecided"

    def document(self) -> dict[str, Any]:
        """Return the difference as artefacts and `--json` show it."""
        counts = {"wins": self.wins, "losses": self.losses, "ties": self.ties}
        return {"difference": self.difference, "ci95": [self.low, self.high], **counts}


def bootstrap_mean(values: ArrayLike, confidence: float = 0.95, seed: int = 0) -> MeanInterval:
    """Compute the mean of scores in [0, 1] and its interval.

    Raises:
        DataError: no values, or a value that is not finite.

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
        low, high = _quantiles(_resampled_means(sample, seed), len(sample), confidence, _skewness(sample))
        if sample.max() - sample.min() <= _NEARLY_EQUAL:
            lowest, highest = _all_equal(mean, len(sample), _z(confidence), 0.0, 1.0)
            low, high = min(low, lowest), max(high, highest)
    return MeanInterval(mean, low, high, len(sample))


def paired_bootstrap(a: ArrayLike, b: ArrayLike, confidence: float = 0.95, seed: int = 0) -> PairedDifference:
    """Compare the scores of two models on the same rows: the mean difference of b from a, its interval, and the rows
    won and lost.

    The difficulty of a row, which is the same for both models, cancels: only the rows' differences count.

    Raises:
        DataError: no values, a value that is not finite, or different numbers of rows.

    Of 200 rows b wins 30, loses 10 and ties on 160:

    >>> a = [0.0] * 30 + [1.0] * 10 + [1.0] * 160
    >>> b = [1.0] * 30 + [0.0] * 10 + [1.0] * 160
    >>> result = paired_bootstrap(a, b)
    >>> print(f"{result.difference:+.3f} [{result.low:+.3f}, {result.high:+.3f}]")
    +0.100 [+0.038, +0.160]
    >>> result.wins, result.losses, result.ties
    (30, 10, 160)
    """
    before, after = _sample(a), _sample(b)
    if len(before) != len(after):
        raise DataError(
            f"{len(before)} scores cannot be paired with {len(after)}", code="E7039", help="score the same rows twice"
        )
    differences = after - before
    wins, losses = int((differences > 0).sum()), int((differences < 0).sum())
    low, high = _of_differences(differences, confidence, seed)
    return PairedDifference(float(differences.mean()), low, high, wins, losses, len(differences) - wins - losses)


def _of_differences(
    differences: Floats, confidence: float, seed: int, differ: int | None = None
) -> tuple[float, float]:
    """Return the interval of the mean of paired differences, `differ` of which come from rows with different scores."""
    if differ is None:
        differ = int((np.abs(differences) > _NEARLY_EQUAL * np.abs(differences).max()).sum())
    size = math.sqrt(float((differences**2).sum()) / differ) if differ else 1.0
    extended = np.append(differences, [size, -size])
    mean, n = float(differences.mean()), len(extended)
    if np.isin(differences, (-1.0, 0.0, 1.0)).all():
        half = _z(confidence) * math.sqrt(float(extended.var()) / n)
        low, high = extended.mean() - half, extended.mean() + half
    elif differences.min() == differences.max():
        low, high = _all_equal(mean, len(differences), _z(confidence), -1.0, 1.0)
    else:
        low, high = _quantiles(_resampled_means(extended, seed), n, confidence, rows=differ + 2)
        if differ < FEW:  # too few to tell how much other rows would differ
            half = _z(confidence) * math.sqrt(2) / n
            low, high = min(low, mean - half), max(high, mean + half)
    # The two added rows pull the interval to zero, but it must contain the mean; differences of scores are at most 1,
    # except for ratios.
    widest = max(1.0, float(np.abs(differences).max()))
    return min(mean, max(-widest, float(low))), max(mean, min(widest, float(high)))


def mean_of_estimates(estimates: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Return the mean of independent estimates (value, low, high) with its interval by MOVER (Zou & Donner 2008).

    0.5 [0.4, 0.6] and 0.3 [0.2, 0.5]: the interval extends √(0.1² + 0.1²) / 2 below the mean of 0.4, and
    √(0.1² + 0.2²) / 2 above it.

    >>> [round(bound, 3) for bound in mean_of_estimates([(0.5, 0.4, 0.6), (0.3, 0.2, 0.5)])]
    [0.4, 0.329, 0.512]
    """
    n = len(estimates)
    mean = math.fsum(value for value, _, _ in estimates) / n
    below = math.hypot(*(value - low for value, low, _ in estimates)) / n
    above = math.hypot(*(high - value for value, _, high in estimates)) / n
    return mean, mean - below, mean + above


def resampled_aggregates(
    rows: Sequence[Scores], aggregate: Callable[[Sequence[Scores]], Scores], seed: int = 0
) -> dict[str, Floats]:
    """Return metric → corpus scores on 1,000 resamples of the rows, for recipes with an `aggregate` that is not the
    mean.

    The same seed and number of rows give the same resamples, so two models' results can be subtracted as pairs.
    """
    rng = np.random.default_rng(seed)
    draws = (rng.integers(0, len(rows), len(rows)) for _ in range(AGGREGATE_RESAMPLES))
    results = [aggregate([rows[i] for i in draw]) for draw in draws]
    return {name: np.array([result[name] for result in results if name in result]) for name in aggregate(rows)}


def paired_aggregates(
    before: Sequence[Scores],
    after: Sequence[Scores],
    aggregate: Callable[[Sequence[Scores]], Scores],
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, tuple[float, float, float]]:
    """Return metric → (difference of the corpus scores, low, high) of two models on the same rows."""
    old, new = aggregate(before), aggregate(after)
    pseudo = [_pseudo_values(rows, aggregate) for rows in (before, after)]
    # A row with equal scores still has a small pseudo-difference, because the rest of the corpus differs.
    differ = sum(row != row_after for row, row_after in zip(before, after, strict=True))
    intervals = {}
    for name in (name for name in new if name in old):
        difference, differences = new[name] - old[name], pseudo[1][name] - pseudo[0][name]
        low, high = _of_differences(differences, confidence, seed, min(differ, len(differences)))
        intervals[name] = (difference, min(low, difference), max(high, difference))
    return intervals


def spread_of_difference(
    before: Sequence[Scores], after: Sequence[Scores], metric: str, aggregate: Callable[[Sequence[Scores]], Scores]
) -> float:
    """Return the standard deviation of one row's contribution to a metric's difference."""
    differences = _row_differences(before, after, metric, aggregate)
    groups = 1.0 if aggregate is mean_scores else math.sqrt(len(before) / len(differences))
    return float(differences.std() * groups)


def detectable_difference(spread: float, n: int, confidence: float = 0.95) -> float:
    """Return the smallest true difference that n rows detect in four of five test sets: (z₀.₉₇₅ + z₀.₈) · spread / √n.

    Args:
        spread: standard deviation of a row's difference. If no row differed it is unknown; since fewer than six rows,
            all won, would not be significant (McNemar), the result is then 6 / n, at most 1.

    200 rows of which 40 differ by one (30 won, 10 lost; the standard deviation is 0.436):

    >>> round(detectable_difference(0.436, 200), 3)
    0.086
    """
    if spread == 0:
        return min(1.0, 6 / n)
    normal = NormalDist()
    return (normal.inv_cdf((1 + confidence) / 2) + normal.inv_cdf(POWER)) * spread / math.sqrt(n)


def rows_to_rule_out(
    before: Sequence[Scores],
    after: Sequence[Scores],
    metric: str,
    aggregate: Callable[[Sequence[Scores]], Scores],
    margin: float,
    confidence: float = 0.95,
) -> int | None:
    """Return the number of rows, differing as these do, for which the interval of the difference ends at -margin.

    Returns:
        None if there is no such number: the difference itself is a loss of the margin or more.

    Rows that all tie: z√2 / (n + 2) = 0.05 with n = 53.4.

    >>> same = [{"exact_match": 1.0}] * 20
    >>> rows_to_rule_out(same, same, "exact_match", mean_scores, margin=0.05)
    54
    """
    differences = _row_differences(before, after, metric, aggregate)
    mean = float(differences.mean())
    if mean <= -margin or margin <= 0:
        return None
    binary = bool(np.isin(differences, (-1.0, 0.0, 1.0)).all())
    z, rows_per_difference = _z(confidence), len(before) / len(differences) if aggregate is not mean_scores else 1.0
    if not binary and differences.min() == differences.max():  # see `_all_equal`
        return math.ceil(rows_per_difference * z**2 * ((1 + mean) / (margin + mean) - 1))
    differ = float((np.abs(differences) > _NEARLY_EQUAL * np.abs(differences).max()).mean())
    if aggregate is not mean_scores:
        differ = sum(row != row_after for row, row_after in zip(before, after, strict=True)) / len(before)
    squares = float((differences**2).mean())
    size = squares / differ if differ else 1.0

    def low(n: int) -> float:
        """Return the low end of the interval on n such rows, as in `_of_differences`."""
        center = mean * n / (n + 2)
        variance = (squares * n + 2 * size) / (n + 2) - center**2
        if binary:
            return center - z * math.sqrt(variance / (n + 2))
        return center - _t((1 + confidence) / 2, round(differ * n) + 1) * math.sqrt(variance / (n + 1))

    most = 1
    while low(most) < -margin:
        most *= 2
        if most > _MOST_ROWS:
            return None
    return math.ceil(rows_per_difference * bisect.bisect_left(range(most), -margin, lo=most // 2, key=low))


def _row_differences(
    before: Sequence[Scores], after: Sequence[Scores], metric: str, aggregate: Callable[[Sequence[Scores]], Scores]
) -> Floats:
    """Return the contribution of each row, or group of rows, to a metric's difference."""
    if aggregate is mean_scores:
        pairs = [(old[metric], new[metric]) for old, new in zip(before, after, strict=True) if metric in old]
        return np.array([new - old for old, new in pairs])
    old_values, new_values = (_pseudo_values(rows, aggregate)[metric] for rows in (before, after))
    return new_values - old_values


def _pseudo_values(rows: Sequence[Scores], aggregate: Callable[[Sequence[Scores]], Scores]) -> dict[str, Floats]:
    """Return metric → contribution of each row (or group of rows, if there are very many) to the corpus score: n times
    the score minus n - 1 times the score without it. Their mean is the score (jackknife), and they vary like
    independent values."""
    groups = min(len(rows), _GROUPS)
    bounds = [len(rows) * number // groups for number in range(groups + 1)]
    full_scores = aggregate(rows)
    if groups == 1:
        return {name: np.array([value]) for name, value in full_scores.items()}
    leave_one_out = [aggregate([*rows[:low], *rows[high:]]) for low, high in itertools.pairwise(bounds)]
    return {
        name: groups * value - (groups - 1) * np.array([scores.get(name, value) for scores in leave_one_out])
        for name, value in full_scores.items()
    }


def aggregate_intervals(
    rows: Sequence[Scores], aggregate: Callable[[Sequence[Scores]], Scores], confidence: float = 0.95, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Return metric → (low, high) of a corpus score.

    Four graphs without a match prove little:

    >>> rows, smatch = [{"matched": 0.0, "gold": 8.0}] * 4, lambda rows: {"smatch": sum(r["matched"] for r in rows)}
    >>> low, high = aggregate_intervals(rows, smatch)["smatch"]
    >>> print(f"[{low:.3f}, {high:.3f}]")
    [0.000, 0.490]
    """
    resampled, full_scores = resampled_aggregates(rows, aggregate, seed), aggregate(rows)
    intervals = {}
    for name, values in resampled.items():
        low, high = _quantiles(values, len(rows), confidence)
        if _rows_are_alike(values, len(rows)):
            lowest, highest = _all_equal(full_scores[name], len(rows), _z(confidence), *score_bounds(full_scores[name]))
            low, high = min(low, lowest), max(high, highest)
        intervals[name] = (low, high)
    return intervals


def score_bounds(score: float) -> tuple[float, float]:
    """Return the assumed bounds of a corpus score: 0 and 1, or -1 and 1 for a score below zero, such as a correlation;
    0 and 100 for a score above 1, such as BLEU; beyond these, twice the score and zero.

    >>> score_bounds(0.5), score_bounds(-0.2), score_bounds(28.4), score_bounds(250.0)
    ((0.0, 1.0), (-1.0, 1.0), (0.0, 100.0), (0.0, 500.0))
    """
    if abs(score) <= 1:
        return (-1.0 if score < 0 else 0.0), 1.0
    if score > 0:
        return 0.0, 100.0 if score <= 100 else 2 * score
    return 2 * score, 0.0


def _rows_are_alike(resampled: Floats, n: int) -> bool:
    """Return whether fewer than `FEW` of n rows differ from the others, judged by the scores of resamples.

    The lowest or highest of these is then the score without the differing row, in all resamples that lack this row. The
    values of single rows would not show it: many scores need two rows, or are the same for any single row.
    """
    if not len(resampled):
        return False
    tolerance = _NEARLY_EQUAL / n
    ends = (resampled <= resampled.min() + tolerance).mean(), (resampled >= resampled.max() - tolerance).mean()
    return bool(max(ends) >= _ALIKE or np.ptp(resampled) <= _NEARLY_EQUAL / math.sqrt(n))


def percentiles(resampled: Floats, confidence: float = 0.95) -> tuple[float, float]:
    """Return the quantiles that contain `confidence` of the resampled values between them."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return float(low), float(high)


def _quantiles(
    resampled: Floats, n: int, confidence: float, skewness: float = 0.0, rows: int | None = None
) -> tuple[float, float]:
    """Return quantiles of resampled means at corrected levels: for the bootstrap's spread, which is that of n rows and
    not of n - 1; with t for the normal quantile; and with BCa's shift for skewed values.

    Args:
        n: number of resampled rows.
        rows: number of rows among them that carry information; all by default.
    """
    if n < 2:
        return percentiles(resampled, confidence)
    wide = math.sqrt(n / (n - 1)) * _t((1 + confidence) / 2, (rows or n) - 1)
    shift, normal = skewness / (6 * math.sqrt(n)), NormalDist()
    levels = [normal.cdf(shift + (shift + z) / max(0.1, 1 - shift * (shift + z))) for z in (-wide, wide)]
    low, high = np.quantile(resampled, levels)
    return float(low), float(high)


def _skewness(sample: Floats) -> float:
    centred = sample - sample.mean()
    return float((centred**3).mean() / sample.std() ** 3)


def _t(level: float, freedom: int) -> float:
    """Return Student's quantile, by the expansion of Abramowitz & Stegun 26.7.5; within 0.2 % from 3 degrees of freedom
    on.

    >>> round(_t(0.975, 29), 3)
    2.045
    """
    z, v = NormalDist().inv_cdf(level), max(2, freedom)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    corrections = [term / v**power for power, term in enumerate(terms, start=1)]
    return z + math.fsum(corrections)


def _sample(values: ArrayLike) -> Floats:
    sample = np.asarray(values, dtype=np.float64)
    if sample.size == 0:
        raise DataError("there are no scores to average", code="E7040", help="evaluate at least one row")
    if not np.isfinite(sample).all():
        raise DataError("a score is not a finite number", code="E7041", help="correct the recipe's score function")
    return sample


def _resampled_means(sample: Floats, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    n = len(sample)
    distinct, counts = np.unique(sample, return_counts=True)
    if len(distinct) <= _FEW_VALUES:  # the count of each value is multinomial: no need to draw rows
        means: Floats = rng.multinomial(n, counts / n, size=RESAMPLES) @ distinct / n
        return means
    size = max(1, _CHUNK // n)
    sizes = [min(size, RESAMPLES - start) for start in range(0, RESAMPLES, size)]
    return np.concatenate([sample[rng.integers(0, n, (rows, n))].mean(axis=1) for rows in sizes])


def _wilson(share: float, n: int, z: float) -> tuple[float, float]:
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At 0 and 1 a limit equals the share; rounding must not move it beyond.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def _all_equal(value: float, n: int, z: float, lowest: float, highest: float) -> tuple[float, float]:
    unseen = z * z / (n + z * z)
    return value - unseen * max(0.0, value - lowest), value + unseen * max(0.0, highest - value)


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)
