"""The compared runs side by side: configuration, cost and results of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from surefit.core.rundir import RunDir
from surefit.core.units import bytes_text, count_text, duration_text
from surefit.report import scores
from surefit.report.actual import PlanComparison, compare_plan_with_run, percent_off
from surefit.report.artefacts import Artefacts, read_artefacts
from surefit.report.curves import SERIES, TrainingCurves, build_training_curves, extract_points, split_metrics
from surefit.report.ship import ShipDecision, decide_shipping
from surefit.report.text import drop_surrogates, percent, readable_metric, shorten_text
from surefit.report.timeline import attempts
from surefit.report.verdict import Effect, Verdict, judge_run, measure_effects


@dataclass(frozen=True)
class ComparedRun:
    """One of the compared runs.

    Attributes:
        name: unique name.
        colour: color of its curves.
        link: relative link to its own page; None if there is none.
    """

    name: str
    colour: str
    link: str | None
    found: Artefacts
    training: TrainingCurves | None
    actual: PlanComparison
    sets: list[scores.SetScores]
    effects: list[Effect]
    verdict: Verdict
    ship: ShipDecision


def read_compared_runs(runs: Sequence[RunDir], beside: Path) -> list[ComparedRun]:
    """Read the runs for a page in the directory `beside`."""
    named = zip(runs, _names(runs), SERIES, strict=False)
    return [_read_run(run, name, colour, beside) for run, name, colour in named]


def _names(runs: Sequence[RunDir]) -> list[str]:
    """Return each run's directory name, with enough parent directories to make it unique."""
    paths = [run.path.resolve() for run in runs]
    names: list[str] = []
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = [drop_surrogates("/".join(path.parts[-depth:])) for path in paths]
        if len(set(names)) == len(names):
            break
    return [shorten_text(name, 120) for name in names]


def _read_run(run: RunDir, name: str, colour: str, beside: Path) -> ComparedRun:
    artefacts = read_artefacts(run)
    curves, stage_attempts = build_training_curves(artefacts.metrics, artefacts.events), attempts(artefacts.events)
    sets = scores.set_scores(artefacts)
    effects = measure_effects(sets)
    link = quote(os.path.relpath(run.report, beside)) if run.report.exists() else None
    return ComparedRun(
        name,
        colour,
        link,
        artefacts,
        curves,
        compare_plan_with_run(artefacts, curves, stage_attempts),
        sets,
        effects,
        judge_run(artefacts, curves, effects, stage_attempts),
        decide_shipping(artefacts, effects, sets),
    )


def side_by_side(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return a table of each run's facts and results; a line without a value for any run is omitted."""
    lines: list[tuple[str, Callable[[ComparedRun], str | None]]] = [
        ("Verdict", lambda run: run.verdict.headline),
        ("Ready to ship?", lambda run: run.ship.answer),
        ("Base model", lambda run: run.found.value("model.name_or_path")),
        ("Recipe", lambda run: run.found.value("recipe")),
        ("Trained parameters", _trained),
        ("Optimizer steps", lambda run: f"{run.training.last_step:,}" if run.training else None),
        ("Tokens", lambda run: f"{run.training.tokens:,.0f}" if run.training and run.training.tokens else None),
        *((f"Score: {_title(name)}", lambda run, name=name: _score(run, name)) for name in _set_names(runs)),
        ("Lowest held-out loss", _lowest_loss),
        *((f"{what}: actual", lambda run, i=i: _row(run, i)) for i, what in MEASURED.items()),
        *((f"{what}: plan error", lambda run, i=i: _off(run, i)) for i, what in MEASURED.items()),
        ("Speed", _speed),
        ("On the disk", lambda run: bytes_text(sum(size for _, size in run.actual.folders)) or None),
        ("Certificate", _certificate),
        ("Device", lambda run: run.found.plan.device.name if run.found.plan and run.found.plan.device else None),
    ]
    table = [(what, [text(run) or "–" for run in runs]) for what, text in lines]
    return [(what, texts) for what, texts in table if set(texts) != {"–"}]


MEASURED = {0: "Peak memory", 2: "Time in training steps", 3: "Total training time"}
"""Index → title of the first rows of `compare_plan_with_run`."""


def _row(run: ComparedRun, number: int) -> str | None:
    row = run.actual.rows[number]
    if row.actual is None:
        return None
    return bytes_text(row.actual) if row.unit == "bytes" else duration_text(row.actual)


def _off(run: ComparedRun, number: int) -> str | None:
    return percent_off(run.actual.rows[number]) or None


def _set_names(runs: Sequence[ComparedRun]) -> list[str]:
    return list(dict.fromkeys(set_scores.name for run in runs for set_scores in run.sets))[: scores.MAX_SETS]


def _title(name: str) -> str:
    return "held-out rows" if name == scores.HELD_OUT else name


def _score(run: ComparedRun, name: str) -> str | None:
    """Return the primary metric of the run's tuned model, with its interval."""
    set_scores = next((candidate for candidate in run.sets if candidate.name == name), None)
    if set_scores is None or set_scores.primary is None or set_scores.tuned not in set_scores.primary.scores:
        return None
    score = set_scores.primary.scores[set_scores.tuned]
    ends = f" [{percent(score.ci95[0])}, {percent(score.ci95[1])}]" if score.ci95 else ""
    return f"{percent(score.mean)}{ends} {readable_metric(set_scores.primary.metric)}"


def _trained(run: ComparedRun) -> str | None:
    plan = run.found.plan
    return count_text(plan.model.trainable) if plan and plan.model.trainable else None


def _lowest_loss(run: ComparedRun) -> str | None:
    held_out_losses = extract_points(split_metrics(run.found.metrics)[1], "eval_loss")
    if not held_out_losses:
        return None
    step, loss = min(held_out_losses, key=lambda point: point[1])
    return f"{loss:.4g} at step {step:,}"


def _speed(run: ComparedRun) -> str | None:
    training = run.training
    if not training or not training.tokens or not training.seconds:
        return None
    return f"{training.tokens / training.seconds:,.0f} tokens per second"


def _certificate(run: ComparedRun) -> str | None:
    certificate = run.found.certificate
    return None if certificate is None else "passed" if certificate.passed else "failed"
