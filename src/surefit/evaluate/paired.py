"""Two sets of scores on the same rows: the difference, how sure it is, and who won which row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from surefit.core.errors import DataError
from surefit.evaluate.stats import PairedDifference, mean_of_estimates, paired_aggregates, paired_bootstrap
from surefit.task import Scores, TaskRecipe, add_task_prefix, mean_scores, select_task_rows

ScoreRows = Sequence[Scores]
"""The scores of every row of a set, in the order of the rows."""


def paired_comparisons(a: str, b: str, rows: Mapping[str, ScoreRows], recipe: TaskRecipe) -> list[dict[str, Any]]:
    """Variant b against variant a on the same rows, one line per metric: what eval/summary.json holds."""
    return [_line(a, b, metric, found) for metric, found in paired_differences(a, b, rows[a], rows[b], recipe).items()]


def _line(a: str, b: str, metric: str, found: PairedDifference) -> dict[str, Any]:
    values = asdict(found)
    interval = [values.pop("low"), values.pop("high")]
    return {"a": a, "b": b, "metric": metric, "difference": values.pop("difference"), "ci95": interval, **values}


def paired_differences(
    a: str, b: str, before: ScoreRows, after: ScoreRows, recipe: TaskRecipe, confidence: float = 0.95
) -> dict[str, PairedDifference]:
    """Metric → b against a.

    Where a recipe has its own `aggregate`, differences are those of the corpus scores; a row is won or lost on its own
    value of the metric, or, where a row has none, on what `aggregate` makes of that row alone.

    Args:
        a, b: names, for messages.
        before, after: the scores of a and of b on the same rows.
        confidence: of the intervals.

    Raises:
        DataError: a metric that a row has for one of the two only.
    """
    if recipe.parts:
        return _differences_of_parts(a, b, before, after, recipe, confidence)
    metrics = list(dict.fromkeys(name for row in (*before, *after) for name in row if not name.startswith("_")))
    own = {metric: row_values(a, b, before, after, metric) for metric in metrics}
    if recipe.aggregate is mean_scores:
        return {metric: paired_bootstrap(*values, confidence) for metric, values in own.items()}
    alone = [[recipe.aggregate([row]) for row in rows] for rows in (before, after)]
    corpus = paired_aggregates(before, after, recipe.aggregate, confidence)
    found = {}
    for metric, (difference, low, high) in corpus.items():
        old, new = own.get(metric) or row_values(a, b, alone[0], alone[1], metric)
        wins, losses = (sum(x > y for x, y in zip(*pair, strict=True)) for pair in ((new, old), (old, new)))
        found[metric] = PairedDifference(difference, low, high, wins, losses, len(old) - wins - losses)
    return found


def _differences_of_parts(
    a: str, b: str, before: ScoreRows, after: ScoreRows, recipe: TaskRecipe, confidence: float
) -> dict[str, PairedDifference]:
    """Each task's as in a run of its own; of the mean over the tasks, rows won and lost are those of all tasks."""
    found: dict[str, PairedDifference] = {}
    primary = []
    for name, part in recipe.parts.items():
        if own := select_task_rows(name, before):
            of_part = paired_differences(a, b, own, select_task_rows(name, after), part, confidence)
            found |= add_task_prefix(name, of_part)
            primary.append(of_part[part.primary_metric])
    interval = mean_of_estimates([(one.difference, one.low, one.high) for one in primary])
    counts = (sum(one.wins for one in primary), sum(one.losses for one in primary), sum(one.ties for one in primary))
    return {recipe.primary_metric: PairedDifference(*interval, *counts), **found}


def row_values(a: str, b: str, before: ScoreRows, after: ScoreRows, metric: str) -> tuple[list[float], list[float]]:
    """A metric's values for a and for b, of the rows that have it.

    Raises:
        DataError: a row has it for one of the two only.
    """
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        if (metric in old) != (metric in new):
            raise DataError(
                f"row {number} has {metric!r} for {a if metric in old else b} but not for the other variant",
                code="E7018",
                help="a recipe's metric may depend on the row, but not on the answer: give such answers a zero",
            )
    return [row[metric] for row in before if metric in row], [row[metric] for row in after if metric in row]
