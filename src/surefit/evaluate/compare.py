"""Compares two sets of answers to the same rows by the gold answers: which is better, how surely, and which difference
could have been detected.

The gold answer decides: a row is won, lost or tied by its score. The verdict of a judge model (evaluate/judge.py) is
reported in addition, never instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefit.core.errors import ConfigError, DataError, did_you_mean
from surefit.core.sampling import evenly_spaced
from surefit.evaluate.answers import BASELINE, Answers, align_answers, list_scored_variants, read_answers, read_run
from surefit.evaluate.estimates import compute_estimates
from surefit.evaluate.free_text import (
    FitEffect,
    beside_metric,
    choose_metric_of_scores,
    drop_likelihoods,
    measure_fit_effect,
    unlike_readings,
)
from surefit.evaluate.paired import ScoreRows, paired_differences
from surefit.evaluate.stats import MeanInterval, PairedDifference, Verdict, detectable_difference, spread_of_difference
from surefit.facts.free_text import is_likelihood
from surefit.task import TaskRecipe, add_task_prefix, mean_scores, select_task_rows, strip_task_prefix

SHOWN = 5


@dataclass(frozen=True)
class ComparedRow:
    """A row's lines of both sides and, if the row has the metric, both values of it."""

    before: Mapping[str, Any]
    after: Mapping[str, Any]
    values: tuple[float, float] | None

    @property
    def gain(self) -> float:
        """Difference of the values, positive if b won; 0 for a row without the metric."""
        return self.values[1] - self.values[0] if self.values else 0.0

    def document(self) -> dict[str, Any]:
        """Return the row as `surefit compare --json` shows it."""
        assert self.values is not None
        return {
            "where": self.after.get("where", self.after.get("index")),
            "prompt": self.after.get("prompt", self.before.get("prompt")),
            "gold": self.after.get("gold"),
            "a": self.before["text"],
            "b": self.after["text"],
            "score_a": self.values[0],
            "score_b": self.values[1],
        }


@dataclass(frozen=True)
class MetricComparison:
    """Comparison of b with a by one metric.

    Attributes:
        a, b: both scores with their intervals.
        difference: b minus a, with its interval, and the rows won, lost and tied.
        mcnemar_p: p of McNemar's test, where scores are 0 and 1.
        detectable: smallest true difference that these rows detect in four of five test sets.
    """

    a: MeanInterval
    b: MeanInterval
    difference: PairedDifference
    mcnemar_p: float | None
    detectable: float

    def document(self) -> dict[str, Any]:
        """Return the metric as `surefit compare --json` shows it."""
        test = {"mcnemar_p": self.mcnemar_p, "detectable": self.detectable}
        return {"a": self.a.document(), "b": self.b.document(), **self.difference.document(), **test}


