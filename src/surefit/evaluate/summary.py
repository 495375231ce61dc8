"""Builds eval/summary.json from scored rows: means with intervals, paired comparisons, the gate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from surefit.config.schema import GateSection
from surefit.core.rundir import RunDir
from surefit.evaluate.answers import BASELINE, GRAMMAR
from surefit.evaluate.estimates import compute_estimates
from surefit.evaluate.gate import evaluate_gate
from surefit.evaluate.paired import ScoreRows, paired_comparisons
from surefit.task import TaskRecipe


def summarize_evaluation(
    recipe: TaskRecipe,
    gate: GateSection | None,
    sets: Mapping[str, Mapping[str, ScoreRows]],
    left_out: Sequence[str],
    run: RunDir | None = None,
    set_aside: Sequence[str] = (),
    recipes: Mapping[str, TaskRecipe] | None = None,
) -> dict[str, Any]:
    """Build the content of eval/summary.json.

    Args:
        recipe: the task, with the metric that decides on the held-out rows.
        gate: the gate of the config, or None.
        sets: set → variant → its rows; variants in the order of training, sets with at least one.
        left_out: scores on disk that are not comparable, with the reasons.
        run: run directory with the answers, for a gate against another run.
        set_aside: scores that were moved to eval/earlier/, with their new paths.
        recipes: set → the task with the metric that decides on that set; by default `recipe`.
    """
    lists = {"left_out": list(left_out), "set_aside": list(set_aside)}
    summary: dict[str, Any] = {"primary_metric": recipe.primary_metric, "sets": {}, **lists}
    for name, variants in sets.items():
        judge = (recipes or {}).get(name, recipe)
        estimates = {variant: compute_estimates(rows, judge) for variant, rows in variants.items()}
        summary["sets"][name] = {
            "primary_metric": judge.primary_metric,
            "n": len(next(iter(variants.values()))),
            "variants": {
                variant: {metric: {"mean": e.mean, "ci95": [e.low, e.high]} for metric, e in metrics.items()}
                for variant, metrics in estimates.items()
            },
            "comparisons": [line for a, b in _pairs(variants) for line in paired_comparisons(a, b, variants, judge)],
        }
    summary["gate"] = evaluate_gate(gate, recipe, sets.get("eval", {}), run) if gate else None
    return summary


def _pairs(variants: Iterable[str]) -> list[tuple[str, str]]:
    """Return the pairs that are compared: models with the same settings, a model with both settings, and every model
    with base and baselines."""
    return [(a, b) for a, b in combinations(variants, 2) if _comparable(a, b)]


def _comparable(a: str, b: str) -> bool:
    if a.startswith(BASELINE):
        return not b.startswith(BASELINE)
    same_model = a.removesuffix(GRAMMAR) == b.removesuffix(GRAMMAR)
    return same_model or a.startswith("base") or a.endswith(GRAMMAR) == b.endswith(GRAMMAR)
