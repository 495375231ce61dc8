"""Compares two sets of answers to the same rows by the gold answers: which is better, how surely, and which difference
could have been detected.

The gold answer decides: a row is won, lost or tied by its score. The verdict of a judge model (evaluate/judge.py) is
reported in addition, never instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefit.core.errors import ConfigError, DataError, did_you_mean
from surefit.core.sampling import evenly_spaced
from surefit.evaluate.answers import BASELINE, Answers, align_answers, list_scored_variants, read_answers, read_run
from surefit.evaluate.estimates import compute_estimates
from surefit.evaluate.paired import ScoreRows, paired_differences, row_values
from surefit.evaluate.stats import PairedDifference, detectable_difference, spread_of_difference
from surefit.task import TaskRecipe, add_task_prefix, mean_scores, select_task_rows, strip_task_prefix

SHOWN = 5


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


def compare_answers(a: Answers, b: Answers, recipe: TaskRecipe, metric: str | None = None) -> dict[str, Any]:
    """Compare the answers b with the answers a.

    Args:
        metric: metric of the verdict; the recipe's primary metric by default.

    Returns:
        The names, `n`, and per metric both scores with intervals, the difference with its interval, rows won, lost and
        tied, McNemar's p where scores are 0 and 1, and the detectable difference; the verdict; some of the rows won and
        lost; and `matched`, all rows as (a's line, b's line).

    Raises:
        ConfigError: an unknown metric.
        DataError: the rows differ; says how.
    """
    lines = align_answers(a, b)
    before, after = _scores(lines), _scores(b.lines)
    differences = paired_differences(a.name, b.name, before, after, recipe)
    metric_name = metric or recipe.primary_metric
    if metric_name not in differences:
        problem = f"the recipe {recipe.name} has no metric {metric_name!r}{did_you_mean(metric_name, differences)}"
        raise ConfigError(problem, code="E7013", help=f"choose from {', '.join(differences)}")
    means = [compute_estimates(rows, recipe) for rows in (before, after)]
    sensitivity = _sensitivity(a, b, before, after, recipe, means[1])
    metrics = {
        name: {
            "a": means[0][name],
            "b": means[1][name],
            **_difference(differences[name]),
            **sensitivity[name],
        }
        for name in sorted(differences, key=lambda name: name != metric_name)
    }
    return {
        "a": a.name,
        "b": b.name,
        "recipe": recipe.name,
        "n": len(before),
        "metric": metric_name,
        "verdict": decide_verdict(differences[metric_name]),
        "metrics": metrics,
        **_rows_that_differ(lines, b.lines, per_row_values(before, after, metric_name, recipe)),
        "matched": list(zip(lines, b.lines, strict=True)),
    }


def _scores(lines: Sequence[dict[str, Any]]) -> ScoreRows:
    return [line["scores"] for line in lines]


def _difference(found: PairedDifference) -> dict[str, Any]:
    interval = [found.low, found.high]
    counts = {"wins": found.wins, "losses": found.losses, "ties": found.ties}
    return {"difference": found.difference, "ci95": interval, **counts}


def decide_verdict(found: PairedDifference) -> str:
    """Return better or worse, or undecided if the interval contains zero."""
    if found.low > 0:
        return "better"
    return "worse" if found.high < 0 else "undecided"


def _sensitivity(
    a: Answers, b: Answers, before: ScoreRows, after: ScoreRows, recipe: TaskRecipe, of: Mapping[str, Any]
) -> dict[str, dict[str, float | None]]:
    """Return metric → McNemar's p and the detectable difference; `of` holds the estimates of b."""
    if not recipe.parts:
        return {
            name: {
                "mcnemar_p": _mcnemar(a, b, before, after, name, recipe),
                "detectable": detectable_difference(
                    spread_of_difference(before, after, name, recipe.aggregate), estimate["n"]
                ),
            }
            for name, estimate in of.items()
        }
    results: dict[str, dict[str, float | None]] = {}
    primary = []
    for name, part in recipe.parts.items():
        if before_rows := select_task_rows(name, before):
            part_results = _sensitivity(
                a, b, before_rows, select_task_rows(name, after), part, strip_task_prefix(name, of)
            )
            results |= add_task_prefix(name, part_results)
            primary.append(part_results[part.primary_metric]["detectable"] or 0.0)
    overall = {"mcnemar_p": None, "detectable": math.hypot(*primary) / len(primary)}
    return {recipe.primary_metric: overall, **results}


def _mcnemar(
    a: Answers, b: Answers, before: ScoreRows, after: ScoreRows, metric: str, recipe: TaskRecipe
) -> float | None:
    """Return McNemar's p; None if the score is not a mean of zeros and ones."""
    if recipe.aggregate is not mean_scores:
        return None
    old, new = row_values(a.name, b.name, before, after, metric)
    if not {*old, *new} <= {0.0, 1.0}:
        return None
    wins, losses = (sum(x > y for x, y in zip(*pair, strict=True)) for pair in ((new, old), (old, new)))
    return mcnemar(wins, losses)


def mcnemar(wins: int, losses: int) -> float:
    """Return the exact two-sided p of McNemar's test: the probability that a fair coin, tossed for every row that only
    one side got right, is at least as one-sided.

    >>> round(mcnemar(30, 10), 5), mcnemar(3, 0), mcnemar(0, 0)
    (0.00222, 0.25, 1.0)
    """
    n, fewer = wins + losses, min(wins, losses)
    outcomes = sum(math.comb(n, k) for k in range(fewer + 1))
    return min(1.0, 2 * outcomes / (1 << n))


def per_row_values(
    before: ScoreRows, after: ScoreRows, metric: str, recipe: TaskRecipe
) -> list[tuple[float, float] | None]:
    """Return each row's two values of a metric, or what `aggregate` gives for the row alone; None for a row without the
    metric."""
    values: list[tuple[float, float] | None] = []
    for pair in zip(before, after, strict=True):
        old, new = (row if metric in row else recipe.aggregate([row]) for row in pair)
        values.append((old[metric], new[metric]) if metric in old and metric in new else None)
    return values


def _rows_that_differ(
    before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], values: Sequence[tuple[float, float] | None]
) -> dict[str, Any]:
    """Return some of the rows won and of the rows lost, evenly spaced."""
    won = [number for number, pair in enumerate(values) if pair is not None and pair[1] > pair[0]]
    lost = [number for number, pair in enumerate(values) if pair is not None and pair[1] < pair[0]]

    def shown(numbers: Sequence[int]) -> list[dict[str, Any]]:
        return [_example(before[number], after[number], values[number]) for number in evenly_spaced(numbers, SHOWN)]

    return {"won": shown(won), "lost": shown(lost)}


def _example(old: dict[str, Any], new: dict[str, Any], pair: tuple[float, float] | None) -> dict[str, Any]:
    assert pair is not None
    return {
        "where": new.get("where", new.get("index")),
        "prompt": new.get("prompt", old.get("prompt")),
        "gold": new.get("gold"),
        "a": old["text"],
        "b": new["text"],
        "score_a": pair[0],
        "score_b": pair[1],
    }
