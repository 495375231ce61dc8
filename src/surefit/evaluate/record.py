"""The scores of a run on disk: the files of a variant, and which of them are still comparable later."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from surefit.config.schema import SureFitConfig
from surefit.core.errors import DataError
from surefit.core.rundir import RunDir, read_json, read_jsonl, write_atomic, write_json
from surefit.evaluate.answer_cache import AnswerCache
from surefit.evaluate.answers import BASELINE, CUT, GRAMMAR, PREDICTIONS, READ_COUNTS, READ_WITH, checkpoint_step
from surefit.evaluate.estimates import compute_estimates, documents
from surefit.evaluate.gate import gate_metric
from surefit.evaluate.generation_settings import GenerationSettings, list_generation_settings
from surefit.evaluate.rows import EvalRows
from surefit.evaluate.variants import SERVED, known_variants, variant_location, variant_sha256
from surefit.facts.pair_scores import is_read
from surefit.task import Scores, TaskRecipe

SETTINGS = (
    "strategy", "max_new_tokens", "num_beams", "temperature", "seed", "samples", "stop", "constrained",
    "chat_template_kwargs",
)  # fmt: skip
"""Keys of `decoding` that answers depend on."""
EARLIER = "earlier"
"""Directory in eval/ for scores of another recipe, other rows or other settings. None of them is overwritten."""
ABOUT_ANSWERS = ("truncated", "unparsed", *READ_COUNTS)
"""Counts that summary.json has of a variant's answers beside its scores; equal answers have equal counts."""


@dataclass(frozen=True)
class VariantResult:
    """Result of one variant on one set.

    Attributes:
        variant: name in files and summaries.
        lines: lines of the predictions file, in the order of the rows.
        settings: settings that the answers depend on, besides the model.
        costs: settings that only their speed depends on.
        truncated, unparsed: number of such answers; a row with several samples has several answers.
        seconds, tokens: time and tokens of all answers; None without a model.
        read_counts: how many of the rows' own answers were read in part, or not at all (`evaluate.likelihood`).
        read_with: tokenizer and length limit with which they were read.
    """

    variant: str
    lines: list[dict[str, Any]]
    settings: dict[str, Any]
    costs: dict[str, Any]
    truncated: int
    unparsed: int
    seconds: float | None = None
    tokens: int | None = None
    read_counts: dict[str, int] = field(default_factory=dict)
    read_with: dict[str, Any] = field(default_factory=dict)


def baseline_settings(samples: int) -> dict[str, Any]:
    return {"strategy": "baseline"} | ({"samples": samples} if samples > 1 else {})


