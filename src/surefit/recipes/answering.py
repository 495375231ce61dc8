"""Scoring of reasoning models by their final answer; applied to every recipe by `recipes.get_recipe`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import wraps

from surefit.facts.thinking import strip_reasoning
from surefit.task import Example, Prediction, Scores, TaskRecipe


def judge_final_answers(recipe: TaskRecipe) -> TaskRecipe:
    """Return a recipe that sees only the answer after a model's reasoning; unchanged where it needs the reasoning too.

    Reasoning that never ends has no answer after it: the recipe gets an empty text.
    """
    if recipe.thoughts:
        return recipe
    scorer, samples_scorer, many_scorer = recipe.score, recipe.score_samples, recipe.score_many

    @wraps(scorer)
    def score(example: Example, prediction: Prediction) -> Scores:
        return scorer(example, _strip_reasoning(prediction))

    def score_samples(example: Example, predictions: Sequence[Prediction]) -> Scores:
        assert samples_scorer is not None
        return samples_scorer(example, [_strip_reasoning(sample) for sample in predictions])

    def score_many(rows: Sequence[tuple[Example, Prediction]]) -> Sequence[Scores]:
        assert many_scorer is not None
        return many_scorer([(example, _strip_reasoning(prediction)) for example, prediction in rows])

    return replace(
        recipe,
        parse=lambda text: recipe.parse(strip_reasoning(text)),
        score=score,
        score_samples=score_samples if samples_scorer else None,
        score_many=score_many if many_scorer else None,
    )


def _strip_reasoning(prediction: Prediction) -> Prediction:
    return replace(prediction, text=strip_reasoning(prediction.text))
