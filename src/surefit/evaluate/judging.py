"""From rows to scored answers: a model that is asked, or a baseline that needs none."""

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
    """Ask one variant about these rows in one way, and judge its answers. Nothing is written but what `kept` keeps."""
    asked = answer_rows(respondent, recipe, rows, way, kept, on_progress)
    found = []
    for where, example, answer in zip(rows.where, rows.examples, asked.answers, strict=True):
        with errors_at(where):
            found.append(predictions_from_answer(recipe, example, answer))
    scores = score_rows(recipe, rows.examples, found, way.samples)
    lines = [
        _with_prompt(
            build_prediction_line(recipe, index, where, example, own, way.samples, known), respondent.shown(prompt)
        )
        for index, where, example, own, known, prompt in zip(
            rows.indices, rows.where, rows.examples, found, scores, asked.prompts, strict=True
        )
    ]
    tokens = sum(answer.tokens for answer in asked.answers)
    return VariantResult(variant, lines, way.settings, way.costs, *_failures(found), asked.seconds, tokens)


def score_baseline(name: str, recipe: TaskRecipe, rows: EvalRows, samples: int = 1) -> VariantResult:
    """Judge what one of the recipe's baselines answers to these rows; it answers the same however often it is asked."""
    found = []
    for where, example in zip(rows.where, rows.examples, strict=True):
        with errors_at(where):
            answer = recipe.baselines[name](example)
            found.append([answer if answer.parsed is not None else replace(answer, parsed=recipe.parse(answer.text))])
    lines = [
        build_prediction_line(recipe, index, where, example, own * samples, samples, known)
        for index, where, example, own, known in zip(
            rows.indices,
            rows.where,
            rows.examples,
            found,
            score_rows(recipe, rows.examples, found, samples),
            strict=True,
        )
    ]
    return VariantResult(BASELINE + name, lines, baseline_settings(samples), {}, *_failures(found))


def _with_prompt(line: dict[str, Any], prompt: str) -> dict[str, Any]:
    return {"index": line.pop("index"), "where": line.pop("where"), "prompt": prompt, **line}


def _failures(found: Sequence[Sequence[Prediction]]) -> tuple[int, int]:
    """Answers that were cut, and answers that do not parse (the cut ones among them)."""
    every = [one for own in found for one in own]
    return sum(one.truncated for one in every), sum(one.parsed is None for one in every)