class ResultStore:
    """The scores of a run on disk.

    Args:
        steps: checkpoint variants that the summary also includes.

    Attributes:
        set_aside: scores that were moved to eval/earlier/, with their new paths.
    """

    def __init__(self, config: SureFitConfig, recipe: TaskRecipe, run: RunDir, steps: Sequence[str] = ()) -> None:
        self.config, self.recipe, self.run, self.steps = config, recipe, run, steps
        self.set_aside: list[str] = []
        self.identity = functools.cache(functools.partial(variant_sha256, config, run))

    def kept(self, name: str, variant: str, way: GenerationSettings, model: str | None, rank: int = 0) -> AnswerCache:
        """Return the cache for a variant's answers until they are scored.

        Args:
            model: the variant's `identity`, which one of several processes computes for all.
            rank: rank of this process.
        """
        identity = {"model": model or variant_location(self.config, self.run, variant), **way.settings}
        return AnswerCache(self.run.eval / name / f"{way.of(variant)}.partial.jsonl", identity, rank)

    def write(self, name: str, scored: VariantResult, primary_metric: str | None = None) -> None:
        """Write a variant's predictions and its record.

        Args:
            primary_metric: the metric that decides on this set; by default the recipe's.
        """
        primary_metric = primary_metric or self.recipe.primary_metric
        variant = scored.variant
        is_baseline = variant.startswith(BASELINE)
        model_variant = variant.removesuffix(GRAMMAR)
        metrics = compute_estimates([line["scores"] for line in scored.lines], self.recipe)
        record = {
            "set": name,
            "variant": variant,
            "model": None if is_baseline else variant_location(self.config, self.run, model_variant),
            "model_sha256": None if is_baseline else self.identity(model_variant),
            "recipe": self.recipe.name,
            "recipe_version": self.recipe.version,
            "n": len(scored.lines),
            "primary_metric": primary_metric,
            "metrics": documents(metrics),
            "truncated": scored.truncated,
            "unparsed": scored.unparsed,
            **scored.read_counts,
            **({READ_WITH: scored.read_with} if scored.read_with else {}),
            "seconds": None if scored.seconds is None else round(scored.seconds, 3),
            "tokens_per_second": round(scored.tokens / scored.seconds, 1) if scored.tokens and scored.seconds else None,
            "decoding": scored.settings | scored.costs,
        }
        if name == "eval" and self.config.evaluate.gate:
            gate_metric(
                self.config.evaluate.gate,
                primary_metric,
                [*metrics, *filter(is_read, self.recipe.metrics)],
            )
        path, predictions_file = _paths(self.run, name, variant)
        text = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in scored.lines)
        previous = _record(path)
        if previous is not None and _key(previous, predictions_file) != _key(record, text):
            self._set_aside(path, previous)
        path.unlink(missing_ok=True)  # it is written last, so its existence shows that the two files belong together
        write_atomic(predictions_file, text)
        write_json(path, record)

    def set_aside_other_recipes(self) -> None:
        """Move the scores of other recipes to eval/earlier/, for all variants."""
        for path in sorted(self.run.eval.glob("*/*.json")):
            record = _record(path)
            if record is not None and record["recipe"] != self.recipe.name:
                self._set_aside(path, record)

    def _set_aside(self, path: Path, record: Mapping[str, Any]) -> None:
        """Move a variant's scores to eval/earlier/, and delete the summary that contains them."""
        target = self.run.eval / EARLIER / _key(record, path.with_name(path.stem + PREDICTIONS))
        (target / path.parent.name).mkdir(parents=True, exist_ok=True)
        for file in (path.with_name(path.stem + PREDICTIONS), path):
            if file.exists():
                file.replace(target / path.parent.name / file.name)
        self.run.eval_summary.unlink(missing_ok=True)
        description = f"scored by {record['recipe']} version {record['recipe_version']}"
        self.set_aside.append(f"{path.parent.name}/{path.stem}, {description}: {target.relative_to(self.run.path)}")

    def has(self, name: str, variant: str, rows: EvalRows) -> bool:
        """Return whether a variant's scores exist and are comparable."""
        return isinstance(self.read(name, variant, self._expected()[variant], rows), tuple)

    def read_current(self, name: str, variant: str, rows: EvalRows) -> list[dict[str, Any]] | None:
        """Return the lines of a variant's comparable scores; None if there are none."""
        stored = self.read(name, variant, self._expected()[variant], rows)
        return stored[1] if isinstance(stored, tuple) else None

    def comparable(
        self, picked: Mapping[str, EvalRows]
    ) -> tuple[dict[str, dict[str, list[Scores]]], dict[str, dict[str, Any]], list[str]]:
        """Return the comparable scores on disk, set → variant → rows, and the counts of their answers; and the scores
        that are not comparable, with the reasons."""
        scores: dict[str, dict[str, list[Scores]]] = {}
        counts: dict[str, dict[str, Any]] = {}
        left_out = []
        for name, rows in picked.items():
            for variant, settings in self._expected().items():
                stored = self.read(name, variant, settings, rows)
                if stored is None:
                    continue
                if isinstance(stored, str):
                    left_out.append(f"{name}/{variant}: {stored}")
                else:
                    record, lines = stored
                    scores.setdefault(name, {})[variant] = [line["scores"] for line in lines]
                    counts.setdefault(name, {})[variant] = {key: record[key] for key in ABOUT_ANSWERS if key in record}
        return scores, counts, left_out

    def read(
        self, name: str, variant: str, settings: Mapping[str, Any], rows: EvalRows
    ) -> tuple[dict[str, Any], list[dict[str, Any]]] | str | None:
        """Read a variant's record and lines, or return why they are not comparable; None if it has not been scored."""
        path, predictions = _paths(self.run, name, variant)
        if not path.exists():
            return None
        try:
            record, lines = read_json(path), read_jsonl(predictions)
            return self._fault(variant, settings, record, lines, rows) or (record, lines)
        except (DataError, KeyError, TypeError) as error:
            return f"damaged ({error.message if isinstance(error, DataError) else type(error).__name__})"

    def _expected(self) -> dict[str, dict[str, Any]]:
        """Return every variant that can be on disk, in the order of training, with its current settings."""
        free = replace(list_generation_settings(self.config, self.recipe)[0], constrained=False)
        free_and_constrained = (free, replace(free, constrained=True))
        settings = baseline_settings(self.config.evaluate.samples)
        expected = {BASELINE + name: settings for name in self.recipe.baselines}
        base, *tuned = known_variants(self.config)
        return expected | {
            generation.of(name): generation.settings
            for name in (base, *self.steps, *tuned)
            for generation in free_and_constrained
        }

    def _fault(
        self,
        variant: str,
        settings: Mapping[str, Any],
        record: Mapping[str, Any],
        lines: Sequence[Mapping[str, Any]],
        rows: EvalRows,
    ) -> str | None:
        recorded_recipe = [record["recipe"], record["recipe_version"]]
        if recorded_recipe != [self.recipe.name, self.recipe.version]:
            return f"scored by {recorded_recipe[0]} version {recorded_recipe[1]}"
        if difference := _differing(settings, record["decoding"]):
            return f"generated with {difference}"
        limit = record.get(READ_WITH, {}).get("max_length", self.config.data.max_length)
        current = self.config.data.max_length
        if limit != current and (record.get(CUT, 0) or current < limit):  # else every answer was read whole, by both
            return f"its likelihoods were read with data.max_length {limit}, not {current}"
        recorded_rows = [(line["index"], line["where"], line["gold"], line.get("rejected")) for line in lines]
        if recorded_rows != [
            (i, w, e.completion, e.rejected_text)
            for i, w, e in zip(rows.indices, rows.where, rows.examples, strict=True)
        ]:
            return "answered other rows"
        model_variant = variant.removesuffix(GRAMMAR)
        if not variant.startswith(BASELINE) and not self._same_model(model_variant, record):
            return "answered by a different model than the run's current one"
        return None

    def _same_model(self, variant: str, record: Mapping[str, Any]) -> bool:
        if variant == SERVED:
            return bool(record["model"] == variant_location(self.config, self.run, variant))
        current = self.identity(variant)
        deleted = checkpoint_step(variant) is not None and current is None  # a deleted checkpoint's scores stay valid
        return deleted or bool(record["model_sha256"] == current)


