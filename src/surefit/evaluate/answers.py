"""Scored answers, read from a run's variant or from a file of scored predictions. Torch-free."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from surefit.core.errors import DataError, did_you_mean
from surefit.core.rundir import RunDir, read_json, read_jsonl
from surefit.core.units import shell_quote, truncate_text

BASELINE = "baseline:"
"""Prefix of the names of variants that need no model."""
GRAMMAR = "+grammar"
"""Suffix of the names of variants that answered under a grammar."""
PREDICTIONS = ".predictions.jsonl"
READ_COUNTS = CUT, UNREAD = ("answers_cut", "answers_unread")
"""Counts of a variant's record: answers of which only the beginning was read, and answers of which nothing was."""
READ_WITH = "likelihoods_read_with"
"""Key of a variant's record: tokenizer (hash of the vocabulary) and max_length of its likelihoods."""
_CHECKPOINT = re.compile(r"step-(\d+)")
MODELS = ("base", "adapter", "merged", "model", "served")
"""Every model of a run, in the order of training; the served model is the tuned model behind a server."""


@dataclass(frozen=True)
class Answers:
    """Scored answers to a set's rows.

    Attributes:
        name: the name that the user gave, completed by the variant if it was omitted.
        lines: one per row: index, where, gold, text, scores and, if known, prompt, parsed and truncated.
        recipe: name of the recipe that scored them; None if the file does not say.
        version: version of that recipe.
        run: the run directory they belong to, if any.
        read_with: tokenizer and max_length of the likelihoods, and whether an answer was cut; empty without a record of
            it.
    """

    name: str
    lines: list[dict[str, Any]]
    recipe: str | None
    version: int | None
    run: RunDir | None = None
    read_with: Mapping[str, Any] = field(default_factory=dict)

    @property
    def judged_by(self) -> tuple[str | None, int | None]:
        return self.recipe, self.version


def select_tuned_variant(variants: Iterable[str]) -> str | None:
    """Return the tuned model among a set's variants: the last in the order of training, preferably without a grammar;
    None if there are only the base, baselines and checkpoints."""
    tuned = [
        name
        for name in variants
        if name.removesuffix(GRAMMAR) != "base" and not name.startswith(BASELINE) and checkpoint_step(name) is None
    ]
    return next((name for name in reversed(tuned) if not name.endswith(GRAMMAR)), tuned[-1] if tuned else None)


def checkpoint_step(variant: str) -> int | None:
    """Return the step of a variant that is one of the run's checkpoints; None for any other.

    >>> checkpoint_step("step-40"), checkpoint_step("step-40+grammar"), checkpoint_step("merged")
    (40, 40, None)
    """
    match = _CHECKPOINT.fullmatch(variant.removesuffix(GRAMMAR))
    return int(match[1]) if match else None


def base_variant(tuned: str) -> str:
    """Return the base's variant with the same generation settings as the tuned one."""
    return "base" + GRAMMAR * tuned.endswith(GRAMMAR)


def read_answers(text: str, set_name: str = "eval") -> Answers:
    """Read the answers that a command line names: a file of scored predictions, a run directory (its tuned model), or
    RUN:VARIANT.

    Raises:
        DataError: nothing has that name, or the set has not been scored.
    """
    path = Path(text).expanduser()
    return _read_file(path) if path.is_file() else read_run(text, set_name)


def read_run(text: str, set_name: str) -> Answers:
    """Read the answers of RUN (its tuned model) or RUN:VARIANT to a set.

    Raises:
        DataError: the directory does not exist, or has no such scores.
    """
    directory, variant = text, ""
    if not Path(text).expanduser().is_dir():
        directory, _, variant = text.partition(":")
    run = RunDir(Path(directory).expanduser())
    if not run.path.is_dir():
        raise DataError(
            f"there is no run directory or predictions file {text}", code="E7001", help="`surefit runs` lists the runs"
        )
    variants = list_scored_variants(run, set_name)
    if not variants:
        sets = sorted(entry.name for entry in run.eval.glob("*/")) if run.eval.is_dir() else []
        scored_sets = f"; scored: {', '.join(sets)}" if sets else ""
        help_text = f"run `surefit evaluate {shell_quote(directory)}` first"
        raise DataError(
            f"the set {set_name!r} has not been scored in this run{scored_sets}",
            code="E7002",
            path=run.path,
            help=help_text,
        )
    selected = variant or select_tuned_variant(variants)
    if selected not in variants:
        problem = f"{variant!r} has not been scored" if variant else "the tuned model has not been scored"
        hint = did_you_mean(variant, variants) if variant else ""
        raise DataError(
            f"{problem} on {set_name}{hint}",
            code="E7003",
            path=run.path,
            help=f"the scored variants are {', '.join(variants)}",
        )
    assert selected is not None
    answers = read_variant(run, set_name, selected)
    return replace(answers, name=f"{directory}:{selected}")


