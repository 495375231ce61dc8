"""From scored rows to a verdict: means with intervals, paired comparisons, the gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from surefit.config.schema import GateSection
from surefit.core.errors import ConfigError, DataError, did_you_mean
from surefit.evaluate.stats import Floats, bootstrap_mean, paired_bootstrap, percentiles, resampled_aggregates
from surefit.task import Scores, TaskRecipe, mean_scores

Rows = Sequence[Scores]
"""The scores of every row of a set, in the order of the rows."""


def estimates(rows: Rows, recipe: TaskRecipe) -> dict[str, dict[str, Any]]:
    """Metric → {"mean", "ci95": [low, high], "n": rows it applies to}.

    Raises:
        DataError: the recipe did not give its primary metric.
    """
    if recipe.aggregate is mean_scores:
        intervals = {name: bootstrap_mean([row[name] for row in rows if name in row]) for name in _metrics(rows)}
        found = {name: _estimate(i.mean, (i.low, i.high), i.n) for name, i in intervals.items()}
    else:
        resampled = resampled_aggregates(rows, recipe.aggregate)
        found = {
            name: _estimate(value, percentiles(resampled[name]), len(rows))
            for name, value in recipe.aggregate(rows).items()
        }
    if recipe.primary_metric not in found:
        raise DataError(
            f"the recipe {recipe.name} gave no {recipe.primary_metric}, its primary metric, but {', '.join(found)}",
            help="correct the recipe's score or primary_metric",
        )
    return found


def _estimate(mean: float, interval: tuple[float, float], n: int) -> dict[str, Any]:
    return {"mean": mean, "ci95": list(interval), "n": n}


def _metrics(rows: Rows) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def compare(a: str, b: str, rows: Mapping[str, Rows], recipe: TaskRecipe) -> list[dict[str, Any]]:
    """Variant b against variant a on the same rows, one line per metric."""
    before, after = rows[a], rows[b]
    lines = []
    corpus = {} if recipe.aggregate is mean_scores else _corpus_differences(before, after, recipe)
    for metric in _metrics([*before, *after]):
        pairs = [(old[metric], new[metric]) for old, new in _paired(a, b, before, after, metric)]
        result = paired_bootstrap([old for old, _ in pairs], [new for _, new in pairs])
        difference, interval = corpus.get(metric, (result.difference, (result.low, result.high)))
        lines.append(
            {
                "a": a,
                "b": b,
                "metric": metric,
                "difference": difference,
                "ci95": list(interval),
                "wins": result.wins,
                "losses": result.losses,
                "ties": result.ties,
            }
        )
    return lines


def _paired(a: str, b: str, before: Rows, after: Rows, metric: str) -> list[tuple[Scores, Scores]]:
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        if (metric in old) != (metric in new):
            raise DataError(
                f"row {number} has {metric!r} for {a if metric in old else b} but not for the other variant",
                help="a recipe's metric may depend on the row, but not on the answer: give such answers a zero",
            )
    return [(old, new) for old, new in zip(before, after, strict=True) if metric in old]


def _corpus_differences(before: Rows, after: Rows, recipe: TaskRecipe) -> dict[str, tuple[float, tuple[float, float]]]:
    old, new = recipe.aggregate(before), recipe.aggregate(after)
    resampled_old: dict[str, Floats] = resampled_aggregates(before, recipe.aggregate)
    resampled_new: dict[str, Floats] = resampled_aggregates(after, recipe.aggregate)
    return {name: (new[name] - old[name], percentiles(resampled_new[name] - resampled_old[name])) for name in old}


def summarise(
    recipe: TaskRecipe, gate: GateSection | None, sets: Mapping[str, Mapping[str, Rows]], left_out: Sequence[str]
) -> dict[str, Any]:
    """The content of eval/summary.json.

    Args:
        recipe: the task.
        gate: the config's condition, or None.
        sets: set → variant → its rows; variants in the order of training, sets with at least one.
        left_out: scores on disk that are not comparable, and why.
    """
    summary: dict[str, Any] = {"primary_metric": recipe.primary_metric, "sets": {}, "left_out": list(left_out)}
    for name, variants in sets.items():
        found = {variant: estimates(rows, recipe) for variant, rows in variants.items()}
        summary["sets"][name] = {
            "n": len(next(iter(variants.values()))),
            "variants": {v: {m: {k: e[k] for k in ("mean", "ci95")} for m, e in found[v].items()} for v in found},
            "comparisons": [line for a, b in combinations(variants, 2) for line in compare(a, b, variants, recipe)],
        }
    summary["gate"] = judge(gate, recipe.primary_metric, summary["sets"].get("eval")) if gate else None
    return summary


def judge(gate: GateSection, primary_metric: str, scored: Mapping[str, Any] | None) -> dict[str, Any]:
    """Whether the tuned model (the last of the variants) may pass, and why: {"passed", "reason"}.

    Raises:
        ConfigError: the gate's metric is not one that the recipe gives.
    """
    variants = scored["variants"] if scored else {}
    tuned = next((name for name in reversed(variants) if name != "base"), None)
    if scored is None or tuned is None:
        return {"passed": False, "reason": "the tuned model has not been scored"}
    metric = gate_metric(gate, primary_metric, variants[tuned])
    mean = variants[tuned][metric]["mean"]
    reasons, failures = [f"{metric} of {tuned} is {mean:.3f}"], list[str]()
    if gate.min is not None:
        (reasons if mean >= gate.min else failures).append(f"at least {gate.min:g} is required")
    if gate.not_worse_than is not None:
        lines = [c for c in scored["comparisons"] if (c["a"], c["b"], c["metric"]) == ("base", tuned, metric)]
        if not lines:
            failures.append("the base model has not been scored")
        else:
            low, high = lines[0]["ci95"]
            change = f"{lines[0]['difference']:+.3f} [{low:+.3f}, {high:+.3f}] against the base"
            (failures if high < 0 else reasons).append(change)
    return {"passed": not failures, "reason": "; ".join([reasons[0], *failures] if failures else reasons)}


def gate_metric(gate: GateSection, primary_metric: str, metrics: Mapping[str, Any]) -> str:
    """The metric that a gate looks at.

    Raises:
        ConfigError: the recipe does not give it.
    """
    metric = gate.metric or primary_metric
    if metric not in metrics:
        raise ConfigError(
            f"the recipe has no metric {metric!r}{did_you_mean(metric, metrics)}",
            field="evaluate.gate.metric",
            help=f"choose from {', '.join(metrics)}",
        )
    return metric
