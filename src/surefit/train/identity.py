"""What a resumed run must have in common with the run that it continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefit.config.resolve import leaves
from surefit.config.schema import Config
from surefit.core.errors import ConfigError
from surefit.train.order import Survey

FREE_ON_RESUME = ("per_device_train_batch_size", "gradient_checkpointing", "epochs", "max_steps")
"""Settings of `train` that do not change what is learnt; the last two do so by `total_steps`, which is compared."""


def identity(config: Config, survey: Survey, total_steps: int) -> dict[str, Any]:
    """Everything that decides what is learnt, by its config key, as JSON can hold it."""
    values = {f"adapter.{key}": value for key, value in leaves(config.adapter)}
    values |= {f"train.{key}": value for key, value in leaves(config.train) if key not in FREE_ON_RESUME}
    return values | {
        "model.name_or_path": config.model.name_or_path,
        "model.revision": config.model.revision,
        "model.dtype": config.model.dtype,
        "data.train: rows": len(survey.lengths),
        "data.train: content": survey.sha256,
        "total_steps": total_steps,
    }


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
        if before.get(key) != value:
            raise ConfigError(
                f"{key} was {before.get(key)!r} when the checkpoint was written and is {value!r} now",
                path=path,
                field=key.partition(":")[0],
                help="put it back to resume, or start anew in another output_dir",
            )
