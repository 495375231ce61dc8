"""Ranking of checkpoints and the early-stopping test: pure functions of the evaluations.

Both are decided from the held-out lines of metrics.jsonl alone, which are the same in a resumed and in an uninterrupted
run: it keeps the same checkpoints and stops at the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LOSSES = ("eval_loss", "eval_perplexity")
"""Metrics of every run, lower is better; a recipe's metrics are in [0, 1], and higher is better."""


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation's value of a metric.

    Attributes:
        step: optimizer steps before it.
        value: the value, or None where it was not finite: never the best.
    """

    step: int
    value: float | None


def eval_points(lines: Iterable[Mapping[str, Any]], metric: str) -> list[EvalPoint]:
    """Return the values of one metric in the held-out lines, in their order."""
    return [EvalPoint(line["step"], line[metric]) for line in lines if metric in line]


def lower_is_better(metric: str) -> bool:
    """Return whether a metric is a loss."""
    return metric in LOSSES


def rank_checkpoints(found: Sequence[EvalPoint], metric: str) -> list[EvalPoint]:
    """Return the finite points, the best first; of equals, the earlier first.

    >>> points = [EvalPoint(2, 0.5), EvalPoint(4, 0.7), EvalPoint(6, None), EvalPoint(8, 0.7)]
    >>> [point.step for point in rank_checkpoints(points, "exact_match")]
    [4, 8, 2]
    """
    sign = 1 if lower_is_better(metric) else -1
    return sorted(
        (score for score in found if score.value is not None), key=lambda score: (sign * (score.value or 0), score.step)
    )


def count_evals_since_best(found: Sequence[EvalPoint], metric: str) -> int:
    """Return the number of evaluations since the best one.

    >>> points = [EvalPoint(2, 1.0), EvalPoint(4, 0.9), EvalPoint(6, 0.9), EvalPoint(8, None)]
    >>> count_evals_since_best(points, "eval_loss")
    2
    """
    best = rank_checkpoints(found, metric)
    return len(found) - 1 - found.index(best[0]) if best else len(found)
