"""Several tasks in one run: `recipe: math_reasoning + code_generation`.

Each row belongs to the task whose columns it has; it is shown, parsed and scored as in a run of that task alone. The
metrics are prefixed with the task's name (`math_reasoning.exact_match`), and the primary metric is the mean of the
tasks' primary metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from surefit.core.errors import ConfigError
from surefit.task import (
    Example,
    Grammar,
    Prediction,
    Row,
    Scores,
    TaskRecipe,
    add_task_prefix,
    select_task_rows,
    task_of,
)

MEAN = "mean_of_tasks"
FIELD = "recipe"


def mix_recipes(recipes: Sequence[TaskRecipe]) -> TaskRecipe:
    """Combine several recipes into one.

    Raises:
        ConfigError: a recipe is named twice, or ranks labels (a forward pass, no text), or their answers have different
            stop texts.
    """
    parts = {recipe.name: recipe for recipe in recipes}
    _require_mixable(recipes, parts)

    def to_example(row: Row) -> Example:
        part = task_of(list(row), parts)
        return replace(part.to_example(row), part=part.name)

    def score(example: Example, prediction: Prediction) -> Scores:
        part = parts[_part(example)]
        return _prefix_scores(part, part.score(example, prediction))

    def score_samples(example: Example, predictions: Sequence[Prediction]) -> Scores:
        part = parts[_part(example)]
        assert part.score_samples is not None
        return _prefix_scores(part, part.score_samples(example, predictions))

    def score_many(rows: Sequence[tuple[Example, Prediction]]) -> Sequence[Scores]:
        all_scores: list[Scores] = [{}] * len(rows)
        for name, part in parts.items():
            indices = [number for number, (example, _) in enumerate(rows) if example.part == name]
            pairs = [rows[number] for number in indices]
            scores = part.score_many(pairs) if part.score_many else [part.score(*pair) for pair in pairs]
            for number, row_scores in zip(indices, scores, strict=True):
                all_scores[number] = _prefix_scores(part, row_scores)
        return all_scores

    def aggregate(rows: Sequence[Scores]) -> Scores:
        scores: Scores = {}
        primary = []
        for name, part in parts.items():
            if part_rows := select_task_rows(name, rows):
                part_scores = part.aggregate(part_rows)
                scores |= add_task_prefix(name, part_scores)
                primary.append(part_scores[part.primary_metric])
        return {MEAN: math.fsum(primary) / len(primary), **scores}

    def grammar(example: Example) -> Grammar:
        part_grammar = parts[_part(example)].grammar
        assert part_grammar is not None
        return part_grammar(example)

    return TaskRecipe(
        name=" + ".join(parts),
        version=sum(part.version for part in recipes),  # grows whenever one part's version does
        citation="; ".join(f"{part.name}: {part.citation}" for part in recipes),
        columns=(),
        to_example=to_example,
        parse=_no_part,
        score=score,
        primary_metric=MEAN,
        chance_level=math.fsum(part.chance_level for part in recipes) / len(parts),
        grammar=grammar if all(part.grammar for part in recipes) else None,
        aggregate=aggregate,
        score_samples=score_samples if all(part.score_samples for part in recipes) else None,
        stop=recipes[0].stop,
        score_many=score_many if any(part.score_many for part in recipes) else None,
        metrics=_metrics(recipes),
        parts=parts,
    )


def _require_mixable(recipes: Sequence[TaskRecipe], parts: Mapping[str, TaskRecipe]) -> None:
    if len(parts) < len(recipes):
        names = ", ".join(recipe.name for recipe in recipes)
        raise ConfigError(f"a recipe is named twice: {names}", code="E7122", field=FIELD, help="name each once")
    for recipe in recipes:
        if recipe.choices is not None:
            raise ConfigError(
                f"{recipe.name} ranks labels in one forward pass and cannot be mixed with recipes that generate text",
                code="E7123",
                field=FIELD,
                help="give it its own run; `model.name_or_path` and `lora.start_from` chain runs",
            )
        if recipe.stop != recipes[0].stop:
            raise ConfigError(
                f"{recipe.name} and {recipes[0].name} have different stop strings",
                code="E7124",
                field=FIELD,
                help="give each its own run",
            )


def _prefix_scores(part: TaskRecipe, scores: Scores) -> Scores:
    """Return a row's scores with its task's prefix, and its value in the mean of the tasks."""
    mean_score = {MEAN: scores[part.primary_metric]} if part.primary_metric in scores else {}
    return mean_score | add_task_prefix(part.name, scores)


def _part(example: Example) -> str:
    assert example.part is not None
    return example.part


def _no_part(text: str) -> None:
    raise AssertionError("an answer is parsed by the task of its example: `recipe.of(example).parse`")


def _metrics(recipes: Sequence[TaskRecipe]) -> tuple[str, ...]:
    if not all(part.metrics for part in recipes):
        return ()
    return (MEAN, *(f"{part.name}.{metric}" for part in recipes for metric in part.metrics))
