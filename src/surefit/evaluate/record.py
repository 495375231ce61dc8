"""The scores of a run on disk: what is written of a variant, and what of it can still be compared later."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefit.config.schema import Config
from surefit.core.errors import DataError
from surefit.core.rundir import RunDir, read_json, read_jsonl, write_atomic, write_json
from surefit.evaluate.answer_cache import AnswerCache
from surefit.evaluate.answers import BASELINE, GRAMMAR, PREDICTIONS, checkpoint_step
from surefit.evaluate.estimates import compute_estimates
from surefit.evaluate.gate import gate_metric
from surefit.evaluate.generation_settings import GenerationSettings, list_generation_settings
from surefit.evaluate.rows import EvalRows
from surefit.evaluate.variants import SERVED, known_variants, variant_location, variant_sha256
from surefit.task import Scores, TaskRecipe

SETTINGS = (
    "strategy", "max_new_tokens", "num_beams", "temperature", "seed", "samples", "stop", "constrained",
    "chat_template_kwargs",
)  # fmt: skip
"""What of `decoding` answers depend on."""
EARLIER = "earlier"
"""The folder in eval/ for scores of another recipe, on other rows or with other settings. None is overwritten."""
ABOUT_ANSWERS = ("truncated", "unparsed")
"""What summary.json says of a variant's answers beside its scores: the same whenever they are the same."""


@dataclass(frozen=True)
class VariantResult:
    """One variant on one set.

    Attributes:
        variant: as files and summaries call it.
        lines: of the predictions file, in the order of the rows.
        settings: what the answers depend on beside the model.
        costs: what only their speed depends on.
        answers: as many as there are rows, or draws.
        truncated, unparsed: of these.
        seconds, tokens: that answering took; None for what no model answered.
    """

    variant: str
    lines: list[dict[str, Any]]
    settings: dict[str, Any]
    costs: dict[str, Any]
    truncated: int
    unparsed: int
    seconds: float | None = None
    tokens: int | None = None


def baseline_settings(samples: int) -> dict[str, Any]:
    return {"strategy": "baseline"} | ({"samples": samples} if samples > 1 else {})