def list_scored_variants(run: RunDir, set_name: str) -> list[str]:
    """List the variants with scores on a set: baselines, base, checkpoints, adapter, merged or model, served, each
    first without a grammar."""
    return sorted((path.stem for path in (run.eval / set_name).glob("*.json")), key=variant_sort_key)


def variant_sort_key(variant: str) -> tuple[int, int, str]:
    """Return the sort key of a variant: baselines, base, checkpoints, tuned models, each first without a grammar."""
    plain, step = variant.removesuffix(GRAMMAR), checkpoint_step(variant)
    if variant.startswith(BASELINE):
        return -1, 0, variant
    if step is not None:
        return MODELS.index("base"), step, variant
    return MODELS.index(plain) if plain in MODELS else len(MODELS), 0, variant


def read_variant(run: RunDir, set_name: str, variant: str) -> Answers:
    """Read one variant's answers.

    Raises:
        DataError: the file is missing or damaged.
    """
    return _read_file(run.eval / set_name / f"{variant}{PREDICTIONS}", f"{run.path}:{variant}", run)


def _read_file(path: Path, name: str | None = None, run: RunDir | None = None) -> Answers:
    lines = read_jsonl(path)
    if not lines:
        raise DataError(
            "it contains no answers",
            code="E7004",
            path=path,
            help="`surefit evaluate` or `surefit score --output` writes them",
        )
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, dict) or not isinstance(line.get("scores"), dict):
            help_text = "score them first: surefit score --recipe … --predictions … --references … --output FILE"
            raise DataError("this answer has no scores", code="E7005", path=path, line=number, help=help_text)
    record_path = path.with_name(path.name.removesuffix(PREDICTIONS) + ".json")
    record: Mapping[str, Any] = (
        read_json(record_path) if path.name.endswith(PREDICTIONS) and record_path.exists() else lines[0]
    )
    read_with = record.get(READ_WITH) or {}
    if read_with:
        read_with = {**read_with, CUT: record.get(CUT, 0)}
    return Answers(name or str(path), lines, record.get("recipe"), record.get("recipe_version"), run, read_with)


def align_answers(a: Answers, b: Answers) -> list[dict[str, Any]]:
    """Return a's lines in the order of b's.

    A row is identified by the place where it was read; if the two have different files, by its number in the set. In
    both cases the gold answer must be the same.

    Raises:
        DataError: the rows differ; says why.
    """
    for key in ("where", "index"):
        a_keys, b_keys = ([line.get(key) for line in answers.lines] for answers in (a, b))
        if None not in a_keys and len(set(a_keys)) == len(a_keys) and Counter(a_keys) == Counter(b_keys):
            line_by_key = dict(zip(a_keys, a.lines, strict=True))
            matched = [line_by_key[row_key] for row_key in b_keys]
            _require_same_gold(a, b, matched)
            return matched
    raise _other_rows(a, b)


def _require_same_gold(a: Answers, b: Answers, matched: Sequence[Mapping[str, Any]]) -> None:
    for line, b_line in zip(matched, b.lines, strict=True):
        if line.get("gold") != b_line.get("gold"):
            first, second = (truncate_text(repr(row.get("gold"))) for row in (line, b_line))
            golds = f"{first} in {a.name}, {second} in {b.name}"
            row = b_line.get("where", f"row {b_line.get('index')}")
            raise DataError(
                f"the gold answer of {row} differs: {golds}", code="E7006", help="compare answers on the same data"
            )


def _other_rows(a: Answers, b: Answers) -> DataError:
    a_keys, b_keys = ({line.get("where", line.get("index")) for line in answers.lines} for answers in (a, b))
    common = len(a_keys & b_keys)
    return DataError(
        f"they answered different rows: {a.name} {len(a.lines):,}, {b.name} {len(b.lines):,}, {common:,} in common",
        code="E7007",
        help="evaluate both with the same data.eval, seed and evaluate.max_examples",
    )
