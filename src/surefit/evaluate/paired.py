"""Two sets of scores on the same rows: the difference, its interval, and the rows won and lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surefit.core.errors import DataError
from surefit.evaluate.stats import PairedDifference, mean_of_estimates, paired_aggregates, paired_bootstrap
from surefit.facts.pair_scores import is_read
from surefit.task import Scores, TaskRecipe, add_task_prefix, mean_scores, select_task_rows

ScoreRows = Sequence[Scores]
"""Scores of every row of a set, in the order of the rows."""


def paired_comparisons(a: str, b: str, rows: Mapping[str, ScoreRows], recipe: TaskRecipe) -> list[dict[str, Any]]:
    """Compare variant b with variant a on the same rows; return one line of eval/summary.json per metric."""
    differences = paired_differences(a, b, rows[a], rows[b], recipe)
    return [{"a": a, "b": b, "metric": metric, **diff.document()} for metric, diff in differences.items()]


def paired_differences(
    a: str, b: str, before: ScoreRows, after: ScoreRows, recipe: TaskRecipe, confidence: float = 0.95
) -> dict[str, PairedDifference]:
    """Return metric → difference of b from a.

    If a recipe has its own `aggregate`, the differences are between the corpus scores; a row is won or lost by its own
    value of the metric or, if it has none, by the result of `aggregate` for that row alone.

    Args:
        a, b: names, for messages.
        before, after: the scores of a and of b on the same rows.
        confidence: confidence of the intervals.

    Raises:
        DataError: a row has a metric for only one of the two.
    """
    if recipe.parts:
        return _differences_of_parts(a, b, before, after, recipe, confidence)
    names = dict.fromkeys(name for row in (*before, *after) for name in row if not name.startswith("_"))
    # A baseline's answers, and a server's, have no likelihood, and files of predictions may have none.
    metrics = [
        name for name in names if not is_read(name) or all(any(name in row for row in rows) for rows in (before, after))
    ]
    values_by_metric = {metric: _row_values(a, b, before, after, metric) for metric in metrics}
    if recipe.aggregate is mean_scores:
        return {metric: paired_bootstrap(*values, confidence) for metric, values in values_by_metric.items()}
    single_row_scores = [[recipe.aggregate([row]) for row in rows] for rows in (before, after)]
    corpus = paired_aggregates(before, after, recipe.aggregate, confidence)
    differences = {}
    for metric, (difference, low, high) in corpus.items():
        old, new = values_by_metric.get(metric) or _row_values(a, b, single_row_scores[0], single_row_scores[1], metric)
        wins, losses = (sum(x > y for x, y in zip(*pair, strict=True)) for pair in ((new, old), (old, new)))
        differences[metric] = PairedDifference(difference, low, high, wins, losses, len(old) - wins - losses)
    return differences


def _differences_of_parts(
    a: str, b: str, before: ScoreRows, after: ScoreRows, recipe: TaskRecipe, confidence: float
) -> dict[str, PairedDifference]:
    """Return each task's differences as in its own run; for the mean over the tasks, the rows won and lost are summed
    over all tasks."""
    differences: dict[str, PairedDifference] = {}
    primary = []
    for name, part in recipe.parts.items():
        if task_rows := select_task_rows(name, before):
            part_differences = paired_differences(a, b, task_rows, select_task_rows(name, after), part, confidence)
            differences |= add_task_prefix(name, part_differences)
            primary.append(part_differences[part.primary_metric])
    interval = mean_of_estimates([(diff.difference, diff.low, diff.high) for diff in primary])
    counts = (
        sum(diff.wins for diff in primary),
        sum(diff.losses for diff in primary),
        sum(diff.ties for diff in primary),
    )
    return {recipe.primary_metric: PairedDifference(*interval, *counts), **differences}


def _row_values(a: str, b: str, before: ScoreRows, after: ScoreRows, metric: str) -> tuple[list[float], list[float]]:
    """Return a metric's values for a and for b, for the rows that have it; a likelihood's for the rows that both have.

    Raises:
        DataError: a row has it for only one of the two.
    """
    if is_read(metric):  # one side may have had no room for the answer behind a long prompt
        pairs = [
            (old[metric], new[metric])
            for old, new in zip(before, after, strict=True)
            if metric in old and metric in new
        ]
        return [old for old, _ in pairs], [new for _, new in pairs]
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        if (metric in old) != (metric in new):
            raise DataError(
                f"row {number} has {metric!r} for {a if metric in old else b} but not for the other variant",
                code="E7018",
                help="a recipe's metric may depend on the row, but not on the answer: give such answers a zero",
            )
    return [row[metric] for row in before if metric in row], [row[metric] for row in after if metric in row]
