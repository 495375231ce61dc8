"""`surefit predict`: rows or one prompt in, answers out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from surefit.cli.prepare import Prepared
from surefit.core.errors import ConfigError
from surefit.data.formats import Examples, to_prompts
from surefit.data.load import load_rows
from surefit.data.tokenize import tokenize_prompt
from surefit.evaluate.variants import VARIANTS, open_variants
from surefit.generate.engine import generate
from surefit.task import Example, Prediction


def rows_to_answer(run: Prepared, data: str | None, prompt: str | None) -> Examples:
    """The rows of `data`, with or without gold answers, or `prompt` as one user message."""
    if (data is None) == (prompt is None):
        raise ConfigError("name either DATA or --prompt", help="surefit predict TARGET rows.jsonl -o answers.jsonl")
    if data is None:
        return Examples([Example(messages=({"role": "user", "content": prompt},))], ["--prompt"], [])
    return to_prompts(load_rows(data), run.recipe, run.resolved.config.data.bad_rows)


def answer(
    run: Prepared, examples: Examples, variant: str | None, on_progress: Callable[[int, int, str], None]
) -> tuple[str, list[dict[str, Any]]]:
    """The variant that answered (the best there is if None) and one record per row."""
    config = run.resolved.config
    chosen = variant or best_variant(run)
    for _, model, tokenizer in open_variants(config, run.hardware, run.run, [chosen]):
        prompts = [tokenize_prompt(example, tokenizer) for example in examples]
        batch = config.evaluate.batch_size
        assert isinstance(batch, int)
        answers = generate(model, tokenizer, prompts, config.evaluate.max_new_tokens, batch, on_progress)
    records = []
    for index, (example, where, found) in enumerate(zip(examples, examples.where, answers, strict=True)):
        parsed = run.recipe.parse(found.text)
        record = {"index": index, "where": where, "text": found.text, "truncated": found.truncated, "parsed": parsed}
        if example.completion is not None:
            record["scores"] = run.recipe.score(example, Prediction(found.text, found.truncated, parsed))
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
