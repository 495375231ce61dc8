"""The task's scores of a model that is being trained: the held-out prompts, answered at every checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from surefit.config.schema import Config
from surefit.core.sampling import evenly
from surefit.data.formats import Examples
from surefit.data.tokenize import tokenize_prompt
from surefit.evaluate.runner import errors_at, read_answer
from surefit.generate.engine import generate
from surefit.model.prepare import reads_padding
from surefit.task import TaskRecipe


def scorer(
    config: Config, recipe: TaskRecipe, tokenizer: PreTrainedTokenizerBase, held_out: Examples
) -> Callable[[Any], Mapping[str, float]]:
    """What measures the recipe's metrics, as `surefit evaluate` would: the same rows, decoding and judgement.

    Args:
        config: nothing in it is "auto"; its `evaluate` section decides rows, tokens and batch.
        recipe: judges the answers.
        held_out: the rows; those that cannot be turned into a prompt are found here, before training.

    Raises:
        DataError: a row has no prompt.
    """
    section = config.evaluate
    batch_size = section.batch_size
    assert isinstance(batch_size, int)
    prompts, examples, places = [], [], []
    for index in evenly(len(held_out), section.max_examples):
        with errors_at(held_out.where[index]):
            prompts.append(tokenize_prompt(held_out.examples[index], tokenizer))
        examples.append(held_out.examples[index])
        places.append(held_out.where[index])

    def score(model: Any) -> Mapping[str, float]:
        with reads_padding(model):
            answers = generate(model, tokenizer, prompts, section.max_new_tokens, batch_size)
        rows = []
        for example, where, answer in zip(examples, places, answers, strict=True):
            with errors_at(where):
                rows.append(recipe.score(example, read_answer(recipe, answer)))
        return dict(recipe.aggregate(rows))

    return score
