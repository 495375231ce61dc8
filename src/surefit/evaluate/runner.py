"""Every variant of a run answers the same held-out prompts, and every answer counts.

The denominator is the number of rows: an answer that does not parse, or that the token limit cut, is a row with the
recipe's zeros, never one that is left out.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from surefit.config.resolve import HardwareLike
from surefit.config.schema import Config
from surefit.core.errors import DataError
from surefit.core.progress import OnProgress, silent
from surefit.core.rundir import RunDir, read_json, read_jsonl, write_atomic, write_json
from surefit.core.sampling import evenly
from surefit.data.formats import Examples
from surefit.data.tokenize import tokenize_prompt
from surefit.evaluate.summary import estimates, gate_metric, summarise
from surefit.evaluate.variants import VARIANTS, choose, identity, open_variants, place
from surefit.generate.engine import Generation, generate
from surefit.task import Example, Prediction, Scores, TaskRecipe


@dataclass(frozen=True)
class Picked:
    """The rows of a set that are scored: their numbers in the set, examples and places."""

    indices: list[int]
    examples: list[Example]
    where: list[str]


def evaluate(
    config: Config,
    recipe: TaskRecipe,
    hardware: HardwareLike,
    run: RunDir,
    sets: Mapping[str, Examples],
    variants: Sequence[str] | None = None,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Score variants on sets; write eval/SET/VARIANT.json with its predictions, and eval/summary.json.

    The summary also holds what earlier calls scored, where it is still comparable: the same model, rows, recipe version
    and token limit. What is not is named under "left_out".

    Args:
        config: nothing in it is "auto".
        recipe: judges the answers.
        hardware: where the models are loaded, one at a time; base and adapter are one model.
        sets: name → rows, "eval" (the held-out rows) among them.
        variants: which to score now; all of the run's kind by default.
        on_progress: called with (rows done, rows, what is being scored).

    Returns:
        The summary, as in eval/summary.json. Its "gate" is None, or says whether it passed and why.

    Raises:
        ConfigError: a variant that this run does not have (yet), or a gate on a metric that the recipe does not give.
        DataError: a set is empty, or a row cannot be scored.
        GateError: merged/ is not the model that its certificate was given for.
        MachineError: not enough GPU memory, or the disk.
    """
    chosen = choose(config, run, variants)
    picked = {name: _pick(name, examples, config.evaluate.max_examples) for name, examples in sets.items()}
    for rows in picked.values():
        _require_scorable(rows, recipe)
    hashes = functools.cache(functools.partial(identity, config, run))
    total, done = len(chosen) * sum(len(rows.examples) for rows in picked.values()), 0
    for variant, model, tokenizer in open_variants(config, hardware, run, chosen):
        scorer = _Scorer(config, recipe, run, variant, hashes(variant), model, tokenizer)
        for name, rows in picked.items():
            scorer.score(name, rows, _part_of(on_progress, done, total, f"{variant} on {name}"))
            done += len(rows.examples)
        del model, scorer  # the next variant needs the memory
    scored, left_out = _scored(config, recipe, run, picked, hashes)
    summary = summarise(recipe, config.evaluate.gate, scored, left_out)
    write_json(run.eval_summary, summary)
    return summary


def _pick(name: str, examples: Examples, limit: int | None) -> Picked:
    """All rows, or `limit` of them taken evenly from the whole set."""
    if len(examples) == 0:
        raise DataError(
            f"the set {name!r} has no rows to score",
            field="data.eval" if name == "eval" else f"evaluate.also.{name}",
            help="hold out more rows, or name a file that has some",
        )
    indices = evenly(len(examples), limit)
    return Picked(indices, [examples.examples[i] for i in indices], [examples.where[i] for i in indices])


def read_answer(recipe: TaskRecipe, answer: Generation) -> Prediction:
    """What the recipe makes of an answer.

    A truncated one is not parsed: half a list of calls is no answer, even where a repair would make it one.
    """
    return Prediction(answer.text, answer.truncated, None if answer.truncated else recipe.parse(answer.text))


def _require_scorable(rows: Picked, recipe: TaskRecipe) -> None:
    """Find a row without a gold answer now, not after an hour of generating."""
    for example, where in zip(rows.examples, rows.where, strict=True):
        with errors_at(where):
            recipe.score(example, Prediction(text=""))


@contextlib.contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Add a row's place to what is wrong with it."""
    try:
        yield
    except DataError as error:
        raise DataError(error.message, path=where, field=error.field, help=error.help) from error


def _part_of(on_progress: OnProgress, before: int, total: int, label: str) -> OnProgress:
    return lambda done, _, text: on_progress(before + done, total, f"{label} {text}".rstrip())