def _record(path: Path) -> dict[str, Any] | None:
    """Read a variant's record; None if there is none, or it is damaged."""
    try:
        record: dict[str, Any] = read_json(path)
        return record if {"recipe", "recipe_version", "decoding"} <= record.keys() else None
    except (DataError, AttributeError):
        return None


def _key(record: Mapping[str, Any], predictions: Path | str) -> str:
    """Return the directory name for scores: the recipe, and a hash of rows and settings."""
    try:
        text = predictions.read_text(encoding="utf-8") if isinstance(predictions, Path) else predictions
        rows = [(line["index"], line["where"]) for line in map(json.loads, text.splitlines())]
    except (OSError, ValueError, KeyError, TypeError):
        rows = []
    settings = {key: record["decoding"].get(key) for key in SETTINGS}
    digest = hashlib.sha256(json.dumps([settings, rows], default=str).encode()).hexdigest()
    return f"{record['recipe']}-v{record['recipe_version']}-{digest[:8]}"


def _differing(settings: Mapping[str, Any], recorded: Mapping[str, Any]) -> str | None:
    """Return the first setting that answers depend on and that differs."""
    for key in SETTINGS:
        if settings.get(key) != recorded.get(key):
            return f"{key} {recorded[key]}" if key in recorded else f"no {key}"
    return None


def _paths(run: RunDir, name: str, variant: str) -> tuple[Path, Path]:
    return run.eval / name / f"{variant}.json", run.eval / name / f"{variant}{PREDICTIONS}"
