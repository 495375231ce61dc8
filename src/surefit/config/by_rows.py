"""The passes over the rows and the examples per optimizer step that fit a number of rows.

The one place of the rule behind `train.num_train_epochs: auto`, `train.global_batch_size: auto` and what `surefit init`
writes.
"""

from __future__ import annotations

import math
from typing import Any

from surefit.config.schema import SureFitConfig, TrainSection, decided
from surefit.core.units import plural

EPOCHS, FEWEST_STEPS, MOST_EXAMPLES, MOST_EPOCHS = 3, 100, 25_000, 10
"""Three passes over the rows, more if that is fewer steps, fewer if it is more examples: the rule of OpenAI's
"Data preparation and analysis for chat model fine-tuning" (cookbook.openai.com, 2023), which stops at 25 passes."""
SMALLEST_BATCH, LARGEST_BATCH, BATCHES_PER_EPOCH = 4, 64, 50
SHORT_RUN = 50
"""Optimizer steps below which a run is a trial: too few to learn much, and no checkpoint is needed on the way."""
EPOCHS_RULE = f"{EPOCHS} epochs, up to {MOST_EPOCHS} to reach {FEWEST_STEPS} steps, fewer above {MOST_EXAMPLES:,} rows"
BATCH_RULE = f"1/{BATCHES_PER_EPOCH} of the rows, from {SMALLEST_BATCH} to {LARGEST_BATCH}"
"""The rules in words."""
SMALLEST_LABELLED_BATCH = 16
LABELLED_BATCH_RULE = (
    f"1/{BATCHES_PER_EPOCH} of the rows, from {SMALLEST_LABELLED_BATCH} to {LARGEST_BATCH}: kto estimates a KL "
    "divergence from each batch"
)
"""For labelled answers: TRL's documentation of KTO recommends 16 to 128."""


def choose_global_batch_size(rows: int, multiple: int = 1, smallest: int = SMALLEST_BATCH) -> int:
    """Return the examples per step: a power of two near a fiftieth of the rows, or the next multiple of `multiple`,
    which the devices and the micro batch ask for.

    >>> [choose_global_batch_size(rows) for rows in (60, 240, 1_000, 50_000)], choose_global_batch_size(240, 6)
    ([4, 4, 16, 64], 6)
    """
    power: int = 2 ** int(math.log2(max(1, rows / BATCHES_PER_EPOCH)))
    return -(-min(max(power, smallest), LARGEST_BATCH) // multiple) * multiple


def choose_epochs(rows: int, batch: int) -> int:
    """Return the passes over the rows.

    >>> [choose_epochs(rows, choose_global_batch_size(rows)) for rows in (20, 60, 240, 1_000, 10_000, 50_000)]
    [10, 7, 3, 3, 2, 1]
    """
    if rows * EPOCHS > MOST_EXAMPLES:
        return max(1, MOST_EXAMPLES // rows)
    return min(max(EPOCHS, math.ceil(FEWEST_STEPS * batch / rows)), MOST_EPOCHS)


def needs_row_count(config: SureFitConfig) -> bool:
    """Return whether the number of rows decides a value of the config."""
    return "auto" in (config.train.num_train_epochs, config.train.global_batch_size)


def decide_by_rows(config: SureFitConfig, rows: int | None, devices: int) -> dict[str, tuple[Any, str]]:
    """Decide the batch and the epochs where they are auto, with their reasons.

    Args:
        rows: rows of one epoch, without the held-out ones; with none, or None while they are not counted, the
            defaults.
        devices: processes that share a batch.
    """
    train = config.train
    decisions: dict[str, tuple[Any, str]] = {}
    micro = train.per_device_train_batch_size
    multiple = math.lcm(devices, micro) if isinstance(micro, int) else devices
    if not rows:
        defaults = TrainSection()
        reason = "the default: " + ("the rows are not counted" if rows is None else "no row is left to train on")
        default_batch = -(-decided(defaults.global_batch_size) // multiple) * multiple
        values = {"global_batch_size": default_batch, "num_train_epochs": defaults.num_train_epochs}
        return {f"train.{name}": (value, reason) for name, value in values.items() if getattr(train, name) == "auto"}
    batch = train.global_batch_size
    if batch == "auto":
        labelled = config.objective.labelled
        batch = choose_global_batch_size(rows, multiple, SMALLEST_LABELLED_BATCH if labelled else SMALLEST_BATCH)
        shared = f", a multiple of {multiple}" if batch not in (4, 8, 16, 32, 64) else ""
        rule = LABELLED_BATCH_RULE if labelled else BATCH_RULE
        decisions["train.global_batch_size"] = batch, f"{rule}{shared}; {plural(rows, 'row')} in an epoch"
    if train.num_train_epochs == "auto" and config.objective.name == "sft":  # others: config/by_objective.py
        reason = f"{EPOCHS_RULE}; {plural(rows, 'row')} in batches of {batch}"
        decisions["train.num_train_epochs"] = float(choose_epochs(rows, batch)), reason
    return decisions