class _Scorer:
    """One variant, asked."""

    def __init__(
        self,
        config: Config,
        recipe: TaskRecipe,
        run: RunDir,
        variant: str,
        sha256: str | None,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.config, self.recipe, self.run, self.variant, self.sha256 = config, recipe, run, variant, sha256
        self.model, self.tokenizer = model, tokenizer

    def score(self, name: str, rows: Picked, on_progress: OnProgress) -> None:
        """Generate, parse, score, write."""
        prompts = []
        for example, where in zip(rows.examples, rows.where, strict=True):
            with errors_at(where):
                prompts.append(tokenize_prompt(example, self.tokenizer))
        started = time.perf_counter()
        settings = self.config.evaluate
        assert isinstance(settings.batch_size, int)
        answers = generate(
            self.model, self.tokenizer, prompts, settings.max_new_tokens, settings.batch_size, on_progress
        )
        seconds = time.perf_counter() - started
        each = zip(rows.indices, rows.examples, rows.where, prompts, answers, strict=True)
        lines = [self._line(*row) for row in each]
        self._write(name, lines, answers, seconds)

    def _line(self, index: int, example: Example, where: str, prompt: list[int], answer: Generation) -> dict[str, Any]:
        prediction = read_answer(self.recipe, answer)
        with errors_at(where):
            scores = self.recipe.score(example, prediction)
        return {
            "index": index,
            "where": where,
            "prompt": self.tokenizer.decode(prompt, clean_up_tokenization_spaces=False),
            "gold": example.completion,
            "text": prediction.text,
            "truncated": prediction.truncated,
            "parsed": prediction.parsed,
            "scores": scores,
        }

    def _write(
        self, name: str, lines: Sequence[Mapping[str, Any]], answers: Sequence[Generation], seconds: float
    ) -> None:
        record = {
            "set": name,
            "variant": self.variant,
            "model": place(self.config, self.run, self.variant),
            "model_sha256": self.sha256,
            "recipe": self.recipe.name,
            "recipe_version": self.recipe.version,
            "n": len(lines),
            "primary_metric": self.recipe.primary_metric,
            "metrics": estimates([line["scores"] for line in lines], self.recipe),
            "truncated": sum(line["truncated"] for line in lines),
            "unparsed": sum(line["parsed"] is None for line in lines),
            "seconds": round(seconds, 3),
            "tokens_per_second": round(sum(answer.tokens for answer in answers) / seconds, 1),
            "decoding": _decoding(self.config) | {"batch_size": self.config.evaluate.batch_size},
        }
        if name == "eval" and self.config.evaluate.gate:
            gate_metric(self.config.evaluate.gate, self.recipe.primary_metric, record["metrics"])
        path, predictions = _paths(self.run, name, self.variant)
        path.unlink(missing_ok=True)  # what is written last says that the two belong together
        text = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)
        write_atomic(predictions, text)
        write_json(path, record)


def _paths(run: RunDir, name: str, variant: str) -> tuple[Path, Path]:
    return run.eval / name / f"{variant}.json", run.eval / name / f"{variant}.predictions.jsonl"


def _decoding(config: Config) -> dict[str, Any]:
    """The settings that scores depend on."""
    return {"strategy": "greedy", "max_new_tokens": config.evaluate.max_new_tokens}


def _scored(
    config: Config, recipe: TaskRecipe, run: RunDir, picked: Mapping[str, Picked], hashes: Callable[[str], str | None]
) -> tuple[dict[str, dict[str, list[Scores]]], list[str]]:
    """Set → variant → rows, of everything on disk that is comparable; and what is not, with the reason."""
    found: dict[str, dict[str, list[Scores]]] = {}
    left_out = []
    for name, rows in picked.items():
        for variant in VARIANTS[config.adapter.kind]:
            path, predictions = _paths(run, name, variant)
            if not path.exists():
                continue
            lines: list[dict[str, Any]] = []
            try:
                record, lines = read_json(path), read_jsonl(predictions)
                fault = _not_comparable(config, recipe, record, lines, rows)
                if fault is None and record["model_sha256"] != hashes(variant):
                    fault = "answered by another model than the run has now"
            except (DataError, KeyError, TypeError) as error:
                fault = f"damaged ({error.message if isinstance(error, DataError) else type(error).__name__})"
            if fault:
                left_out.append(f"{name}/{variant}: {fault}")
            else:
                found.setdefault(name, {})[variant] = [line["scores"] for line in lines]
    return found, left_out


def _not_comparable(
    config: Config, recipe: TaskRecipe, record: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], rows: Picked
) -> str | None:
    judged = [record["recipe"], record["recipe_version"]]
    if judged != [recipe.name, recipe.version]:
        return f"judged by {judged[0]} version {judged[1]}"
    for key, value in _decoding(config).items():
        if record["decoding"][key] != value:
            return f"generated with {key} {record['decoding'][key]}"
    asked = [(line["index"], line["where"], line["gold"]) for line in lines]
    if asked != [(i, w, e.completion) for i, w, e in zip(rows.indices, rows.where, rows.examples, strict=True)]:
        return "asked on other rows"
    return None
