"""Scores rows: answers of a model, or of a baseline that needs none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefit.core.progress import OnProgress, ignore_progress
from surefit.evaluate.answer_cache import AnswerCache
from surefit.evaluate.answers import BASELINE
from surefit.evaluate.generation_settings import GenerationSettings
from surefit.evaluate.inference import PromptModel, answer_rows
from surefit.evaluate.record import VariantResult, baseline_settings
from surefit.evaluate.rewards import WORDS
from surefit.evaluate.rows import (
    EvalRows,
    RowPrediction,
    build_prediction_line,
    predict_baseline,
    predictions_from_answers,
    row_samples,
    score_rows,
)
from surefit.facts.free_text import count_words
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
    """Generate one variant's answers to these rows with one set of settings, and score them; where the recipe
    measures it, read the likelihood of the rows' own as well. Only `kept` is written to disk."""
    prompted = answer_rows(respondent, recipe, rows, way, kept, on_progress)
    predictions = predictions_from_answers(recipe, rows, prompted.answers)
    scores = score_rows(recipe, rows, predictions)
    read_counts: dict[str, int] = {}
    read_with: dict[str, Any] = {}
    if recipe.measures_likelihood and (found := respondent.likelihoods(rows, prompted.prompts, way)) is not None:
        scores = [row | likelihood for row, likelihood in zip(scores, found.scores, strict=True)]
        read_counts, read_with = found.counts, found.read_with
    if recipe.pairs:
        words = [float(count_words(row_samples(answer)[0].text)) for answer in predictions]
        scores = [row | {WORDS: count} for row, count in zip(scores, words, strict=True)]
    lines = [
        build_prediction_line(rows, place, predictions[place], scores[place], prompt=respondent.shown(prompt))
        for place, prompt in enumerate(prompted.prompts)
    ]
    tokens = sum(answer.tokens for answer in prompted.answers)
    counts = _count_failures([prediction for answer in predictions for prediction in row_samples(answer)])
    about_time = (prompted.seconds, tokens)
    return VariantResult(variant, lines, way.settings, way.costs, *counts, *about_time, read_counts, read_with)


def score_baseline(name: str, recipe: TaskRecipe, rows: EvalRows, samples: int = 1) -> VariantResult:
    """Score the answers of one of the recipe's baselines to these rows; all of its samples are the same."""
    predictions = predict_baseline(recipe, rows, name)
    answers: list[RowPrediction] = [[answer] * samples if samples > 1 else answer for answer in predictions]
    scores = score_rows(recipe, rows, answers)
    lines = [build_prediction_line(rows, place, answers[place], scores[place]) for place in range(len(rows))]
    return VariantResult(BASELINE + name, lines, baseline_settings(samples), {}, *_count_failures(predictions))


def _count_failures(predictions: Sequence[Prediction]) -> tuple[int, int]:
    """Count truncated answers, and answers that do not parse (truncated ones included)."""
    return (
        sum(prediction.truncated for prediction in predictions),
        sum(prediction.parsed is None for prediction in predictions),
    )
