"""What is scored of a model that thinks: its final answer. For every recipe, where `recipes.get` hands it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import wraps

from surefit.facts.thinking import strip_reasoning
from surefit.task import Example, Prediction, Scores, TaskRecipe


def judge_final_answers(recipe: TaskRecipe) -> TaskRecipe:
    """The same recipe, which sees the answer behind a model's reasoning; as it is where it asks for the reasoning too.

    A thought that never ends has no answer behind it: the recipe is given an empty text.
    """
    if recipe.thoughts:
        return recipe
    scorer, samples, many = recipe.score, recipe.score_samples, recipe.score_many

    @wraps(scorer)
    def score(example: Example, prediction: Prediction) -> Scores:
        return scorer(example, _strip_reasoning(prediction))

    def score_samples(example: Example, predictions: Sequence[Prediction]) -> Scores:
        assert samples is not None
        return samples(example, [_strip_reasoning(one) for one in predictions])

    def score_many(rows: Sequence[tuple[Example, Prediction]]) -> Sequence[Scores]:
        assert many is not None
        return many([(example, _strip_reasoning(one)) for example, one in rows])

    return replace(
        recipe,
        parse=lambda text: recipe.parse(strip_reasoning(text)),
        score=score,
        score_samples=score_samples if samples else None,
        score_many=score_many if many else None,
    )


def _strip_reasoning(prediction: Prediction) -> Prediction:
    return replace(prediction, text=strip_reasoning(prediction.text))
