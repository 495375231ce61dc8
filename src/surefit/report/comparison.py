"""Several runs on one page: their differences, their results, and how certain the differences are.

The other runs are compared with the first one. Scores are compared row by row if the rows are the same
(evaluate/compare.py); otherwise the page says why they are not compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from surefit.core.errors import ConfigError, SureFitError
from surefit.core.rundir import RunDir, write_atomic
from surefit.evaluate.answers import Answers, read_run
from surefit.evaluate.compare import compare_answers
from surefit.evaluate.free_text import PHRASES
from surefit.facts.free_text import LIKELIHOOD, is_likelihood
from surefit.report import scores
from surefit.report.artefacts import Artefacts, ResolvedSetting
from surefit.report.build import CHART_SCRIPTS, chart_data, pick_samples, render_template
from surefit.report.curves import (
    GIB,
    SERIES,
    Chart,
    ChartCurve,
    Point,
    extract_points,
    split_metrics,
    thin_points,
)
from surefit.report.examples import KINDS, ComparedAnswers, ComparedSet, compare_predictions
from surefit.report.next_steps import list_comparison_steps
from surefit.report.shapes import PredictionRecord
from surefit.report.side_by_side import ComparedRun, read_compared_runs, side_by_side
from surefit.report.text import NBSP, drop_surrogates, interval, points, readable_metric, shorten_text
from surefit.report.verdict import upper_first
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
class PairedRuns:
    """Comparison of a run with the first one on a set: the difference per metric, or why there is none; `beside` where
    the likelihood of the answers shows more than the metric that decides."""

    set: str
    run: str
    tone: scores.Tone
    sentence: str
    metrics: list[tuple[str, str, str, int, int, int]]
    detectable: str = ""
    beside: str = ""
    metric: str = ""


@dataclass(frozen=True)
class ComparisonPage:
    """Values for the template. `differences`: (dotted key, each run's value); `facts`: (title, each run's text)."""

    written: float
    runs: list[ComparedRun]
    headline: str
    tone: scores.Tone
    sentences: list[str]
    facts: list[tuple[str, list[str]]]
    differences: list[tuple[str, list[str]]]
    differences_left_out: int
    same: int
    packages: list[tuple[str, list[str]]]
    paired: list[PairedRuns]
    charts: list[Chart]
    flat: list[str]
    samples: list[tuple[ComparedSet, ComparedAnswers]]
    next_steps: list[tuple[str, str]]


def build_comparison(runs: Sequence[RunDir], output: Path, recipe_of: Callable[[str], TaskRecipe]) -> Path:
    """Write the page that compares the runs, and return its path.

    Args:
        runs: two to eight; the others are compared with the first.
        output: the file to write.
        recipe_of: returns a recipe by its name.

    Raises:
        ConfigError: too few or too many runs, or a duplicate.
        MachineError: the page cannot be written.
    """
    _require_comparable(runs)
    page = comparison_page(runs, output.parent, recipe_of)
    scripts = ["fold.js", *(CHART_SCRIPTS if page.charts else ())]
    data = chart_data(page.charts, []) if page.charts else None
    write_atomic(output, render_template("compare.html.j2", scripts, data, page=page, many=True, kinds=KINDS))
    return output


def _require_comparable(runs: Sequence[RunDir]) -> None:
    paths = [run.path.resolve() for run in runs]
    if not 2 <= len(runs) <= MAX_RUNS:
        problem = f"{len(runs)} runs cannot be compared on one page"
        raise ConfigError(problem, code="E1064", help=f"name two to {MAX_RUNS}")
    if duplicate := next((path for path in paths if paths.count(path) > 1), None):
        raise ConfigError(
            "a run cannot be compared with itself", code="E1065", path=duplicate, help="name each run once"
        )


def comparison_page(runs: Sequence[RunDir], beside: Path, recipe_of: Callable[[str], TaskRecipe]) -> ComparisonPage:
    """Build the template's values; `beside` is the directory that the page will be in."""
    compared_runs = read_compared_runs(runs, beside)
    paired = [pair for run in compared_runs[1:] for pair in _paired(compared_runs[0], run, recipe_of)]
    tone, headline, sentences = _conclusion(compared_runs, paired)
    charts = _charts(compared_runs)
    better = [run for run in compared_runs[1:] if run.name in _better(paired)]
    differences, same = list_setting_differences([run.found for run in compared_runs])
    return ComparisonPage(
        written=time.time(),
        runs=compared_runs,
        headline=headline,
        tone=tone,
        sentences=sentences,
        facts=side_by_side(compared_runs),
        differences=differences[:MAX_DIFFERENCES],
        differences_left_out=max(0, len(differences) - MAX_DIFFERENCES),
        same=same,
        packages=_packages(compared_runs),
        paired=paired,
        charts=[chart for chart in charts if not chart.is_flat],
        flat=[f"{chart.title}: {chart.caption}" for chart in charts if chart.is_flat],
        samples=_samples(compared_runs, paired),
        next_steps=list_comparison_steps([run.found for run in compared_runs], [run.found for run in better]),
    )


