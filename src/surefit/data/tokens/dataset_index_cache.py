"""The result of an earlier start of a run, so that the next start finds the tokens without converting the rows.

The tokens in the cache are named by the examples (data/tokens/cache.py), and making 60,000 examples takes longer than
reading their tokens. CACHE/starts/KEY.json is named by all that the examples are made from, including SureFit's code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surefit.core import env
from surefit.core.errors import SureFitError
from surefit.core.packaging import code_sha256
from surefit.core.reading import read_json_file
from surefit.core.rundir import write_json
from surefit.data.read.load import Rows, load_rows
from surefit.data.rows.layouts import Examples, LoadRows, load_held_out, row_conversion, to_examples
from surefit.data.rows.reasoning import apply_reasoning_mode
from surefit.data.tokens.cache import TokenDataset, open_cached, tokenizer_digest
from surefit.task import TaskRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefit.config.schema import DataSection


@dataclass(frozen=True)
class CachedTrainingData:
    """The data at the start of training.

    Attributes:
        rows: the tokens to train on.
        held_out: the held-out examples, for evaluation.
        skipped: rows that could not be used, with the reason.
        conversations: no row is plain text.
    """

    rows: TokenDataset
    held_out: Examples
    skipped: Sequence[str]
    conversations: bool


def start_key(
    rows: Rows, section: DataSection, recipe: TaskRecipe, seed: int, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return the hash of all that the examples and their tokens are made from; the recipe must be a built-in one, whose
    code is hashed."""
    parts = [
        rows.sha256, len(rows), list(map(str, rows.files)), section.model_dump_json(), recipe.name, recipe.version,
        recipe.pairs, recipe.labelled, seed, tokenizer_digest(tokenizer), code_sha256(),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:40]


def store_training_data(
    key: str, rows: Rows, section: DataSection, start: CachedTrainingData, cache: Path | None = None
) -> None:
    """Store the result of a start; if it cannot be written, the next start makes it again."""
    places = {rows.where(index): index for index in range(len(rows))}
    held_out = [] if isinstance(section.eval, str) else [places[where] for where in start.held_out.where]
    values = {
        "tokens": start.rows.path.name,
        "held_out": held_out,
        "skipped": list(start.skipped),
        "conversations": start.conversations,
    }
    path = _path(key, cache)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, values)
    except (OSError, SureFitError):
        return


def load_training_data(
    key: str,
    rows: Rows,
    section: DataSection,
    recipe: TaskRecipe,
    cache: Path | None = None,
    load: LoadRows = load_rows,
) -> CachedTrainingData | None:
    """Load an earlier start, converting its held-out rows anew; None if there is none, or its tokens are gone.

    Args:
        load: reads the rows of `data.eval`.

    Raises:
        DataError: the rows of `data.eval` cannot be used.
    """
    try:
        values = read_json_file(_path(key, cache))
        tokens = open_cached(values["tokens"], cache)
        numbers, skipped, conversations = values["held_out"], values["skipped"], values["conversations"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if tokens is None:
        return None
    if isinstance(section.eval, str):
        eval_rows = load_held_out(section.eval, section.split, rows, load)
        held_out = to_examples(eval_rows, recipe, section.format, section.bad_rows)
    else:
        conversion = row_conversion(rows, recipe, section.format)
        examples = [conversion.example(rows.at(n), keep=False) for n in numbers]
        held_out = Examples(examples, [rows.where(n) for n in numbers], [])
    held_out = apply_reasoning_mode(held_out, section.thinking)
    return CachedTrainingData(tokens.counting_skipped(len(skipped)), held_out, skipped, conversations)


def _path(key: str, cache: Path | None) -> Path:
    return (cache if cache is not None else env.cache_dir()) / "starts" / f"{key}.json"
