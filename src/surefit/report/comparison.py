"""Several runs on one page: what differs between them, what came of it, and how sure the difference is.

The first run is the one that the others are measured against. Scores are compared row by row where the rows are the
same (evaluate/compare.py); where they are not, the page says why, and compares nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from surefit.core.errors import ConfigError, SureFitError
from surefit.core.rundir import RunDir, write_atomic
from surefit.core.units import bytes_text, count_text, duration_text
from surefit.evaluate.answers import Answers, read_run
from surefit.evaluate.compare import compare_answers
from surefit.report import scores
from surefit.report.actual import PlanComparison, compare_plan_with_run, percent_off
from surefit.report.artefacts import Artefacts, ResolvedSetting, read_artefacts
from surefit.report.build import chart_data, render_template
from surefit.report.curves import (
    GIB,
    SERIES,
    Chart,
    ChartCurve,
    Point,
    TrainingCurves,
    build_training_curves,
    extract_points,
    split_metrics,
    thin_points,
)
from surefit.report.ship import ShipDecision, decide_shipping
from surefit.report.text import NBSP, drop_surrogates, interval, percent, points, readable_metric, shorten_text
from surefit.report.timeline import attempts
from surefit.report.verdict import Effect, Tone, Verdict, judge_run, measure_effects
from surefit.task import TaskRecipe

MAX_RUNS = len(SERIES)
MAX_DIFFERENCES = 60
UNINTERESTING = ("output_dir",)
CURVES = {
    "loss": ("Training loss", "loss", 1.0),
    "held_out": ("Held-out loss", "eval_loss", 1.0),
    "learning_rate": ("Learning rate", "learning_rate", 1.0),
    "grad_norm": ("Gradient norm", "grad_norm", 1.0),
    "tokens_per_second": ("Tokens per second", "tokens_per_second", 1.0),
    "memory": ("Memory, GiB", "memory_bytes", 1 / GIB),
    "disk": ("Free on the disk, GiB", "disk_free_bytes", 1 / GIB),
}


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs.

    Attributes:
        name: unlike every other's.
        colour: of its curves.
        link: to its own page, relative; None where there is none.
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


@dataclass(frozen=True)
class PairedRuns:
    """A run against the first one on a set: per metric the difference, or why there is none."""

    set: str
    run: str
    tone: Tone
    sentence: str
    metrics: list[tuple[str, str, str, int, int, int]]
    detectable: str = ""


@dataclass(frozen=True)
class ComparisonPage:
    """What the template draws. `differences`: (dotted key, each run's value); `facts`: (what, each run's text)."""

    written: float
    runs: list[ComparedRun]
    headline: str
    tone: Tone
    sentences: list[str]
    facts: list[tuple[str, list[str]]]
    differences: list[tuple[str, list[str]]]
    differences_left_out: int
    same: int
    packages: list[tuple[str, list[str]]]
    paired: list[PairedRuns]
    charts: list[Chart]


def build_comparison(runs: Sequence[RunDir], output: Path, recipe_of: Callable[[str], TaskRecipe]) -> Path:
    """Write the page that compares the runs, and return its path.

    Args:
        runs: two to eight, the first being what the others are compared with.
        output: the file to write.
        recipe_of: a recipe by its name.

    Raises:
        ConfigError: too few or too many runs, or one that is named twice.
        MachineError: the page cannot be written.
    """
    _require_comparable(runs)
    page = comparison_page(runs, output.parent, recipe_of)
    scripts = ["vendor/uplot/uPlot.iife.min.js", "page.js"] if page.charts else []
    data = chart_data(page.charts, []) if page.charts else None
    write_atomic(output, render_template("compare.html.j2", scripts, data, page=page, many=True))
    return output


def _require_comparable(runs: Sequence[RunDir]) -> None:
    places = [run.path.resolve() for run in runs]
    if not 2 <= len(runs) <= MAX_RUNS:
        problem = f"{len(runs)} runs cannot be compared on one page"
        raise ConfigError(problem, code="E1064", help=f"name two to {MAX_RUNS}")
    if twice := next((place for place in places if places.count(place) > 1), None):
        raise ConfigError("a run cannot be compared with itself", code="E1065", path=twice, help="name each run once")


def comparison_page(runs: Sequence[RunDir], beside: Path, recipe_of: Callable[[str], TaskRecipe]) -> ComparisonPage:
    """The runs as the template draws them; `beside`: the directory that the page will be in."""
    looked = [_look(run, name, SERIES[i], beside) for i, (run, name) in enumerate(zip(runs, _names(runs), strict=True))]
    paired = [found for run in looked[1:] for found in _paired(looked[0], run, recipe_of)]
    tone, headline, sentences = _conclusion(looked, paired)
    differences, same = _differences(looked)
    return ComparisonPage(
        written=time.time(),
        runs=looked,
        headline=headline,
        tone=tone,
        sentences=sentences,
        facts=_facts(looked),
        differences=differences[:MAX_DIFFERENCES],
        differences_left_out=max(0, len(differences) - MAX_DIFFERENCES),
        same=same,
        packages=_packages(looked),
        paired=paired,
        charts=_charts(looked),
    )


def _names(runs: Sequence[RunDir]) -> list[str]:
    """Each run's directory, with as many of its parents as make it unlike the others."""
    places = [run.path.resolve() for run in runs]
    names: list[str] = []
    for depth in range(1, max(len(place.parts) for place in places) + 1):
        names = [drop_surrogates("/".join(place.parts[-depth:])) for place in places]
        if len(set(names)) == len(names):
            break
    return [shorten_text(name, 120) for name in names]