def _paired(first: ComparedRun, other: ComparedRun, recipe_of: Callable[[str], TaskRecipe]) -> list[PairedRuns]:
    """Compare `other` with `first` on every set that both have scores of."""
    names = [
        set_scores.name for set_scores in other.sets if set_scores.name in {first_set.name for first_set in first.sets}
    ]
    return [_paired_set(first, other, name, recipe_of) for name in names]


def _paired_set(
    first: ComparedRun, other: ComparedRun, name: str, recipe_of: Callable[[str], TaskRecipe]
) -> PairedRuns:
    try:
        sides = [_answers(run, name) for run in (first, other)]
        if sides[0].judged_by != sides[1].judged_by or sides[0].recipe is None:
            raise ConfigError(f"they were judged by {_judge(sides[0])} and by {_judge(sides[1])}", code="E1066")
        result = compare_answers(sides[0], sides[1], recipe_of(sides[0].recipe))
    except SureFitError as error:
        return PairedRuns(
            name, other.name, "neutral", f"Not compared: {shorten_text(drop_surrogates(error.message), 300)}.", []
        )
    main = result.main.difference
    tones: dict[str, scores.Tone] = {"better": "good", "worse": "bad", "undecided": "neutral"}
    phrases = {"better": "is better than", "worse": "is worse than", "undecided": "shows no clear difference from"}
    sentence = (
        f"{other.name} {phrases[result.verdict]} {first.name}: {points(main.difference)} "
        f"{readable_metric(result.metric)} (95{NBSP}% interval {interval(main.low, main.high)}), "
        f"{main.wins:,} rows won, {main.losses:,} lost, {main.ties:,} equal."
    )
    fit = result.fit if result.fit is not None and (is_likelihood(result.metric) or result.fit.metric_text) else None
    if fit is not None:
        sentence = f"{replace(fit, a=first.name, b=other.name).sentence}."
    if result.unlike:
        sentence += f" {upper_first(result.reason)}."
    lines = [
        (
            readable_metric(key),
            points(diff.difference),
            interval(diff.low, diff.high),
            diff.wins,
            diff.losses,
            diff.ties,
        )
        for key, metric in list(result.metrics.items())[: scores.MAX_METRICS]
        for diff in (metric.difference,)
    ]
    size = 100 * result.main.detectable
    detectable = f"These rows would detect a true difference of {size:.1f} points with 80 % power."
    beside = f"{fit.metric_text}; {other.name} {PHRASES[fit.outcome]}" if fit and fit.metric_text else ""
    return PairedRuns(name, other.name, tones[result.verdict], sentence, lines, detectable, beside, result.metric)


def _answers(run: ComparedRun, name: str) -> Answers:
    """Read the answers of the run's tuned model."""
    return read_run(str(run.found.run.path), name)


def _judge(answers: Answers) -> str:
    return f"{answers.recipe or 'an unknown recipe'} version {answers.version}"


def _conclusion(runs: Sequence[ComparedRun], paired: Sequence[PairedRuns]) -> tuple[scores.Tone, str, list[str]]:
    """Summarize the results on the held-out rows: one line for all runs, one sentence for each."""
    first = runs[0].name
    held_out = [pair for pair in paired if pair.set == scores.HELD_OUT]
    sentences = [pair.sentence for pair in held_out]
    with_metrics = [pair for pair in held_out if pair.metrics]
    if not with_metrics:
        return "neutral", "The scores of these runs cannot be compared", sentences
    better = _better(paired)
    worse = [pair.run for pair in with_metrics if pair.tone == "bad"]
    if with_metrics[0].metrics[0][0] == readable_metric(LIKELIHOOD):
        verb = "fits" if len(better) == 1 else "fit"
        headline = (
            f"{' and '.join(better)} {verb} the answers better than {first}"
            if better
            else (f"No run clearly fits the answers better than {first}")
        )
        return "good" if better else "neutral", headline, sentences
    if better:
        verb = "is" if len(better) == 1 else "are"
        return "good", f"{' and '.join(better)} {verb} better than {first}", sentences
    if len(worse) == len(runs) - 1:
        return "neutral", f"{first} is the best of these runs", sentences
    beside = next((pair.beside for pair in with_metrics if pair.beside), "")
    return "neutral", beside or f"No run is clearly better than {first}", sentences


