"""The gate: whether the tuned model may pass, for pipelines that look at an exit code.

It has three outcomes. `min` is about the score: it fails where the whole interval lies below. `not_worse_than` is a
test of non-inferiority on the same rows, against the base, a baseline of the recipe or what another run ships: the
interval of the difference must not reach below -margin. What the rows cannot show, because there are too few of them or
no comparable scores, is neither: the gate cannot tell. A run of several tasks passes when every task does, unless the
gate names one metric.

    mean >= min, low end of its interval >= min - margin       passed       low end of tuned - reference >= -margin
    whole interval below min                                    failed       else, whole interval below zero
    else                                                        cannot tell  else

The default margin of 5 points is what a usual held-out set can show: to rule out a loss of `margin` between models that
are equally good, four times in five, takes ((z0.975 + z0.8) · s / margin)² rows, s being the standard deviation of a
row's difference. With one row in five won or lost, s = √0.2, and that is 628 rows; with one in ten 314. A margin of
2 points takes 3,925 and 1,963 rows, one of 10 points 157 and 79.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from surefit.config.schema import GateSection
from surefit.core.errors import ConfigError, DataError, did_you_mean
from surefit.core.rundir import RunDir
from surefit.evaluate.answers import (
    BASELINE,
    Answers,
    align_answers,
    base_variant,
    read_run,
    read_variant,
    select_tuned_variant,
)
from surefit.evaluate.estimates import compute_estimates
from surefit.evaluate.paired import ScoreRows, paired_differences
from surefit.evaluate.stats import PairedDifference, rows_to_rule_out
from surefit.task import TaskRecipe, select_task_rows

Outcome = Literal["passed", "failed", "cannot tell"]


@dataclass(frozen=True)
class GateCondition:
    """What one condition of the gate came to, and the sentence that says so."""

    outcome: Outcome
    text: str


def evaluate_gate(
    gate: GateSection, recipe: TaskRecipe, scored: Mapping[str, ScoreRows], run: RunDir | None
) -> dict[str, Any]:
    """Whether the tuned model may pass, and why: {"outcome", "passed", "margin", "reason"}.

    Where a score is missing or belongs to other rows, the gate cannot tell.

    Args:
        scored: variant → the scores of its rows on the held-out set.
        run: where the answers to these rows lie; only a gate against another run needs it.

    Raises:
        ConfigError: the recipe gives no such metric, or `not_worse_than` names nothing that there is.
    """
    require_reference(gate, recipe)
    tuned = select_tuned_variant(scored)
    if tuned is None:
        return _document(gate, "", [GateCondition("cannot tell", "the tuned model has not been scored")])
    found = compute_estimates(scored[tuned], recipe, gate.confidence)
    metric = gate_metric(gate, recipe.primary_metric, found)
    conditions = []
    if gate.min is not None:
        conditions.append(_check_minimum(gate.min, gate.margin, found[metric]))
    if gate.not_worse_than is not None:
        try:
            conditions += _check_reference(gate, recipe, metric, scored, tuned, run)
        except DataError as error:
            text = f"cannot be compared with {gate.not_worse_than}: {error.message}"
            conditions.append(GateCondition("cannot tell", text))
    return _document(gate, f"{metric} of {tuned} is {found[metric]['mean']:.3f}", conditions)


def _document(gate: GateSection, score: str, conditions: Sequence[GateCondition]) -> dict[str, Any]:
    """The worst of the conditions, and why; of a gate that passed, all that it asked."""
    order: tuple[Outcome, ...] = ("failed", "cannot tell", "passed")
    outcome = min((each.outcome for each in conditions), key=order.index, default="passed")
    told = [score, *(each.text for each in conditions if each.outcome == outcome)]
    return {
        "outcome": outcome,
        "passed": outcome == "passed",
        "margin": gate.margin,
        "reason": "; ".join(text for text in told if text),
    }


def _check_minimum(least: float, margin: float, found: Mapping[str, Any]) -> GateCondition:
    """Whether a score is high enough, and whether there are enough rows to say so."""
    asked = f"at least {least:g} is required"
    low, high = found["ci95"]
    if high < least:
        return GateCondition("failed", asked)
    span = f"[{low:.3f}, {high:.3f}] on {found['n']:,} rows"
    if found["mean"] < least:
        return GateCondition("cannot tell", f"{asked}, and {span} reaches it: score more rows")
    if low >= least - margin:
        return GateCondition("passed", asked)
    span += f" reaches below {least:g} by more than the margin of {margin:g}"
    return GateCondition("cannot tell", f"{asked}, and {span}: score more rows, or set evaluate.gate.margin")


def _check_reference(
    gate: GateSection, recipe: TaskRecipe, metric: str, scored: Mapping[str, ScoreRows], tuned: str, run: RunDir | None
) -> Iterator[GateCondition]:
    """Whether the tuned model is not worse than the reference, for the metric or for each task."""
    assert gate.not_worse_than is not None
    name, before = _reference(gate.not_worse_than, recipe, scored, tuned, run)
    if before is None:
        yield GateCondition("cannot tell", f"{name} has not been scored")
        return
    after = scored[tuned]
    found = paired_differences(name, tuned, before, after, recipe, gate.confidence)
    sure = f" ({100 * gate.confidence:g} %)" if gate.confidence != 0.95 else ""
    parts = {} if gate.metric else {f"{part.name}.{part.primary_metric}": part for part in recipe.parts.values()}
    asked = {key: part for key, part in parts.items() if key in found}
    for key, part in asked.items():
        own = (select_task_rows(part.name, before), select_task_rows(part.name, after))
        yield _check_non_inferiority(
            gate, found[key], f"{key} ", f"{sure} against {name}", own, part, part.primary_metric
        )
    if not asked:
        whole = (before, after)
        yield _check_non_inferiority(gate, found[metric], "", f"{sure} against {name}", whole, recipe, metric)


def _check_non_inferiority(
    gate: GateSection,
    found: PairedDifference,
    label: str,
    against: str,
    rows: tuple[ScoreRows, ScoreRows],
    recipe: TaskRecipe,
    metric: str,
) -> GateCondition:
    """The outcome of one test of non-inferiority."""
    text = f"{label}{found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}]{against}"
    if found.low >= -gate.margin:
        return GateCondition("passed", text)
    if found.high < 0:
        return GateCondition("failed", text)
    return GateCondition("cannot tell", f"{text}: {_more_rows(gate, recipe, metric, rows, found)}")


def _more_rows(
    gate: GateSection, recipe: TaskRecipe, metric: str, rows: tuple[ScoreRows, ScoreRows], found: PairedDifference
) -> str:
    """Say that these rows do not rule out a loss of the margin, and how many rows that differ as they do would.

    With several tasks and one mean over them there is no difference of a row.
    """
    n = found.wins + found.losses + found.ties
    loss = f"{n:,} rows do not rule out a loss of more than {100 * gate.margin:g} points (evaluate.gate.margin)"
    needed = None
    if not recipe.parts:
        needed = rows_to_rule_out(*rows, metric, recipe.aggregate, gate.margin, gate.confidence)
    return f"{loss}; about {needed:,} rows that differ as these do would" if needed and needed > n else loss


def _reference(
    wanted: str, recipe: TaskRecipe, scored: Mapping[str, ScoreRows], tuned: str, run: RunDir | None
) -> tuple[str, ScoreRows | None]:
    if wanted == "base":
        return "the base", scored.get(base_variant(tuned))
    if wanted in recipe.baselines:
        return f"the baseline {wanted}", scored.get(BASELINE + wanted)
    assert run is not None
    own, other = read_variant(run, "eval", tuned), read_run(wanted, "eval")
    _require_same_judge(own, other)
    return f"{other.name}", [line["scores"] for line in align_answers(other, own)]


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