class ResultStore:
    """The scores of a run on disk.

    Args:
        steps: checkpoints that the summary is to hold, too.

    Attributes:
        set_aside: scores that were moved to eval/earlier/ to keep them, and where they are now.
    """

    def __init__(self, config: Config, recipe: TaskRecipe, run: RunDir, steps: Sequence[str] = ()) -> None:
        self.config, self.recipe, self.run, self.steps = config, recipe, run, steps
        self.set_aside: list[str] = []
        self.identity = functools.cache(functools.partial(variant_sha256, config, run))

    def kept(self, name: str, variant: str, way: GenerationSettings, model: str | None, rank: int = 0) -> AnswerCache:
        """Where a variant's answers are kept until they are scored.

        Args:
            model: the variant's `identity`, which one of several processes finds out for all.
            rank: of this process.
        """
        asked = {"model": model or variant_location(self.config, self.run, variant), **way.settings}
        return AnswerCache(self.run.eval / name / f"{way.of(variant)}.partial.jsonl", asked, rank)

    def write(self, name: str, scored: VariantResult) -> None:
        """Write a variant's predictions and its record."""
        variant = scored.variant
        own = variant.startswith(BASELINE)
        plain = variant.removesuffix(GRAMMAR)
        metrics = compute_estimates([line["scores"] for line in scored.lines], self.recipe)
        record = {
            "set": name,
            "variant": variant,
            "model": None if own else variant_location(self.config, self.run, plain),
            "model_sha256": None if own else self.identity(plain),
            "recipe": self.recipe.name,
            "recipe_version": self.recipe.version,
            "n": len(scored.lines),
            "primary_metric": self.recipe.primary_metric,
            "metrics": metrics,
            "truncated": scored.truncated,
            "unparsed": scored.unparsed,
            "seconds": None if scored.seconds is None else round(scored.seconds, 3),
            "tokens_per_second": round(scored.tokens / scored.seconds, 1) if scored.tokens and scored.seconds else None,
            "decoding": scored.settings | scored.costs,
        }
        if name == "eval" and self.config.evaluate.gate:
            gate_metric(self.config.evaluate.gate, self.recipe.primary_metric, metrics)
        path, predictions_file = _paths(self.run, name, variant)
        text = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in scored.lines)
        before = _record(path)
        if before is not None and _key(before, predictions_file) != _key(record, text):
            self._set_aside(path, before)
        path.unlink(missing_ok=True)  # what is written last says that the two belong together
        write_atomic(predictions_file, text)
        write_json(path, record)

    def set_aside_other_recipes(self) -> None:
        """Move what another recipe has judged out of the way of this one, whichever variants are scored now."""
        for path in sorted(self.run.eval.glob("*/*.json")):
            record = _record(path)
            if record is not None and record["recipe"] != self.recipe.name:
                self._set_aside(path, record)

    def _set_aside(self, path: Path, record: Mapping[str, Any]) -> None:
        """Move a variant's scores to eval/earlier/; the summary that had them is made again."""
        home = self.run.eval / EARLIER / _key(record, path.with_name(path.stem + PREDICTIONS))
        (home / path.parent.name).mkdir(parents=True, exist_ok=True)
        for file in (path.with_name(path.stem + PREDICTIONS), path):
            if file.exists():
                file.replace(home / path.parent.name / file.name)
        self.run.eval_summary.unlink(missing_ok=True)
        judged = f"judged by {record['recipe']} version {record['recipe_version']}"
        self.set_aside.append(f"{path.parent.name}/{path.stem}, {judged}: {home.relative_to(self.run.path)}")

    def has(self, name: str, variant: str, rows: EvalRows) -> bool:
        """Whether a variant's scores are there and comparable."""
        return isinstance(self.read(name, variant, self._expected()[variant], rows), tuple)

    def comparable(
        self, picked: Mapping[str, EvalRows]
    ) -> tuple[dict[str, dict[str, list[Scores]]], dict[str, dict[str, Any]], list[str]]:
        """Of everything on disk that is comparable, set → variant → rows and → what is known of the answers; and what
        is not comparable, with the reason."""
        found: dict[str, dict[str, list[Scores]]] = {}
        about: dict[str, dict[str, Any]] = {}
        left_out = []
        for name, rows in picked.items():
            for variant, settings in self._expected().items():
                read = self.read(name, variant, settings, rows)
                if read is None:
                    continue
                if isinstance(read, str):
                    left_out.append(f"{name}/{variant}: {read}")
                else:
                    record, lines = read
                    found.setdefault(name, {})[variant] = [line["scores"] for line in lines]
                    about.setdefault(name, {})[variant] = {key: record.get(key) for key in ABOUT_ANSWERS}
        return found, about, left_out

    def read(
        self, name: str, variant: str, settings: Mapping[str, Any], rows: EvalRows
    ) -> tuple[dict[str, Any], list[dict[str, Any]]] | str | None:
        """A variant's record and lines, or why they are not comparable; None where it has not been scored."""
        path, predictions = _paths(self.run, name, variant)
        if not path.exists():
            return None
        try:
            record, lines = read_json(path), read_jsonl(predictions)
            return self._fault(variant, settings, record, lines, rows) or (record, lines)
        except (DataError, KeyError, TypeError) as error:
            return f"damaged ({error.message if isinstance(error, DataError) else type(error).__name__})"

    def _expected(self) -> dict[str, dict[str, Any]]:
        """Every variant that can be on disk, in the order of training, and the settings that it would have now."""
        free = replace(list_generation_settings(self.config, self.recipe)[0], constrained=False)
        both = (free, replace(free, constrained=True))
        settings = baseline_settings(self.config.evaluate.samples)
        found = {BASELINE + name: settings for name in self.recipe.baselines}
        base, *tuned = known_variants(self.config)
        return found | {way.of(name): way.settings for name in (base, *self.steps, *tuned) for way in both}

    def _fault(
        self,
        variant: str,
        settings: Mapping[str, Any],
        record: Mapping[str, Any],
        lines: Sequence[Mapping[str, Any]],
        rows: EvalRows,
    ) -> str | None:
        judged = [record["recipe"], record["recipe_version"]]
        if judged != [self.recipe.name, self.recipe.version]:
            return f"judged by {judged[0]} version {judged[1]}"
        if other := _differing(settings, record["decoding"]):
            return f"generated with {other}"
        asked = [(line["index"], line["where"], line["gold"]) for line in lines]
        if asked != [(i, w, e.completion) for i, w, e in zip(rows.indices, rows.where, rows.examples, strict=True)]:
            return "asked on other rows"
        plain = variant.removesuffix(GRAMMAR)
        if not variant.startswith(BASELINE) and not self._same_model(plain, record):
            return "answered by another model than the run has now"
        return None

    def _same_model(self, variant: str, record: Mapping[str, Any]) -> bool:
        if variant == SERVED:
            return bool(record["model"] == variant_location(self.config, self.run, variant))
        now = self.identity(variant)
        gone = checkpoint_step(variant) is not None and now is None  # a deleted checkpoint's scores stay what they were
        return gone or bool(record["model_sha256"] == now)


def _record(path: Path) -> dict[str, Any] | None:
    """A variant's record; None where there is none, or a damaged one."""
    try:
        record: dict[str, Any] = read_json(path)
        return record if {"recipe", "recipe_version", "decoding"} <= record.keys() else None
    except (DataError, AttributeError):
        return None


def _key(record: Mapping[str, Any], predictions: Path | str) -> str:
    """What scores belong to, as the name of a folder: the recipe, and a hash of rows and settings."""
    try:
        text = predictions.read_text(encoding="utf-8") if isinstance(predictions, Path) else predictions
        rows = [(line["index"], line["where"]) for line in map(json.loads, text.splitlines())]
    except (OSError, ValueError, KeyError, TypeError):
        rows = []
    settings = {key: record["decoding"].get(key) for key in SETTINGS}
    digest = hashlib.sha256(json.dumps([settings, rows], default=str).encode()).hexdigest()
    return f"{record['recipe']}-v{record['recipe_version']}-{digest[:8]}"


def _differing(settings: Mapping[str, Any], recorded: Mapping[str, Any]) -> str | None:
    """The first setting that answers depend on and that was another."""
    for key in SETTINGS:
        if settings.get(key) != recorded.get(key):
            return f"{key} {recorded[key]}" if key in recorded else f"no {key}"
    return None


def _paths(run: RunDir, name: str, variant: str) -> tuple[Path, Path]:
    return run.eval / name / f"{variant}.json", run.eval / name / f"{variant}{PREDICTIONS}"