def _better(paired: Sequence[PairedRuns]) -> list[str]:
    """Return the runs that are better than the first on the held-out rows."""
    return [pair.run for pair in paired if pair.set == scores.HELD_OUT and pair.tone == "good"]


def _samples(runs: Sequence[ComparedRun], paired: Sequence[PairedRuns]) -> list[tuple[ComparedSet, ComparedAnswers]]:
    """Pick held-out rows of the first run and of the next one that is compared with it."""
    first = runs[0]
    metrics = {pair.run: pair.metric for pair in paired if pair.set == scores.HELD_OUT and pair.metrics}
    other = next((run for run in runs if run.name in metrics), None)
    if other is None:
        return []
    answers = tuple(_predictions(run) for run in (first, other))
    group = compare_predictions(
        scores.HELD_OUT, (first.name, other.name), (answers[0], answers[1]), metrics[other.name]
    )
    return pick_samples([group] if group else [])


def _predictions(run: ComparedRun) -> list[PredictionRecord]:
    """Read the answers of the run's tuned model to the held-out prompts."""
    tuned = next((set_scores.tuned for set_scores in run.sets if set_scores.name == scores.HELD_OUT), None)
    return run.found.predictions(scores.HELD_OUT, tuned) if tuned else []


def list_setting_differences(runs: Sequence[Artefacts]) -> tuple[list[tuple[str, list[str]]], int]:
    """Return the settings that differ between the runs, and the number of equal ones.

    A setting that an older version lacks counts as equal if the other runs use its default.
    """
    settings_by_run = [{setting.key: setting for setting in run.settings or []} for run in runs]
    keys = [
        key
        for key in dict.fromkeys(key for run_settings in settings_by_run for key in run_settings)
        if key not in UNINTERESTING
    ]
    table = [(key, [run_settings.get(key) for run_settings in settings_by_run]) for key in keys]
    differing = [(key, settings) for key, settings in table if _differ(settings)]
    texts = [(key, [setting.value if setting else "–" for setting in settings]) for key, settings in differing]
    return texts, len(table) - len(differing)


def _differ(settings: Sequence[ResolvedSetting | None]) -> bool:
    existing = [setting for setting in settings if setting is not None]
    set_by_user = any(setting.origin in ("user", "--set") for setting in existing)
    return len({setting.value for setting in existing}) > 1 or (len(existing) < len(settings) and set_by_user)


def _packages(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return the package versions that differ between the runs with a recorded environment."""
    environments = [run.found.environment for run in runs]
    versions_by_run = [
        {"python": environment.python or "–", "surefit": environment.surefit or "–", **environment.packages}
        if environment
        else {}
        for environment in environments
    ]
    names = sorted({name for versions in versions_by_run for name in versions})
    table = [(name, [versions.get(name, "–") for versions in versions_by_run]) for name in names]
    return [(name, values) for name, values in table if len(set(values)) > 1][:MAX_DIFFERENCES]


def _charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    """Draw each quantity of all runs in one chart; a quantity that no run has logged is omitted."""
    charts = []
    for name, (title, key, scale) in CURVES.items():
        curves = [
            ChartCurve(run.name, run.colour, thin_points(_points(run, key, scale)), name == "held_out") for run in runs
        ]
        drawn = [curve for curve in curves if curve.points]
        ends = "; ".join(f"{curve.label}: last value {curve.points[-1][1]:.4g}" for curve in drawn)
        if drawn:
            charts.append(Chart(name, title, f"{ends}.", drawn))
    return charts


def _points(run: ComparedRun, key: str, scale: float) -> list[Point]:
    steps, held_out = split_metrics(run.found.metrics)
    return [(step, scale * value) for step, value in extract_points(held_out if key == "eval_loss" else steps, key)]
