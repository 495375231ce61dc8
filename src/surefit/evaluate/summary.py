"""From scored rows to the content of eval/summary.json: means with intervals, paired comparisons, the gate."""

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
) -> dict[str, Any]:
    """The content of eval/summary.json.

    Args:
        recipe: the task.
        gate: the config's condition, or None.
        sets: set → variant → its rows; variants in the order of training, sets with at least one.
        left_out: scores on disk that are not comparable, and why.
        run: where the answers lie, for a gate that asks about another run.
        set_aside: scores that were moved to keep them, and where they are now.
    """
    told = {"left_out": list(left_out), "set_aside": list(set_aside)}
    summary: dict[str, Any] = {"primary_metric": recipe.primary_metric, "sets": {}, **told}
    for name, variants in sets.items():
        found = {variant: compute_estimates(rows, recipe) for variant, rows in variants.items()}
        summary["sets"][name] = {
            "n": len(next(iter(variants.values()))),
            "variants": {v: {m: {k: e[k] for k in ("mean", "ci95")} for m, e in found[v].items()} for v in found},
            "comparisons": [line for a, b in _pairs(variants) for line in paired_comparisons(a, b, variants, recipe)],
        }
    summary["gate"] = evaluate_gate(gate, recipe, sets.get("eval", {}), run) if gate else None
    return summary


def _pairs(variants: Iterable[str]) -> list[tuple[str, str]]:
    """What is worth comparing: models asked the same way, a model asked both ways, and all with base and baselines."""
    return [(a, b) for a, b in combinations(variants, 2) if _comparable(a, b)]


def _comparable(a: str, b: str) -> bool:
    if a.startswith(BASELINE):
        return not b.startswith(BASELINE)
    same_model = a.removesuffix(GRAMMAR) == b.removesuffix(GRAMMAR)
    return same_model or a.startswith("base") or a.endswith(GRAMMAR) == b.endswith(GRAMMAR)
