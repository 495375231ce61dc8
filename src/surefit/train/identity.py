"""Settings and data that a resumed run must share with the run that it continues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from surefit.config.resolve import iter_config_values
from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError
from surefit.train.sampler import DatasetFingerprint

PARTS = "processes that share the rows"
FREE_ON_RESUME = (
    "per_device_train_batch_size", "gradient_checkpointing", "early_stopping_patience", "eval_steps",
    "num_train_epochs", "max_steps",
)  # fmt: skip
"""Settings of `train` that may change on resume, because they do not change what a step learns; the last two only
through `total_steps`, which is compared."""


HELD_OUT = "data.eval: content"
SCORING = (
    "max_examples", "max_new_tokens", "constrained", "num_beams", "samples", "temperature", "chat_template_kwargs",
)  # fmt: skip
"""Settings of `evaluate` that the scores measured during training depend on."""


def build_run_identity(
    config: SureFitConfig, survey: DatasetFingerprint, held_out: DatasetFingerprint, total_steps: int
) -> dict[str, Any]:
    """Return every setting and data hash that decides what is learned and which checkpoint is best, keyed by config
    key, JSON-serializable. Held-out rows are included: measurements on others cannot be compared with those before the
    resume.

    Args:
        survey: fingerprint of the training rows.
        held_out: fingerprint of the held-out rows.
        total_steps: optimizer steps of the run.
    """
    values = {f"lora.{key}": value for key, value in iter_config_values(config.lora)}
    values |= {f"objective.{key}": getattr(config.objective, key) for key in sorted(config.objective.read_keys)}
    values |= {f"train.{key}": value for key, value in iter_config_values(config.train) if key not in FREE_ON_RESUME}
    return (
        values
        | {
            "model.name_or_path": config.model.name_or_path,
            "model.revision": config.model.revision,
            "model.dtype": config.model.dtype,
            "model.quantization": config.model.quantization,
            "model.chat_template_kwargs": config.model.chat_template_kwargs,
            "model.add_tokens": config.model.add_tokens,
            "data.train: rows": len(survey.lengths),
            "data.train: content": survey.sha256,
            "data.eval: rows": len(held_out.lengths),
            HELD_OUT: held_out.sha256,
            "total_steps": total_steps,
        }
        | _scoring(config)
    )


def _scoring(config: SureFitConfig) -> dict[str, Any]:
    """Return the settings that the scores measured during training depend on; empty if none are measured."""
    if not config.evaluate.in_training:
        return {}
    settings = config.evaluate.model_dump(mode="json")
    return {f"evaluate.{key}": settings[key] for key in SCORING}


def execution_settings(config: SureFitConfig, mode: str = "single", data_size: int = 1) -> dict[str, Any]:
    """Return the settings that a resumed run may change, with how the processes share a step: they affect the order of
    additions, so the last bits, and which element gets which random number."""
    values = {f"speed.{key}": value for key, value in iter_config_values(config.speed)}
    return values | {
        "data.packing": config.data.packing,
        "train.per_device_train_batch_size": config.train.per_device_train_batch_size,
        "train.gradient_checkpointing": config.train.gradient_checkpointing,
        "parallel.mode": mode,
        "parallel.cp": config.parallel.cp,
        PARTS: data_size,
    }


def changed_settings(
    trainer: Mapping[str, Any], config: SureFitConfig, mode: str = "single", data_size: int = 1
) -> list[str]:
    """Return how the execution settings differ from a checkpoint's, as `data.packing: False, now True`.

    Args:
        trainer: the checkpoint's trainer.json.
        config: config of the run that resumes it.
        mode, data_size: the resuming run's `Engine.name` and `Engine.data_size` (parallel/engine.py).
    """
    saved, current = trainer.get("carried_out", {}), execution_settings(config, mode, data_size)
    changes = [f"{key}: {saved[key]}, now {value}" for key, value in current.items() if saved.get(key, value) != value]
    uses_random_numbers = config.lora.lora_dropout > 0 or config.train.neftune_noise_alpha is not None
    random_numbers_differ = uses_random_numbers and any(
        saved.get(key, current[key]) != current[key] for key in DRAWS_ALONG
    )
    return (
        [*changes, "another micro batch changes the random numbers of dropout and noise"]
        if random_numbers_differ
        else changes
    )


DRAWS_ALONG = (
    "data.packing", "train.per_device_train_batch_size", "speed.fused_lora", "speed.compile", "parallel.cp", PARTS,
)  # fmt: skip
"""Execution settings that decide which element of a step gets which random number."""


ADDED = {
    "lora.use_rslora": False,
    "lora.use_dora": False,
    "lora.experts": False,
    "model.chat_template_kwargs": {},
    "model.add_tokens": [],
    "objective.name": "sft",
}
"""Behavior of runs with checkpoints older than a setting: key → value."""


LATER = ("data.eval: ", "evaluate.")
"""Prefixes of keys that may be missing from older checkpoints, or from checkpoints of a run that measured no scores."""


def require_same_held_out(lines: Iterable[Mapping[str, Any]], held_out: DatasetFingerprint, path: Path) -> None:
    """Raise if the number of supervised held-out tokens changed; used where the checkpoint is too old to hold their
    hash.

    Args:
        lines: lines of metrics.jsonl.
        held_out: fingerprint of this config's held-out rows.
        path: the run directory, for the message.

    Raises:
        ConfigError: earlier measurements used another number of tokens.
    """
    for line in lines:
        if (was := line.get("eval_tokens", held_out.supervised)) != held_out.supervised:
            raise ConfigError(
                f"the held-out rows had {was:,} supervised tokens when the checkpoint was written and have "
                f"{held_out.supervised:,} now",
                code="E5350",
                path=path,
                field="data.eval",
                help="restore them to resume, or start over in another output_dir",
            )


def require_same(before: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Raise if a checkpoint belongs to a run with other settings or data.

    Args:
        before: `identity` in the checkpoint.
        now: `build_run_identity` of this config and these rows.
        path: the run directory, for the message.

    Raises:
        ConfigError: naming the first difference with both values.
    """
    for key, value in now.items():
        if key not in before and key.startswith(LATER):
            continue
        was = before.get(key, ADDED.get(key))
        if was != value:
            raise ConfigError(
                f"{key} was {was!r} when the checkpoint was written and is {value!r} now",
                code="E5104",
                path=path,
                field=key.partition(":")[0],
                help="restore it to resume, or start over in another output_dir",
            )
