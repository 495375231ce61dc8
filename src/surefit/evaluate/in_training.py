"""Task scores during training: the model answers the held-out prompts at every checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from surefit.config.schema import SureFitConfig
from surefit.core.progress import ignore_progress
from surefit.data.rows.layouts import Examples
from surefit.data.rows.shorten import build_prompt_cutter
from surefit.evaluate.generation_settings import list_generation_settings
from surefit.evaluate.inference import LocalModel
from surefit.evaluate.likelihood import pair_with_other_prompts
from surefit.evaluate.rows import predictions_from_answers, score_rows, select_eval_rows
from surefit.evaluate.settings import require_evaluation_settings
from surefit.model.prepare import reads_padding
from surefit.model.tokenizer import with_template_kwargs
from surefit.task import TaskRecipe


def build_scorer(
    config: SureFitConfig, recipe: TaskRecipe, tokenizer: PreTrainedTokenizerBase, held_out: Examples
) -> Callable[[Any], Mapping[str, float]]:
    """Build the function that computes the recipe's metrics as `surefit evaluate` would: same rows, decoding and
    scoring.

    If the config scores with and without a grammar, only without is used.

    Args:
        config: resolved: no setting is "auto"; its `evaluate` section sets rows, tokens and batch size.
        recipe: scores the answers.
        held_out: the held-out rows; a row that gives no prompt raises here, before training.

    Raises:
        ConfigError: settings that contradict each other.
        DataError: a row has no prompt.
    """
    require_evaluation_settings(config.evaluate, recipe)
    tokenizer = with_template_kwargs(tokenizer, config.evaluate.chat_template_kwargs)
    settings = list_generation_settings(config, recipe)[0]
    rows = select_eval_rows("eval", held_out, config.evaluate.max_examples)
    cut = build_prompt_cutter(config, tokenizer)
    prompts = LocalModel(None, tokenizer, recipe, cut).prompts(rows)
    reads_answers = recipe.measures_likelihood
    if reads_answers:
        rows = pair_with_other_prompts(rows)

    def score(model: Any) -> Mapping[str, float]:
        respondent = LocalModel(model, tokenizer, recipe, cut, config.data.max_length)
        with reads_padding(model):
            answers = respondent.answer(rows, prompts, settings, ignore_progress)
            likelihoods = respondent.likelihoods(rows, prompts, settings).scores if reads_answers else [{}] * len(rows)
        scores = score_rows(recipe, rows, predictions_from_answers(recipe, rows, answers))
        return dict(recipe.aggregate([row | more for row, more in zip(scores, likelihoods, strict=True)]))

    return score