@dataclass(frozen=True)
class AnswerComparison:
    """Comparison of the answers b with the answers a to the same rows.

    Attributes:
        a, b: their names.
        recipe: name of the recipe that scored them.
        metric: the metric of the verdict.
        metrics: every metric, that of the verdict first.
        rows: all rows, in the order of b.
        fit: how well both fit the rows' answers; None where no likelihoods were read, or they cannot be compared.
        reason: why this metric decides, where answers are free text; and why likelihoods are not compared (`unlike`).
    """

    a: str
    b: str
    recipe: str
    metric: str
    metrics: dict[str, MetricComparison]
    rows: list[ComparedRow]
    fit: FitEffect | None = None
    reason: str = ""
    unlike: bool = False

    @property
    def main(self) -> MetricComparison:
        """Comparison by the metric of the verdict."""
        return self.metrics[self.metric]

    @property
    def verdict(self) -> Verdict:
        """Verdict on b: better, worse, or undecided if the interval contains zero; for free text that of the fit, where
        better and worse mean that b fits the answers so."""
        if self.fit is not None and is_likelihood(self.metric):
            return self.fit.outcome if self.fit.outcome in ("better", "worse") else "undecided"
        return self.main.difference.verdict

    def won(self) -> list[ComparedRow]:
        """Return some of the rows that b won, evenly spaced."""
        return evenly_spaced([row for row in self.rows if row.gain > 0], SHOWN)

    def lost(self) -> list[ComparedRow]:
        """Return some of the rows that b lost, evenly spaced."""
        return evenly_spaced([row for row in self.rows if row.gain < 0], SHOWN)

    def document(self, judge: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the output of `surefit compare --json`; `judge` is what a judge model says."""
        return {
            "a": self.a,
            "b": self.b,
            "recipe": self.recipe,
            "n": len(self.rows),
            "metric": self.metric,
            "verdict": self.verdict,
            "metrics": {name: metric.document() for name, metric in self.metrics.items()},
            "won": [row.document() for row in self.won()],
            "lost": [row.document() for row in self.lost()],
            "fit": None if self.fit is None else self.fit.document(),
            "reason": self.reason,
            "judge": judge,
        }


def read_pair(a: str, b: str, set_name: str = "eval", variant: str | None = None) -> tuple[Answers, Answers]:
    """Read both sides of a command line: run directories, RUN:VARIANT, files of scored predictions; or, on one side
    only, a variant or baseline of the other side's run.

    Args:
        variant: variant of run directories that are named without one.

    Raises:
        DataError: a side names nothing, or has no scores on the set.
    """
    if not _is_there(a) and _is_there(b):
        return _beside(a, b, set_name), _read(b, set_name, variant)
    if not _is_there(b) and _is_there(a):
        return _read(a, set_name, variant), _beside(b, a, set_name)
    return _read(a, set_name, variant), _read(b, set_name, variant)


def _read(text: str, set_name: str, variant: str | None) -> Answers:
    if variant and Path(text).expanduser().is_dir():
        return read_run(f"{text}:{variant}", set_name)
    return read_answers(text, set_name)


def _is_there(text: str) -> bool:
    return Path(text).expanduser().exists() or Path(text.partition(":")[0]).expanduser().is_dir()


def _beside(name: str, other: str, set_name: str) -> Answers:
    """Read a variant or baseline of the other side's run by its bare name."""
    path = Path(other).expanduser()
    directory = other if path.exists() else other.partition(":")[0]
    variants = [] if path.is_file() else list_scored_variants(read_run(other, set_name).run, set_name)  # type: ignore[arg-type]
    for variant in (name, BASELINE + name):
        if variant in variants:
            return read_run(f"{directory}:{variant}", set_name)
    scored_names = f"; scored in {directory}: {', '.join(variants)}" if variants else ""
    raise DataError(
        f"{name!r} is not a run directory, a predictions file or a variant of the other side"
        f"{did_you_mean(name.removeprefix(BASELINE), [v.removeprefix(BASELINE) for v in variants])}{scored_names}",
        code="E7009",
        help="name RUN, RUN:VARIANT, a file that `surefit score --output` wrote, or a baseline that was evaluated",
    )


def judging_recipe(a: Answers, b: Answers, name: str | None) -> str:
    """Return the name of the recipe that scored both sides.

    Raises:
        DataError: the sides have different recipes, or different versions of one.
        ConfigError: neither side names its recipe, or it differs from `name`.
    """
    if None not in (a.recipe, b.recipe) and a.judged_by != b.judged_by:
        sides = " and ".join(f"{side.name} by {side.recipe} version {side.version}" for side in (a, b))
        raise DataError(f"they were scored differently: {sides}", code="E7010", help="evaluate or score both again")
    recorded = a.recipe or b.recipe
    if name and recorded and name != recorded:
        raise ConfigError(f"the answers were scored by {recorded}, not {name}", code="E7011", help="remove --recipe")
    if not (name or recorded):
        raise ConfigError(
            f"neither {a.name} nor {b.name} records its recipe", code="E7012", help="name it with --recipe"
        )
    return name or str(recorded)


def compare_answers(a: Answers, b: Answers, recipe: TaskRecipe, metric: str | None = None) -> AnswerComparison:
    """Compare the answers b with the answers a.

    Args:
        metric: metric of the verdict; the recipe's primary metric by default.

    Raises:
        ConfigError: an unknown metric.
        DataError: the rows differ; says how.
    """
    lines = align_answers(a, b)
    before, after = ([line["scores"] for line in side] for side in (lines, b.lines))
    unlike = unlike_readings(a, b)
    if unlike:
        before, after = drop_likelihoods(before), drop_likelihoods(after)
    choice = choose_metric_of_scores(recipe, b.lines, (before, after))
    recipe, reason = choice.recipe, choice.reason
    if unlike:
        reason = f"likelihoods are not compared, because {unlike}; {recipe.primary_metric.replace('_', ' ')} decides"
    differences = paired_differences(a.name, b.name, before, after, recipe)
    main = metric or recipe.primary_metric
    if main not in differences:
        problem = f"the recipe {recipe.name} has no metric {main!r}{did_you_mean(main, differences)}"
        raise ConfigError(problem, code="E7013", help=f"choose from {', '.join(differences)}")
    old, new = (
        {name: value for name, value in compute_estimates(rows, recipe).items() if name in differences}
        for rows in (before, after)
    )
    sensitivity = _sensitivity(before, after, recipe, differences, new)
    metrics = {
        name: MetricComparison(old[name], new[name], differences[name], *sensitivity[name])
        for name in sorted(differences, key=lambda name: name != main)
    }
    values = _values_per_row(before, after, main, recipe)
    rows = [ComparedRow(*row) for row in zip(lines, b.lines, values, strict=True)]
    fit = measure_fit_effect(a.name, b.name, before, after)
    if fit is not None and not is_likelihood(main):
        diff = differences[main]
        means = (old[main].mean, new[main].mean)
        fit = beside_metric(fit, main, (diff.low, diff.high), means, (before, after), between_runs=True)
    return AnswerComparison(a.name, b.name, recipe.name, main, metrics, rows, fit, reason, bool(unlike))


def _sensitivity(
    before: ScoreRows,
    after: ScoreRows,
    recipe: TaskRecipe,
    differences: Mapping[str, PairedDifference],
    estimates: Mapping[str, MeanInterval],
) -> dict[str, tuple[float | None, float]]:
    """Return metric → McNemar's p, if scores are 0 and 1, and the detectable difference; `estimates` belong to b."""
    if not recipe.parts:
        return {
            name: (
                _mcnemar_p(before, after, name, recipe, differences[name]),
                detectable_difference(spread_of_difference(before, after, name, recipe.aggregate), estimate.n),
            )
            for name, estimate in estimates.items()
        }
    results: dict[str, tuple[float | None, float]] = {}
    primary = []
    for name, part in recipe.parts.items():
        if before_rows := select_task_rows(name, before):
            part_differences, part_estimates = strip_task_prefix(name, differences), strip_task_prefix(name, estimates)
            after_rows = select_task_rows(name, after)
            part_results = _sensitivity(before_rows, after_rows, part, part_differences, part_estimates)
            results |= add_task_prefix(name, part_results)
            primary.append(part_results[part.primary_metric][1])
    return {recipe.primary_metric: (None, math.hypot(*primary) / len(primary)), **results}


def _mcnemar_p(
    before: ScoreRows, after: ScoreRows, metric: str, recipe: TaskRecipe, found: PairedDifference
) -> float | None:
    """Return McNemar's p; None if the score is not a mean of zeros and ones."""
    if recipe.aggregate is not mean_scores or not {row.get(metric, 0.0) for row in (*before, *after)} <= {0.0, 1.0}:
        return None
    return mcnemar(found.wins, found.losses)


def mcnemar(wins: int, losses: int) -> float:
    """Return the exact two-sided p of McNemar's test: the probability that a fair coin, tossed for every row that only
    one side got right, is at least as one-sided.

    >>> round(mcnemar(30, 10), 5), mcnemar(3, 0), mcnemar(0, 0)
    (0.00222, 0.25, 1.0)
    """
    n, fewer = wins + losses, min(wins, losses)
    outcomes = sum(math.comb(n, k) for k in range(fewer + 1))
    return min(1.0, 2 * outcomes / (1 << n))


def _values_per_row(
    before: ScoreRows, after: ScoreRows, metric: str, recipe: TaskRecipe
) -> list[tuple[float, float] | None]:
    """Return each row's two values of a metric, or what `aggregate` gives for the row alone; None for a row without the
    metric."""
    values: list[tuple[float, float] | None] = []
    for pair in zip(before, after, strict=True):
        old, new = (row if metric in row else recipe.aggregate([row]) for row in pair)
        values.append((old[metric], new[metric]) if metric in old and metric in new else None)
    return values
