"""Comparison of prepared data with a config: the settings that shards depend on, without loading a tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError, DataError
from surefit.core.units import truncate_text
from surefit.data.tokens.cache import CODE_VERSION
from surefit.data.tokens.shard_manifest import MEND, ShardManifest, find_wrong_size, read_shard_manifest
from surefit.data.tokens.shards import FORMAT, shard_path
from surefit.facts.chat_template import TEMPLATE_DATE
from surefit.task import TaskRecipe

SHARD_SETTING_KEYS = (
    "train", "mix", "format", "columns", "roles", "split", "max_length", "too_long", "bad_rows", "thinking"
)  # fmt: skip
"""Keys of `data` on which the tokens depend."""
ANEW = "put it back, rebuild them with `surefit prepare CONFIG --overwrite`, or name another directory"
PROGRAM = "SureFit's own format"
"""The key of the versions that no setting covers."""


def build_shard_settings(config: SureFitConfig, recipe: TaskRecipe) -> dict[str, Any]:
    """Return the settings on which a config's shards depend beside the rows and the tokenizer: config key → JSON
    value."""
    data = config.data
    share = isinstance(data.eval, float)
    uses_seed = data.share is not None or any(passes % 1 for passes in data.mix.values())
    values = {
        "recipe": f"{recipe.name}, version {recipe.version}",
        **{f"data.{key}": getattr(data, key) for key in SHARD_SETTING_KEYS},
        "data.eval": data.eval if share or data.mix else "a file",
        "train.seed": config.train.seed if uses_seed else "any",
        "model.chat_template": config.model.chat_template,
        "model.chat_template_kwargs": config.model.chat_template_kwargs,
        PROGRAM: [FORMAT, CODE_VERSION, TEMPLATE_DATE],
    }
    settings: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return settings


def fingerprint(settings: Mapping[str, Any], tokenizer: str) -> str:
    """Return the hash of these settings and of a tokenizer's hash (`cache.tokenizer_digest`)."""
    return hashlib.sha256(json.dumps([settings, tokenizer], sort_keys=True).encode()).hexdigest()


def require_shard_settings(was: Mapping[str, Any], config: SureFitConfig, recipe: TaskRecipe, directory: Path) -> None:
    """Raise if shards were made with other settings.

    Raises:
        ConfigError: with the settings that differ, and both values.
    """
    settings = build_shard_settings(config, recipe)
    changed = [
        f"{key} {truncate_text(repr(was.get(key)), 60)} (now {truncate_text(repr(value), 60)})"
        for key, value in settings.items()
        if was.get(key) != value
    ]
    if changed:
        raise ConfigError(
            f"these shards were made with {', '.join(changed)}",
            code="E4082",
            path=directory,
            field="data.tokenized",
            help=ANEW,
        )


def require_tokenizer(was: str, digest: str, directory: Path) -> None:
    """Raise if shards were made with another tokenizer.

    Raises:
        ConfigError: the digests differ."""
    if was != digest:
        raise ConfigError(
            "these shards were made with another tokenizer or chat template, or another version of tokenizers or "
            "transformers",
            code="E4083",
            path=directory,
            field="data.tokenized",
            help=ANEW,
        )


def open_prepared_data(config: SureFitConfig, recipe: TaskRecipe) -> ShardManifest:
    """Open the manifest of `data.tokenized` and check that it is complete and was made with this config's settings.

    Raises:
        DataError: there is none, or shards that it names are missing; with the command that repairs it.
        ConfigError: it was made with other settings; or `data.limit` is set, which it does not support.
    """
    assert config.data.tokenized is not None
    directory = Path(config.data.tokenized)
    refuse_limit(config)
    manifest = read_shard_manifest(directory)
    require_shard_settings(manifest.settings, config, recipe, directory)
    existing = set(os.listdir(directory))
    names = [shard_path(directory, number).name for number in range(len(manifest.shards))]
    missing = [name for name in names if name not in existing]
    if missing:
        listed = ", ".join(missing[:3]) + ("…" if len(missing) > 3 else "")
        problem = f"{len(missing):,} of {len(names):,} shards are missing: {listed}"
        raise DataError(problem, code="E4084", path=directory, field="data.tokenized", help=MEND)
    if size := find_wrong_size(directory, manifest):
        raise DataError(size, code="E4650", path=directory, field="data.tokenized", help=MEND)
    return manifest


def refuse_limit(config: SureFitConfig) -> None:
    """Raise if `data.limit` is set: the rows that it selects depend on the number of all rows.

    Raises:
        ConfigError: `data.limit` is set."""
    if config.data.limit is not None:
        raise ConfigError(
            "data.limit samples rows evenly, which prepared data does not support",
            code="E4085",
            field="data.limit",
            help="leave data.tokenized out for a first try; train.max_steps ends a run early",
        )
