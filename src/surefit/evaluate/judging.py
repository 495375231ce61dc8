"""Scores rows: answers of a model, or of a baseline that needs none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from surefit.core.errors import errors_at
from surefit.core.progress import OnProgress, ignore_progress
from surefit.evaluate.answer_cache import AnswerCache
from surefit.evaluate.answers import BASELINE
from surefit.evaluate.generation_settings import GenerationSettings
from surefit.evaluate.inference import PromptModel, answer_rows
from surefit.evaluate.record import VariantResult, baseline_settings
from surefit.evaluate.rows import EvalRows, build_prediction_line, predictions_from_answer, score_rows
from surefit.task import Prediction, TaskRecipe


def score_variant(
    variant: str,
    respondent: PromptModel,
    recipe: TaskRecipe,
    rows: EvalRows,
    way: GenerationSettings,
    kept: AnswerCache,
    on_progress: OnProgress = ignore_progress,
) -> VariantResult:
    """Generate one variant's answers to these rows with one set of settings, and score them. Only `kept` is written to
    disk."""
    prompted = answer_rows(respondent, recipe, rows, way, kept, on_progress)
    predictions = []
    for where, example, answer in zip(rows.where, rows.examples, prompted.answers, strict=True):
        with errors_at(where):
            predictions.append(predictions_from_answer(recipe, example, answer))
    scores = score_rows(recipe, rows.examples, predictions, way.samples)
    lines = [
        _with_prompt(
            build_prediction_line(recipe, index, where, example, row_predictions, way.samples, row_scores),
            respondent.shown(prompt),
        )
        for index, where, example, row_predictions, row_scores, prompt in zip(
            rows.indices, rows.where, rows.examples, predictions, scores, prompted.prompts, strict=True
        )
    ]
    tokens = sum(answer.tokens for answer in prompted.answers)
    return VariantResult(variant, lines, way.settings, way.costs, *_failures(predictions), prompted.seconds, tokens)


def score_baseline(name: str, recipe: TaskRecipe, rows: EvalRows, samples: int = 1) -> VariantResult:
    """Score the answers of one of the recipe's baselines to these rows; all of its samples are the same."""
    predictions = []
    for where, example in zip(rows.where, rows.examples, strict=True):
        with errors_at(where):
            answer = recipe.baselines[name](example)
            predictions.append(
                [answer if answer.parsed is not None else replace(answer, parsed=recipe.parse(answer.text))]
            )
    lines = [
        build_prediction_line(recipe, index, where, example, row_predictions * samples, samples, row_scores)
        for index, where, example, row_predictions, row_scores in zip(
            rows.indices,
            rows.where,
            rows.examples,
            predictions,
            score_rows(recipe, rows.examples, predictions, samples),
            strict=True,
        )
    ]
    return VariantResult(BASELINE + name, lines, baseline_settings(samples), {}, *_failures(predictions))


def _with_prompt(line: dict[str, Any], prompt: str) -> dict[str, Any]:
    return {"index": line.pop("index"), "where": line.pop("where"), "prompt": prompt, **line}


def _failures(found: Sequence[Sequence[Prediction]]) -> tuple[int, int]:
    """Count truncated answers, and answers that do not parse (truncated ones included)."""
    predictions = [prediction for row_predictions in found for prediction in row_predictions]
    return sum(prediction.truncated for prediction in predictions), sum(
        prediction.parsed is None for prediction in predictions
    )
