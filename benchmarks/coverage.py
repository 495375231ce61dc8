"""How often a 95 % interval holds the truth: simulated tests with the scores that tasks really have.

    python benchmarks/coverage.py            # every case, worst first
    python benchmarks/coverage.py --quick    # fewer tests of each
    python benchmarks/coverage.py --json

Each case is a population of rows whose true score is known. Test sets of n rows are drawn from it, and it is counted
how many of their intervals hold the truth. 0.95 is promised; `noise` is the standard error of the simulation itself.
Between 0.935 and 0.965 is called good. Above is a wide interval, which cannot be avoided where there are few distinct
outcomes (with two rows in a hundred that differ, most test sets say almost nothing); below is a broken promise. Shares
are computed exactly, once for exactly that share and once averaged over the shares within two points of it: which n and
share fall well together is chance, and nobody's model has a share of exactly 0.02. Intervals of means are made with
2,000 resamples instead of 10,000, which moves their ends by less than the noise.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefit.evaluate import stats

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]
LOW, HIGH = 0.935, 0.965
SIZES = (30, 50, 100, 200, 500)
POPULATION = 1_000_000
RESAMPLES = 2_000
NEAR = 0.02


@dataclass(frozen=True)
class Case:
    """A population, and what is asked about it.

    Attributes:
        kind: mean, difference, corpus or corpus difference.
        draw: n rows; of a corpus each row is (matched, answered, gold), of a difference of corpora both models' six.
        truth: the population's value.
    """

    kind: str
    name: str
    draw: Draw
    truth: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the tests")
    parser.add_argument("--kind", help="only this kind of score")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    started = time.perf_counter()
    stats.RESAMPLES = RESAMPLES
    found = [
        measure(case, n, _tests(case.kind) // (5 if options.quick else 1))
        for case in cases()
        if options.kind in (None, case.kind)
        for n in (SIZES if not case.kind.startswith("corpus") else SIZES[::2])
    ]
    if options.kind in (None, "share"):
        found += list(shares())
    found.sort(key=lambda row: row["coverage"])
    if options.json:
        print(json.dumps({"cases": found, "seconds": round(time.perf_counter() - started, 1)}))
        return
    print("| what | scores | rows | coverage | noise | mean width |\n|---|---|---|---|---|---|")
    for row in found:
        cells = [
            row["kind"],
            row["name"],
            row["n"],
            f"{row['coverage']:.3f}",
            f"{row['noise']:.3f}",
            f"{row['width']:.3f}",
        ]
        print(f"| {' | '.join(map(str, cells))} |")
    good = sum(LOW <= row["coverage"] <= HIGH for row in found)
    wide = sum(row["coverage"] > HIGH for row in found)
    print(f"\n{len(found)} cases: {good} good, {wide} wide, {len(found) - good - wide} below {LOW}; "
          f"{time.perf_counter() - started:.0f} s")  # fmt: skip


def _tests(kind: str) -> int:
    return {"mean": 2_000, "difference": 5_000, "corpus": 1_500, "corpus difference": 1_500}[kind]


def measure(case: Case, n: int, tests: int, seed: int = 2) -> dict[str, Any]:
    """Draw test sets, make their intervals, count."""
    rng = np.random.default_rng(seed)
    held, width, known = 0, 0.0, {}
    for _ in range(tests):
        rows = case.draw(rng, n)
        # Where rows have few values, many test sets are the same one but for the order.
        values, counts = np.unique(rows.round(12), axis=0, return_counts=True)
        key = (values.tobytes(), counts.tobytes()) if len(values) <= 3 else None
        if key is None or key not in known:
            low, high = interval(case.kind, rows)
            known[key] = (low, high)
        low, high = known[key]
        held += low - 1e-12 <= case.truth <= high + 1e-12
        width += high - low
    coverage = held / tests
    noise = math.sqrt(max(coverage * (1 - coverage), 1e-4) / tests)
    return {"kind": case.kind, "name": case.name, "n": n, "coverage": coverage, "noise": noise, "width": width / tests}


def shares(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """The exact coverage of shares: the interval depends on the number of right answers only, and that is binomial."""
    for n in sizes:
        found = [stats.bootstrap_mean([1.0] * right + [0.0] * (n - right)) for right in range(n + 1)]
        for share in (0.02, 0.05, 0.1, 0.3, 0.5, 0.8, 0.94, 0.98):
            near = np.linspace(max(0.005, share - NEAR), min(0.995, share + NEAR), 41)
            for name, values in ((f"exactly {share:.0%} right", [share]), (f"about {share:.0%} right", near.tolist())):
                coverage = math.fsum(_exact(found, n, value) for value in values) / len(values)
                width = math.fsum((i.high - i.low) * _chance(k, n, share) for k, i in enumerate(found))
                yield {"kind": "share", "name": name, "n": n, "coverage": coverage, "noise": 0.0, "width": width}


def _exact(found: Sequence[stats.MeanInterval], n: int, share: float) -> float:
    return math.fsum(_chance(k, n, share) for k, i in enumerate(found) if i.low - 1e-12 <= share <= i.high + 1e-12)


def _chance(right: int, n: int, share: float) -> float:
    ways = math.lgamma(n + 1) - math.lgamma(right + 1) - math.lgamma(n - right + 1)
    return math.exp(ways + right * math.log(share) + (n - right) * math.log1p(-share))


def interval(kind: str, rows: Floats) -> tuple[float, float]:
    """What SureFit says of these rows."""
    if kind == "mean":
        found = stats.bootstrap_mean(rows)
        return found.low, found.high
    if kind == "difference":
        pair = stats.paired_bootstrap(np.zeros(len(rows)), rows)
        return pair.low, pair.high
    if kind == "corpus":
        return stats.aggregate_intervals(_scores(rows), _f1)["f1"]
    return stats.paired_aggregates(_scores(rows[:, :3]), _scores(rows[:, 3:]), _f1)["f1"][1:]


def _scores(rows: Floats) -> list[dict[str, float]]:
    return [{"matched": m, "answered": a, "gold": g} for m, a, g in rows.tolist()]


def _f1(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    matched = answered = gold = 0.0
    for row in rows:
        matched += row["matched"]
        answered += row["answered"]
        gold += row["gold"]
    return {"f1": 2 * matched / (answered + gold)}


def cases() -> Iterator[Case]:
    """The populations."""
    for name, draw in MEANS.items():
        yield Case("mean", name, draw, float(draw(np.random.default_rng(0), POPULATION).mean()))
    for won, lost in ((0.01, 0.01), (0.02, 0.0), (0.03, 0.01), (0.05, 0.02), (0.1, 0.1), (0.3, 0.05), (0.7, 0.02)):
        yield Case("difference", f"{won:.0%} won, {lost:.0%} lost", _pairs(won, lost), won - lost)
    for name, draw in GRADED.items():
        yield Case("difference", name, draw, float(draw(np.random.default_rng(0), POPULATION).mean()))
    rows = smatch(np.random.default_rng(0), POPULATION)
    yield Case("corpus", "Smatch, micro", smatch, _f1_of(rows))
    for changed in (0.1, 0.5):
        draw = _smatch_pairs(changed)
        rows = draw(np.random.default_rng(0), POPULATION)
        truth = _f1_of(rows[:, 3:]) - _f1_of(rows[:, :3])
        yield Case("corpus difference", f"Smatch, {changed:.0%} of the graphs differ", draw, truth)


def _pairs(won: float, lost: float) -> Draw:
    return lambda rng, n: rng.choice([1.0, -1.0, 0.0], n, p=[won, lost, 1 - won - lost])


def _mixed(value: float, share: float, a: float, b: float) -> Draw:
    return lambda rng, n: np.where(rng.random(n) < share, value, rng.beta(a, b, n))


def _few(share: float, mean: float) -> Draw:
    return lambda rng, n: np.where(rng.random(n) < share, np.clip(rng.normal(mean, 0.3, n), -1, 1), 0.0)


MEANS: dict[str, Draw] = {
    "ROUGE-L about .25": lambda rng, n: rng.beta(3, 9, n),
    "ROUGE-2 about .10, skewed": lambda rng, n: rng.beta(0.8, 7.2, n),
    "60 % zeros, else spread": _mixed(0.0, 0.6, 2, 2),
    "90 % ones, else spread": _mixed(1.0, 0.9, 4, 4),
    "Smatch per row about .8": lambda rng, n: rng.beta(8, 2, n),
    "a quarter steps, 0 to 1": lambda rng, n: rng.binomial(4, rng.beta(3, 2, n)) / 4,
}
GRADED: dict[str, Draw] = {
    "4 % of rows differ, graded, no effect": _few(0.04, 0.0),
    "10 % of rows differ, graded, +.01": _few(0.1, 0.1),
    "50 % of rows differ, graded, +.05": _few(0.5, 0.1),
    "ROUGE differences": lambda rng, n: rng.normal(0.02, 0.1, n),
}


def smatch(rng: np.random.Generator, n: int) -> Floats:
    """Triples matched, answered and gold of sentences from short to long."""
    gold = np.maximum(3, rng.lognormal(2.8, 0.7, n).round())
    answered = np.maximum(2, (gold * rng.uniform(0.8, 1.15, n)).round())
    quality = np.where(rng.random(n) < 0.3, 1.0, rng.beta(6, 2, n))
    return np.stack([np.floor(quality * np.minimum(answered, gold)), answered, gold], axis=1)


def _smatch_pairs(changed: float) -> Draw:
    def draw(rng: np.random.Generator, n: int) -> Floats:
        before = smatch(rng, n)
        after = before.copy()
        other = np.floor(rng.beta(6, 2, n) * np.minimum(before[:, 1], before[:, 2]))
        after[:, 0] = np.where(rng.random(n) < changed, other, before[:, 0])
        return np.concatenate([before, after], axis=1)

    return draw


def _f1_of(rows: Floats) -> float:
    matched, answered, gold = rows.sum(axis=0)
    return float(2 * matched / (answered + gold))


if __name__ == "__main__":
    main()
