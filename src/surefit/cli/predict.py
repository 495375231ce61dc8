"""`surefit predict`: rows or one prompt in, answers out."""

from __future__ import annotations

import dataclasses
from typing import Any

from surefit.cli.prepare import Prepared
from surefit.core.errors import ConfigError
from surefit.core.progress import OnProgress
from surefit.data.formats import Examples, to_prompts
from surefit.data.load import load_rows
from surefit.data.tokenize import tokenize_prompt
from surefit.evaluate.runner import errors_at, read_answer
from surefit.evaluate.variants import VARIANTS, choose, open_variants
from surefit.generate.engine import generate
from surefit.task import Example


def rows_to_answer(run: Prepared, data: str | None, prompt: str | None) -> Examples:
    """The rows of `data`, with or without gold answers, or `prompt` as one user message."""
    if (data is None) == (prompt is None):
        raise ConfigError("name either DATA or --prompt", help="surefit predict TARGET rows.jsonl -o answers.jsonl")
    if data is None:
        return Examples([Example(messages=({"role": "user", "content": prompt},))], ["--prompt"], [])
    return to_prompts(load_rows(data), run.recipe, run.resolved.config.data.bad_rows)


def answer(
    run: Prepared, examples: Examples, variant: str | None, on_progress: OnProgress
) -> tuple[str, list[dict[str, Any]]]:
    """The variant that answered (the best there is if None) and one record per row.

    Raises:
        ConfigError: a variant that the run does not have (yet).
        GateError: merged/ is not the model that its certificate was given for.
    """
    config = run.resolved.config
    (chosen,) = choose(config, run.run, [variant or best_variant(run)])
    for _, model, tokenizer in open_variants(config, run.hardware, run.run, [chosen]):
        prompts = []
        for example, where in zip(examples, examples.where, strict=True):
            with errors_at(where):
                prompts.append(tokenize_prompt(example, tokenizer))
        batch = config.evaluate.batch_size
        assert isinstance(batch, int)
        answers = generate(model, tokenizer, prompts, config.evaluate.max_new_tokens, batch, on_progress)
    records = []
    for index, (example, where, found) in enumerate(zip(examples, examples.where, answers, strict=True)):
        prediction = read_answer(run.recipe, found)
        record: dict[str, Any] = {"index": index, "where": where, **dataclasses.asdict(prediction)}
        if example.completion is not None:
            with errors_at(where):
                record["scores"] = run.recipe.score(example, prediction)
        records.append(record)
    return chosen, records


def best_variant(run: Prepared) -> str:
    """The last of the run's variants that exists: merged, else the adapter, else the base."""
    there = {
        "base": True,
        "adapter": run.run.adapter.exists(),
        "merged": run.run.merged.exists(),
        "model": run.run.model.exists(),
    }
    return [name for name in VARIANTS[run.resolved.config.adapter.kind] if there[name]][-1]
