"""Which checkpoints are the best, and when a run has stopped improving: pure functions of what was measured.

Both are decided from the held-out lines of metrics.jsonl alone, which a resumed run has as the uninterrupted one has
them: it keeps the same checkpoints and stops at the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LOSSES = ("eval_loss", "eval_perplexity")
"""What is measured of every run, and lower is better; a recipe's metrics are in [0, 1], and higher is better."""


@dataclass(frozen=True)
class EvalPoint:
    """What one measurement gave.

    Attributes:
        step: optimizer steps before it.
        value: None where it was not finite: never the best.
    """

    step: int
    value: float | None


def eval_points(lines: Iterable[Mapping[str, Any]], metric: str) -> list[EvalPoint]:
    """The held-out lines' values of one metric, in their order."""
    return [EvalPoint(line["step"], line[metric]) for line in lines if metric in line]


def lower_is_better(metric: str) -> bool:
    """Whether a metric is a loss."""
    return metric in LOSSES


def rank_checkpoints(found: Sequence[EvalPoint], metric: str) -> list[EvalPoint]:
    """The finite ones, the best first; of equals, the earlier.

    >>> points = [EvalPoint(2, 0.5), EvalPoint(4, 0.7), EvalPoint(6, None), EvalPoint(8, 0.7)]
    >>> [point.step for point in rank_checkpoints(points, "exact_match")]
    [4, 8, 2]
    """
    sign = 1 if lower_is_better(metric) else -1
    return sorted(
        (score for score in found if score.value is not None), key=lambda score: (sign * (score.value or 0), score.step)
    )


def count_evals_since_best(found: Sequence[EvalPoint], metric: str) -> int:
    """How many measurements there have been since the best one.

    >>> points = [EvalPoint(2, 1.0), EvalPoint(4, 0.9), EvalPoint(6, 0.9), EvalPoint(8, None)]
    >>> count_evals_since_best(points, "eval_loss")
    2
    """
    best = rank_checkpoints(found, metric)
    return len(found) - 1 - found.index(best[0]) if best else len(found)
