"""Scores of rows as means with confidence intervals, as a recipe puts them together."""

from __future__ import annotations

from typing import Any

from surefit.core.errors import DataError
from surefit.evaluate.paired import ScoreRows
from surefit.evaluate.stats import aggregate_intervals, bootstrap_mean, mean_of_estimates
from surefit.task import TaskRecipe, add_task_prefix, mean_scores, select_task_rows


def compute_estimates(rows: ScoreRows, recipe: TaskRecipe, confidence: float = 0.95) -> dict[str, dict[str, Any]]:
    """Metric → {"mean", "ci95": [low, high], "n": rows it applies to}.

    Args:
        confidence: of the intervals; under "ci95" even where it is another.

    Raises:
        DataError: the recipe did not give its primary metric.
    """
    if recipe.parts:
        return _estimates_of_parts(rows, recipe, confidence)
    if recipe.aggregate is mean_scores:
        intervals = {
            name: bootstrap_mean([row[name] for row in rows if name in row], confidence) for name in _metrics(rows)
        }
        found = {name: _estimate(i.mean, (i.low, i.high), i.n) for name, i in intervals.items()}
    else:
        intervals_of = aggregate_intervals(rows, recipe.aggregate, confidence)
        found = {
            name: _estimate(value, intervals_of[name], len(rows)) for name, value in recipe.aggregate(rows).items()
        }
    if recipe.primary_metric not in found:
        raise DataError(
            f"the recipe {recipe.name} gave no {recipe.primary_metric}, its primary metric, but {', '.join(found)}",
            code="E7042",
            help="correct the recipe's score or primary_metric",
        )
    return found


def _estimates_of_parts(rows: ScoreRows, recipe: TaskRecipe, confidence: float) -> dict[str, dict[str, Any]]:
    """Each task's as in a run of its own; the primary metric is the mean over the tasks that have rows here."""
    found: dict[str, dict[str, Any]] = {}
    primary = []
    for name, part in recipe.parts.items():
        if own := select_task_rows(name, rows):
            estimated = compute_estimates(own, part, confidence)
            found |= add_task_prefix(name, estimated)
            deciding = estimated[part.primary_metric]
            primary.append((deciding["mean"], *deciding["ci95"]))
    mean, low, high = mean_of_estimates(primary)
    return {recipe.primary_metric: _estimate(mean, (low, high), len(rows)), **found}


def _estimate(mean: float, interval: tuple[float, float], n: int) -> dict[str, Any]:
    return {"mean": mean, "ci95": list(interval), "n": n}


def _metrics(rows: ScoreRows) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row if not name.startswith("_")))
