"""The gate: whether the tuned model may pass, for pipelines that look at an exit code.

`min` is about the mean. `not_worse_than` asks about the difference on the same rows, to the base, to a baseline of the
recipe or to what another run ships: only a difference that is surely below zero fails. A run of several tasks passes
when none of them is worse, unless the gate names one metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surefit.config.schema import GateSection
from surefit.core.errors import ConfigError, DataError, did_you_mean
from surefit.core.rundir import RunDir
from surefit.evaluate.answers import BASELINE, Answers, base_of, read_run, read_variant, same_rows, shipped
from surefit.evaluate.paired import Rows, differences
from surefit.task import TaskRecipe


def judge(gate: GateSection, recipe: TaskRecipe, scored: Mapping[str, Rows], run: RunDir | None) -> dict[str, Any]:
    """Whether the tuned model may pass, and why: {"passed", "reason"}.

    What cannot be judged, because a score is missing or belongs to other rows, does not pass.

    Args:
        scored: variant → the scores of its rows on the held-out set.
        run: where the answers to these rows lie; only a gate against another run needs it.

    Raises:
        ConfigError: the recipe gives no such metric, or `not_worse_than` names nothing that there is.
    """
    require_reference(gate, recipe)
    tuned = shipped(scored)
    if tuned is None:
        return {"passed": False, "reason": "the tuned model has not been scored"}
    means = recipe.aggregate(scored[tuned])
    metric = gate_metric(gate, recipe.primary_metric, means)
    reasons, failures = [f"{metric} of {tuned} is {means[metric]:.3f}"], list[str]()
    if gate.min is not None:
        (reasons if means[metric] >= gate.min else failures).append(f"at least {gate.min:g} is required")
    if gate.not_worse_than is not None:
        try:
            worse, text = _against(gate, recipe, metric, scored, tuned, run)
        except DataError as error:
            worse, text = True, f"cannot be compared with {gate.not_worse_than}: {error.message}"
        (failures if worse else reasons).append(text)
    return {"passed": not failures, "reason": "; ".join([reasons[0], *failures] if failures else reasons)}


def _against(
    gate: GateSection, recipe: TaskRecipe, metric: str, scored: Mapping[str, Rows], tuned: str, run: RunDir | None
) -> tuple[bool, str]:
    """Whether the tuned model is surely worse than the reference, and by how much."""
    assert gate.not_worse_than is not None
    name, before = _reference(gate.not_worse_than, recipe, scored, tuned, run)
    if before is None:
        return True, f"{name} has not been scored"
    found = differences(name, tuned, before, scored[tuned], recipe, gate.confidence)
    sure = f" ({100 * gate.confidence:g} %)" if gate.confidence != 0.95 else ""
    parts = [] if gate.metric else [f"{part.name}.{part.primary_metric}" for part in recipe.parts.values()]
    asked = {f"{part} ": found[part] for part in parts if part in found} or {"": found[metric]}
    worse = any(one.high < 0 for one in asked.values())
    told = [f"{label}{one.difference:+.3f} [{one.low:+.3f}, {one.high:+.3f}]" for label, one in asked.items()]
    return worse, f"{', '.join(told)}{sure} against {name}"


def _reference(
    wanted: str, recipe: TaskRecipe, scored: Mapping[str, Rows], tuned: str, run: RunDir | None
) -> tuple[str, Rows | None]:
    if wanted == "base":
        return "the base", scored.get(base_of(tuned))
    if wanted in recipe.baselines:
        return f"the baseline {wanted}", scored.get(BASELINE + wanted)
    assert run is not None
    own, other = read_variant(run, "eval", tuned), read_run(wanted, "eval")
    _require_same_judge(own, other)
    return f"{other.name}", [line["scores"] for line in same_rows(other, own)]


def _require_same_judge(own: Answers, other: Answers) -> None:
    if other.judged_by != own.judged_by:
        (name, version), (own_name, own_version) = other.judged_by, own.judged_by
        problem = f"it was judged by {name} version {version}, this run by {own_name} version {own_version}"
        raise DataError(problem, code="E7014", help="evaluate that run again")


def require_reference(gate: GateSection, recipe: TaskRecipe) -> None:
    """Find a `not_worse_than` that names nothing before anything costly starts.

    Raises:
        ConfigError: it is neither base, nor a baseline of the recipe, nor a run directory with scores.
    """
    wanted = gate.not_worse_than
    known = ["base", *recipe.baselines]
    if wanted is None or wanted in known:
        return
    try:
        read_run(wanted, "eval")
    except DataError as error:
        raise ConfigError(
            f"{wanted!r} is neither {' nor '.join(known)}, nor a run directory with scores on eval"
            f"{did_you_mean(wanted, known)}: {error.message}",
            code="E7015",
            field="evaluate.gate.not_worse_than",
            help=error.help,
        ) from None


def gate_metric(gate: GateSection, primary_metric: str, metrics: Mapping[str, Any] | Sequence[str]) -> str:
    """The metric that a gate looks at.

    Raises:
        ConfigError: the recipe does not give it.
    """
    metric = gate.metric or primary_metric
    if metric not in metrics:
        raise ConfigError(
            f"the recipe has no metric {metric!r}{did_you_mean(metric, metrics)}",
            code="E7016",
            field="evaluate.gate.metric",
            help=f"choose from {', '.join(metrics)}",
        )
    return metric
