"""Means of row scores with confidence intervals, aggregated as a recipe defines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefit.core.errors import DataError
from surefit.evaluate.paired import ScoreRows
from surefit.evaluate.stats import MeanInterval, aggregate_intervals, bootstrap_mean, mean_of_estimates
from surefit.facts.pair_scores import is_read
from surefit.task import TaskRecipe, add_task_prefix, mean_scores, select_task_rows


def compute_estimates(rows: ScoreRows, recipe: TaskRecipe, confidence: float = 0.95) -> dict[str, MeanInterval]:
    """Return metric → mean with its interval, over the rows that have the metric.

    Args:
        confidence: confidence of the intervals.

    Raises:
        DataError: the recipe's scores lack its primary metric.
    """
    if recipe.parts:
        return _estimates_of_parts(rows, recipe, confidence)
    if recipe.aggregate is mean_scores:
        names = dict.fromkeys(name for row in rows for name in row if not name.startswith("_"))
        estimates = {name: bootstrap_mean([row[name] for row in rows if name in row], confidence) for name in names}
    else:
        intervals_of = aggregate_intervals(rows, recipe.aggregate, confidence)
        estimates = {
            name: MeanInterval(value, *intervals_of[name], len(rows)) for name, value in recipe.aggregate(rows).items()
        }
    # A baseline's answers, and a server's, have no likelihood.
    if recipe.primary_metric not in estimates and not is_read(recipe.primary_metric):
        raise DataError(
            f"the recipe {recipe.name} returned {', '.join(estimates)}, but not its primary {recipe.primary_metric}",
            code="E7042",
            help="correct the recipe's score or primary_metric",
        )
    return estimates


def _estimates_of_parts(rows: ScoreRows, recipe: TaskRecipe, confidence: float) -> dict[str, MeanInterval]:
    """Return each task's estimates as in its own run; the primary metric is the mean over the tasks with rows."""
    estimates: dict[str, MeanInterval] = {}
    primary = []
    for name, part in recipe.parts.items():
        if task_rows := select_task_rows(name, rows):
            task_estimates = compute_estimates(task_rows, part, confidence)
            estimates |= add_task_prefix(name, task_estimates)
            task_primary = task_estimates[part.primary_metric]
            primary.append((task_primary.mean, task_primary.low, task_primary.high))
    return {recipe.primary_metric: MeanInterval(*mean_of_estimates(primary), len(rows)), **estimates}


def documents(estimates: Mapping[str, MeanInterval]) -> dict[str, dict[str, Any]]:
    """Return the estimates as artefacts and `--json` show them."""
    return {name: estimate.document() for name, estimate in estimates.items()}
