"""The gate: whether the tuned model passes, for pipelines that check an exit code.

It has three outcomes. `min` concerns the score: it fails if the whole interval lies below `min`. `not_worse_than` is a
test of non-inferiority on the same rows, against the base, a baseline of the recipe or another run's tuned model: the
interval of the difference must not reach below -margin. If there are too few rows or no comparable scores, the gate
cannot tell. A run of several tasks passes if every task does, unless the gate names one metric.

    mean >= min, low end of its interval >= min - margin       passed       low end of tuned - reference >= -margin
    whole interval below min                                    failed       else, whole interval below zero
    else                                                        cannot tell  else

The default margin of 5 points suits a usual held-out set: ruling out a loss of `margin` between equally good models
with probability 0.8 needs ((z0.975 + z0.8) · s / margin)² rows, where s is the standard deviation of a row's
difference. With one row in five won or lost, s = √0.2, and that is 628 rows; with one in ten 314. A margin of 2 points
needs 3,925 and 1,963 rows, one of 10 points 157 and 79.
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
from surefit.evaluate.free_text import unlike_readings
from surefit.evaluate.paired import ScoreRows, paired_differences
from surefit.evaluate.stats import MeanInterval, PairedDifference, rows_to_rule_out
from surefit.facts.free_text import is_likelihood
from surefit.facts.pair_scores import REWARD_ACCURACY, is_read
from surefit.task import TaskRecipe, select_task_rows

Outcome = Literal["passed", "failed", "cannot tell"]


@dataclass(frozen=True)
class GateCondition:
    """Outcome of one condition of the gate, and the sentence that explains it."""

    outcome: Outcome
    text: str


def evaluate_gate(
    gate: GateSection, recipe: TaskRecipe, scored: Mapping[str, ScoreRows], run: RunDir | None
) -> dict[str, Any]:
    """Decide whether the tuned model passes, and why: {"outcome", "passed", "margin", "reason"}.

    If a score is missing or belongs to other rows, the gate cannot tell.

    Args:
        scored: variant → the scores of its rows on the held-out set.
        run: run directory with the answers to these rows; only needed by a gate against another run.

    Raises:
        ConfigError: the recipe has no such metric, or what `not_worse_than` names does not exist.
    """
    require_reference(gate, recipe)
    tuned = select_tuned_variant(scored)
    if tuned is None:
        return _document(gate, "", [GateCondition("cannot tell", "the tuned model has not been scored")])
    estimates = compute_estimates(scored[tuned], recipe, gate.confidence)
    metric = gate_metric(gate, recipe.primary_metric, [*estimates, *filter(is_read, recipe.metrics)])
    if metric not in estimates:
        text = f"{tuned} has no {metric}{_why_unread(metric)}"
        return _document(gate, "", [GateCondition("cannot tell", text)])
    conditions = []
    if gate.min is not None:
        conditions.append(_check_minimum(gate.min, gate.margin, estimates[metric]))
    if gate.not_worse_than is not None:
        try:
            conditions += _check_reference(gate, recipe, metric, scored, tuned, run)
        except DataError as error:
            text = f"cannot be compared with {gate.not_worse_than}: {error.message}"
            conditions.append(GateCondition("cannot tell", text))
    return _document(gate, f"{metric} of {tuned} is {estimates[metric].mean:.3f}", conditions)


def _why_unread(metric: str) -> str:
    """Return why a model that was scored may lack a metric."""
    if metric == REWARD_ACCURACY:
        return (
            ": rewards are read of pairs, by a model in this process, with the chat template's switches of training, "
            "and need the log-probabilities of the reference"
        )
    return ": a server gives none" if is_likelihood(metric) else ""


def _document(gate: GateSection, score: str, conditions: Sequence[GateCondition]) -> dict[str, Any]:
    """Return the worst outcome of the conditions and its reasons; for a gate that passed, all conditions."""
    order: tuple[Outcome, ...] = ("failed", "cannot tell", "passed")
    outcome = min((condition.outcome for condition in conditions), key=order.index, default="passed")
    sentences = [score, *(condition.text for condition in conditions if condition.outcome == outcome)]
    return {
        "outcome": outcome,
        "passed": outcome == "passed",
        "margin": gate.margin,
        "reason": "; ".join(text for text in sentences if text),
    }


def _check_minimum(least: float, margin: float, found: MeanInterval) -> GateCondition:
    """Check whether a score is high enough, and whether there are enough rows to tell."""
    requirement = f"at least {least:g} is required"
    if found.high < least:
        return GateCondition("failed", requirement)
    span = f"[{found.low:.3f}, {found.high:.3f}] on {found.n:,} rows"
    if found.mean < least:
        return GateCondition("cannot tell", f"{requirement}, and the interval {span} includes it: score more rows")
    if found.low >= least - margin:
        return GateCondition("passed", requirement)
    span += f" extends below {least:g} by more than the margin of {margin:g}"
    return GateCondition(
        "cannot tell", f"{requirement}, but the interval {span}: score more rows, or set evaluate.gate.margin"
    )


def _check_reference(
    gate: GateSection, recipe: TaskRecipe, metric: str, scored: Mapping[str, ScoreRows], tuned: str, run: RunDir | None
) -> Iterator[GateCondition]:
    """Yield the conditions that the tuned model is not worse than the reference, for the metric or for each task."""
    assert gate.not_worse_than is not None
    name, before = _reference(gate.not_worse_than, recipe, metric, scored, tuned, run)
    if before is None:
        yield GateCondition("cannot tell", f"{name} has not been scored")
        return
    after = scored[tuned]
    differences = paired_differences(name, tuned, before, after, recipe, gate.confidence)
    confidence = f" ({100 * gate.confidence:g} %)" if gate.confidence != 0.95 else ""
    parts = {} if gate.metric else {f"{part.name}.{part.primary_metric}": part for part in recipe.parts.values()}
    checked = {key: part for key, part in parts.items() if key in differences}
    for key, part in checked.items():
        task_rows = (select_task_rows(part.name, before), select_task_rows(part.name, after))
        yield _check_non_inferiority(
            gate, differences[key], f"{key} ", f"{confidence} against {name}", task_rows, part, part.primary_metric
        )
    if not checked:
        all_rows = (before, after)
        yield _check_non_inferiority(
            gate, differences[metric], "", f"{confidence} against {name}", all_rows, recipe, metric
        )


def _check_non_inferiority(
    gate: GateSection,
    found: PairedDifference,
    label: str,
    against: str,
    rows: tuple[ScoreRows, ScoreRows],
    recipe: TaskRecipe,
    metric: str,
) -> GateCondition:
    """Run one test of non-inferiority."""
    text = f"{label}{found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}]{against}"
    if found.low >= -gate.margin:
        return GateCondition("passed", text)
    if found.high < 0:
        return GateCondition("failed", text)
    return GateCondition("cannot tell", f"{text}: {_more_rows(gate, recipe, metric, rows, found)}")


def _more_rows(
    gate: GateSection, recipe: TaskRecipe, metric: str, rows: tuple[ScoreRows, ScoreRows], found: PairedDifference
) -> str:
    """Explain that these rows do not rule out a loss of the margin, and estimate how many similar rows would.

    With several tasks the primary metric is a mean over tasks, so a row has no difference, and there is no estimate.
    """
    n = found.wins + found.losses + found.ties
    loss = f"{n:,} rows do not rule out a loss of more than {100 * gate.margin:g} points (evaluate.gate.margin)"
    needed = None
    if not recipe.parts:
        needed = rows_to_rule_out(*rows, metric, recipe.aggregate, gate.margin, gate.confidence)
    return f"{loss}; about {needed:,} rows that differ as these do would" if needed and needed > n else loss


def _reference(
    wanted: str, recipe: TaskRecipe, metric: str, scored: Mapping[str, ScoreRows], tuned: str, run: RunDir | None
) -> tuple[str, ScoreRows | None]:
    if wanted == "base":
        return "the base", scored.get(base_variant(tuned))
    if wanted in recipe.baselines:
        return f"the baseline {wanted}", scored.get(BASELINE + wanted)
    assert run is not None
    answers, other_answers = read_variant(run, "eval", tuned), read_run(wanted, "eval")
    _require_same_judge(answers, other_answers)
    unlike = unlike_readings(other_answers, answers)
    if metric == REWARD_ACCURACY and any(metric not in line["scores"] for line in other_answers.lines):
        raise DataError("it has no rewards", code="E7660", help="evaluate that run again")
    if unlike and is_likelihood(metric):
        raise DataError(
            f"the likelihoods cannot be compared, because {unlike}",
            code="E7920",
            help="set evaluate.gate.metric to a metric of the generated answers",
        )
    return f"{other_answers.name}", [line["scores"] for line in align_answers(other_answers, answers)]


def _require_same_judge(own: Answers, other: Answers) -> None:
    if other.judged_by != own.judged_by:
        (name, version), (own_name, own_version) = other.judged_by, own.judged_by
        problem = f"it was scored by {name} version {version}, this run by {own_name} version {own_version}"
        raise DataError(problem, code="E7014", help="evaluate that run again")


def require_reference(gate: GateSection, recipe: TaskRecipe) -> None:
    """Raise if `not_worse_than` names nothing, before anything costly starts.

    Raises:
        ConfigError: it is neither base, nor a baseline of the recipe, nor a run directory with scores.
    """
    reference = gate.not_worse_than
    references = ["base", *recipe.baselines]
    if reference is None or reference in references:
        return
    try:
        read_run(reference, "eval")
    except DataError as error:
        raise ConfigError(
            f"{reference!r} is neither {' nor '.join(references)}, nor a run directory with scores on eval"
            f"{did_you_mean(reference, references)}: {error.message}",
            code="E7015",
            field="evaluate.gate.not_worse_than",
            help=error.help,
        ) from None


def gate_metric(gate: GateSection, primary_metric: str, metrics: Mapping[str, Any] | Sequence[str]) -> str:
    """Return the metric that a gate checks.

    Raises:
        ConfigError: the recipe does not have this metric.
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