def _look(run: RunDir, name: str, colour: str, beside: Path) -> ComparedRun:
    found = read_artefacts(run)
    trained, tries = build_training_curves(found.metrics, found.events), attempts(found.events)
    sets = scores.set_scores(found)
    changes = measure_effects(sets)
    link = quote(os.path.relpath(run.report, beside)) if run.report.exists() else None
    return ComparedRun(
        name,
        colour,
        link,
        found,
        trained,
        compare_plan_with_run(found, trained, tries),
        sets,
        changes,
        judge_run(found, trained, changes, tries),
        decide_shipping(found, changes, sets),
    )


def _paired(first: ComparedRun, other: ComparedRun, recipe_of: Callable[[str], TaskRecipe]) -> list[PairedRuns]:
    """`other` against `first` on every set that both have scores of."""
    names = [one.name for one in other.sets if one.name in {mine.name for mine in first.sets}]
    return [_paired_set(first, other, name, recipe_of) for name in names]


def _paired_set(
    first: ComparedRun, other: ComparedRun, name: str, recipe_of: Callable[[str], TaskRecipe]
) -> PairedRuns:
    try:
        sides = [_answers(run, name) for run in (first, other)]
        if sides[0].judged_by != sides[1].judged_by or sides[0].recipe is None:
            raise ConfigError(f"they were judged by {_judge(sides[0])} and by {_judge(sides[1])}", code="E1066")
        compared = compare_answers(sides[0], sides[1], recipe_of(sides[0].recipe))
    except SureFitError as error:
        return PairedRuns(
            name, other.name, "neutral", f"Not compared: {shorten_text(drop_surrogates(error.message), 300)}.", []
        )
    metric = compared["metric"]
    main = compared["metrics"][metric]
    tones: dict[str, Tone] = {"better": "good", "worse": "bad", "undecided": "neutral"}
    said = {"better": "is better than", "worse": "is worse than", "undecided": "cannot be told from"}
    sentence = (
        f"{other.name} {said[compared['verdict']]} {first.name}: {points(main['difference'])} "
        f"{readable_metric(metric)} (95{NBSP}% interval {interval(*main['ci95'])}), "
        f"{main['wins']:,} rows won, {main['losses']:,} lost, {main['ties']:,} equal."
    )
    lines = [
        (
            readable_metric(key),
            points(line["difference"]),
            interval(*line["ci95"]),
            line["wins"],
            line["losses"],
            line["ties"],
        )
        for key, line in list(compared["metrics"].items())[: scores.MAX_METRICS]
    ]
    tone = tones[compared["verdict"]]
    detectable = f"A true difference of {100 * main['detectable']:.1f} points would be found four times in five."
    return PairedRuns(name, other.name, tone, sentence, lines, detectable)


def _answers(run: ComparedRun, name: str) -> Answers:
    """The answers of what the run ships."""
    return read_run(str(run.found.run.path), name)


def _judge(answers: Answers) -> str:
    return f"{answers.recipe or 'an unknown recipe'} version {answers.version}"


def _conclusion(runs: Sequence[ComparedRun], paired: Sequence[PairedRuns]) -> tuple[Tone, str, list[str]]:
    """What the held-out rows say of all runs, in one line and one sentence for each."""
    first = runs[0].name
    held_out = [found for found in paired if found.set == scores.HELD_OUT]
    sentences = [found.sentence for found in held_out]
    compared = [found for found in held_out if found.metrics]
    if not compared:
        return "neutral", "The scores of these runs cannot be compared", sentences
    better = [found.run for found in compared if found.tone == "good"]
    worse = [found.run for found in compared if found.tone == "bad"]
    if better:
        verb = "is" if len(better) == 1 else "are"
        return "good", f"{' and '.join(better)} {verb} better than {first}", sentences
    if len(worse) == len(runs) - 1:
        return "neutral", f"{first} is the best of these runs", sentences
    return "neutral", f"No run is surely better than {first}", sentences


