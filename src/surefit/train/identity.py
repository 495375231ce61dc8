"""What a resumed run must have in common with the run that it continues."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefit.config.resolve import leaves
from surefit.config.schema import Config
from surefit.core.errors import ConfigError
from surefit.train.sampler import Survey

PARTS = "processes that share the rows"
FREE_ON_RESUME = (
    "per_device_train_batch_size", "gradient_checkpointing", "early_stopping_patience", "eval_every", "epochs",
    "max_steps",
)  # fmt: skip
"""Settings of `train` that do not change what a step learns; the last two do so by `total_steps`, which is compared."""


def identity(config: Config, survey: Survey, total_steps: int) -> dict[str, Any]:
    """Everything that decides what is learnt, by its config key, as JSON can hold it."""
    values = {f"adapter.{key}": value for key, value in leaves(config.adapter)}
    values |= {f"train.{key}": value for key, value in leaves(config.train) if key not in FREE_ON_RESUME}
    return values | {
        "model.name_or_path": config.model.name_or_path,
        "model.revision": config.model.revision,
        "model.dtype": config.model.dtype,
        "model.quantization": config.model.quantization,
        "model.chat_template_kwargs": config.model.chat_template_kwargs,
        "model.add_tokens": config.model.add_tokens,
        "data.train: rows": len(survey.lengths),
        "data.train: content": survey.sha256,
        "total_steps": total_steps,
    }


def carried_out(config: Config, mode: str = "single", data_size: int = 1) -> dict[str, Any]:
    """How the processes share a step, and settings, that a resumed run may change: they change the order of additions,
    so the last bits, and which random numbers fall to which element."""
    values = {f"speed.{key}": value for key, value in leaves(config.speed)}
    return values | {
        "data.packing": config.data.packing,
        "train.per_device_train_batch_size": config.train.per_device_train_batch_size,
        "train.gradient_checkpointing": config.train.gradient_checkpointing,
        "parallel.mode": mode,
        "parallel.cp": config.parallel.cp,
        PARTS: data_size,
    }


def what_changed(trainer: Mapping[str, Any], config: Config, mode: str = "single", data_size: int = 1) -> list[str]:
    """How the settings of `carried_out` differ from those of a checkpoint, as `data.packing: False, now True`.

    Args:
        trainer: the checkpoint's trainer.json.
        config: of the run that resumes it.
        mode, data_size: of its engine (parallel/engine.py).
    """
    before, now = trainer.get("carried_out", {}), carried_out(config, mode, data_size)
    changes = [f"{key}: {before[key]}, now {value}" for key, value in now.items() if before.get(key, value) != value]
    draws = config.adapter.dropout > 0 or config.train.neftune_noise_alpha is not None
    other = draws and any(before.get(key, now[key]) != now[key] for key in DRAWS_ALONG)
    return [*changes, "dropout and noise draw other random numbers in another micro batch"] if other else changes


DRAWS_ALONG = (
    "data.packing", "train.per_device_train_batch_size", "speed.fused_lora", "speed.compile", "parallel.cp", PARTS,
)  # fmt: skip
"""Of these, which element of a step gets which random number depends on them."""


ADDED = {
    "adapter.use_rslora": False,
    "adapter.use_dora": False,
    "adapter.experts": False,
    "model.chat_template_kwargs": {},
    "model.add_tokens": [],
}
"""What runs did whose checkpoints are older than a key."""


def require_same(before: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Refuse to continue another run.

    Args:
        before: the `identity` in the checkpoint.
        now: that of this config and these rows.
        path: the run directory, for the message.

    Raises:
        ConfigError: naming the first difference with both values.
    """
    for key, value in now.items():
        was = before.get(key, ADDED.get(key))
        if was != value:
            raise ConfigError(
                f"{key} was {was!r} when the checkpoint was written and is {value!r} now",
                code="E5104",
                path=path,
                field=key.partition(":")[0],
                help="put it back to resume, or start anew in another output_dir",
            )
