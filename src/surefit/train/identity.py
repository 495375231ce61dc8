"""What a resumed run must have in common with the run that it continues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from surefit.config.resolve import iter_config_values
from surefit.config.schema import Config
from surefit.core.errors import ConfigError
from surefit.train.sampler import DatasetFingerprint

PARTS = "processes that share the rows"
FREE_ON_RESUME = (
    "per_device_train_batch_size", "gradient_checkpointing", "early_stopping_patience", "eval_steps",
    "num_train_epochs", "max_steps",
)  # fmt: skip
"""Settings of `train` that do not change what a step learns; the last two do so by `total_steps`, which is compared."""


HELD_OUT = "data.eval: content"
SCORING = (
    "max_examples", "max_new_tokens", "constrained", "num_beams", "samples", "temperature", "chat_template_kwargs",
)  # fmt: skip
"""Settings of `evaluate` that the scores in training depend on."""


def build_run_identity(
    config: Config, survey: DatasetFingerprint, held_out: DatasetFingerprint, total_steps: int
) -> dict[str, Any]:
    """Return everything that decides what is learnt and which checkpoint is the best, by its config key, as JSON can
    hold it: measurements on other held-out rows cannot be compared with those before the resume.

    Args:
        survey: of the training rows.
        held_out: of the held-out rows.
        total_steps: optimizer steps of the run.
    """
    values = {f"lora.{key}": value for key, value in iter_config_values(config.lora)}
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


def _scoring(config: Config) -> dict[str, Any]:
    """Return what the scores that are measured in training depend on; nothing where none are."""
    if not config.evaluate.in_training:
        return {}
    settings = config.evaluate.model_dump(mode="json")
    return {f"evaluate.{key}": settings[key] for key in SCORING}


def execution_settings(config: Config, mode: str = "single", data_size: int = 1) -> dict[str, Any]:
    """How the processes share a step, and settings, that a resumed run may change: they change the order of additions,
    so the last bits, and which random numbers fall to which element."""
    values = {f"speed.{key}": value for key, value in iter_config_values(config.speed)}
    return values | {
        "data.packing": config.data.packing,
        "train.per_device_train_batch_size": config.train.per_device_train_batch_size,
        "train.gradient_checkpointing": config.train.gradient_checkpointing,
        "parallel.mode": mode,
        "parallel.cp": config.parallel.cp,
        PARTS: data_size,
    }


def changed_settings(trainer: Mapping[str, Any], config: Config, mode: str = "single", data_size: int = 1) -> list[str]:
    """How the settings of `execution_settings` differ from those of a checkpoint, as `data.packing: False, now True`.

    Args:
        trainer: the checkpoint's trainer.json.
        config: of the run that resumes it.
        mode, data_size: of its engine (parallel/engine.py).
    """
    before, now = trainer.get("carried_out", {}), execution_settings(config, mode, data_size)
    changes = [f"{key}: {before[key]}, now {value}" for key, value in now.items() if before.get(key, value) != value]
    draws = config.lora.lora_dropout > 0 or config.train.neftune_noise_alpha is not None
    other = draws and any(before.get(key, now[key]) != now[key] for key in DRAWS_ALONG)
    return [*changes, "dropout and noise draw other random numbers in another micro batch"] if other else changes


DRAWS_ALONG = (
    "data.packing", "train.per_device_train_batch_size", "speed.fused_lora", "speed.compile", "parallel.cp", PARTS,
)  # fmt: skip
"""Of these, which element of a step gets which random number depends on them."""


ADDED = {
    "lora.use_rslora": False,
    "lora.use_dora": False,
    "lora.experts": False,
    "model.chat_template_kwargs": {},
    "model.add_tokens": [],
}
"""What runs did whose checkpoints are older than a key."""


LATER = ("data.eval: ", "evaluate.")
"""Keys of which an older checkpoint, or one of a run that measured no scores, says nothing."""


def require_same_held_out(lines: Iterable[Mapping[str, Any]], held_out: DatasetFingerprint, path: Path) -> None:
    """Compare the held-out rows by their supervised tokens, where the checkpoint is too old to hold their hash.

    Args:
        lines: of metrics.jsonl.
        held_out: of this config's held-out rows.
        path: the run directory, for the message.

    Raises:
        ConfigError: other tokens were measured before.
    """
    for line in lines:
        if (was := line.get("eval_tokens", held_out.supervised)) != held_out.supervised:
            raise ConfigError(
                f"the held-out rows had {was:,} supervised tokens when the checkpoint was written and have "
                f"{held_out.supervised:,} now",
                code="E5350",
                path=path,
                field="data.eval",
                help="put them back to resume, or start anew in another output_dir",
            )


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
        if key not in before and key.startswith(LATER):
            continue
        was = before.get(key, ADDED.get(key))
        if was != value:
            raise ConfigError(
                f"{key} was {was!r} when the checkpoint was written and is {value!r} now",
                code="E5104",
                path=path,
                field=key.partition(":")[0],
                help="put it back to resume, or start anew in another output_dir",
            )