def _facts(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """What each run is, took and reached; a line that no run has something to say to is left out."""
    lines: list[tuple[str, Callable[[ComparedRun], str | None]]] = [
        ("Verdict", lambda run: run.verdict.headline),
        ("May it ship?", lambda run: run.ship.answer),
        ("Base model", lambda run: run.found.value("model.name_or_path")),
        ("Recipe", lambda run: run.found.value("recipe")),
        ("Trained parameters", _trained),
        ("Optimizer steps", lambda run: f"{run.training.last_step:,}" if run.training else None),
        ("Tokens", lambda run: f"{run.training.tokens:,.0f}" if run.training and run.training.tokens else None),
        *((f"Score: {_title(name)}", lambda run, name=name: _score(run, name)) for name in _set_names(runs)),
        ("Lowest held-out loss", _lowest_loss),
        *((f"{what}: actual", lambda run, i=i: _row(run, i)) for i, what in MEASURED.items()),
        *((f"{what}: plan is off by", lambda run, i=i: _off(run, i)) for i, what in MEASURED.items()),
        ("Speed", _speed),
        ("On the disk", lambda run: bytes_text(sum(size for _, size in run.actual.folders)) or None),
        ("Certificate", _certificate),
        ("Device", lambda run: run.found.plan.device.name if run.found.plan and run.found.plan.device else None),
    ]
    table = [(what, [text(run) or "–" for run in runs]) for what, text in lines]
    return [(what, texts) for what, texts in table if set(texts) != {"–"}]


MEASURED = {0: "Peak memory", 2: "Time in training steps", 3: "Time of all of training"}
"""Rows that `compare_plan_with_run` begins with."""


def _row(run: ComparedRun, number: int) -> str | None:
    row = run.actual.rows[number]
    if row.actual is None:
        return None
    return bytes_text(row.actual) if row.unit == "bytes" else duration_text(row.actual)


def _off(run: ComparedRun, number: int) -> str | None:
    return percent_off(run.actual.rows[number]) or None


def _set_names(runs: Sequence[ComparedRun]) -> list[str]:
    return list(dict.fromkeys(one.name for run in runs for one in run.sets))[: scores.MAX_SETS]


def _title(name: str) -> str:
    return "held-out rows" if name == scores.HELD_OUT else name


def _score(run: ComparedRun, name: str) -> str | None:
    """The primary metric of what the run ships, with its interval."""
    found = next((one for one in run.sets if one.name == name), None)
    if found is None or found.primary is None or found.tuned not in found.primary.scores:
        return None
    score = found.primary.scores[found.tuned]
    ends = f" [{percent(score.ci95[0])}, {percent(score.ci95[1])}]" if score.ci95 else ""
    return f"{percent(score.mean)}{ends} {readable_metric(found.primary.metric)}"


def _trained(run: ComparedRun) -> str | None:
    plan = run.found.plan
    return count_text(plan.model.trainable) if plan and plan.model.trainable else None


def _lowest_loss(run: ComparedRun) -> str | None:
    measured = extract_points(split_metrics(run.found.metrics)[1], "eval_loss")
    if not measured:
        return None
    step, loss = min(measured, key=lambda point: point[1])
    return f"{loss:.4g} at step {step:,}"


def _speed(run: ComparedRun) -> str | None:
    found = run.training
    if not found or not found.tokens or not found.seconds:
        return None
    return f"{found.tokens / found.seconds:,.0f} tokens per second"


def _certificate(run: ComparedRun) -> str | None:
    certificate = run.found.certificate
    return None if certificate is None else "passed" if certificate.passed else "failed"


def _differences(runs: Sequence[ComparedRun]) -> tuple[list[tuple[str, list[str]]], int]:
    """The settings that are not the same in all runs, and how many are.

    A setting that an older version did not have counts as the same where the others left it as it comes.
    """
    known = [{setting.key: setting for setting in run.found.settings or []} for run in runs]
    keys = [key for key in dict.fromkeys(key for found in known for key in found) if key not in UNINTERESTING]
    table = [(key, [found.get(key) for found in known]) for key in keys]
    differing = [(key, settings) for key, settings in table if _differ(settings)]
    texts = [(key, [setting.value if setting else "–" for setting in settings]) for key, settings in differing]
    return texts, len(table) - len(differing)


def _differ(settings: Sequence[ResolvedSetting | None]) -> bool:
    there = [setting for setting in settings if setting is not None]
    chosen = any(setting.origin in ("user", "--set") for setting in there)
    return len({setting.value for setting in there}) > 1 or (len(there) < len(settings) and chosen)


def _packages(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Versions that are not the same in all runs whose environment is known."""
    known = [run.found.environment for run in runs]
    found = [{"python": e.python or "–", "surefit": e.surefit or "–", **e.packages} if e else {} for e in known]
    names = sorted({name for versions in found for name in versions})
    table = [(name, [versions.get(name, "–") for versions in found]) for name in names]
    return [(name, values) for name, values in table if len(set(values)) > 1][:MAX_DIFFERENCES]


def _charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    """Each quantity of all runs in one chart; one that no run has logged is left out."""
    charts = []
    for name, (title, key, scale) in CURVES.items():
        curves = [
            ChartCurve(run.name, run.colour, thin_points(_points(run, key, scale)), name == "held_out") for run in runs
        ]
        drawn = [curve for curve in curves if curve.points]
        ends = "; ".join(f"{curve.label} ends at {curve.points[-1][1]:.4g}" for curve in drawn)
        if drawn:
            charts.append(Chart(name, title, f"{ends}.", drawn))
    return charts


def _points(run: ComparedRun, key: str, scale: float) -> list[Point]:
    steps, held_out = split_metrics(run.found.metrics)
    return [(step, scale * value) for step, value in extract_points(held_out if key == "eval_loss" else steps, key)]
