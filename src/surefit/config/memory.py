"""Decisions that depend on the memory of a step: the micro batch, gradient checkpointing, tiled MLPs.

The formulas (`facts/memory_formula.py`) are in a layer above `config/`, so they are passed in as a function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from surefit.config.schema import SureFitConfig, decided
from surefit.config.world import count_accumulation_steps, examples_per_data_rank
from surefit.core.units import bytes_text

Needed = Callable[[SureFitConfig, int], int | None]
"""(config, micro batches per step) → upper bound of a step's device memory in bytes; None where it is unknown."""

EFFICIENT_TOKENS = 8_192
"""Tokens of a micro batch beyond which matrix products get no faster: more only need memory."""
FEW_TOKENS = EFFICIENT_TOKENS // 4
"""Micro batches below this size are no better than gradient checkpointing."""
CHECKPOINTING, MICRO, TILED = (
    "train.gradient_checkpointing", "train.per_device_train_batch_size", "speed.tiled_mlp",
)  # fmt: skip
RECOMPUTED: tuple[Any, ...] = (False, "selective", True, "offload")
"""Values of gradient checkpointing: each needs less memory and more time than the one before."""
LEVELS: tuple[tuple[Any, bool], ...] = (*((kind, False) for kind in RECOMPUTED[:-1]), (True, True))
"""(gradient checkpointing, whether MLPs are tiled), the fastest first."""
WORDS = {False: "nothing recomputed", "selective": "all but attention recomputed", True: "layers recomputed"}
WORDS |= {"offload": "layers recomputed, their inputs on the host"}


@dataclass(frozen=True)
class MemoryChoice:
    """One combination of gradient checkpointing, tiled MLPs and micro batch size."""

    checkpointing: Any
    tiled: bool
    micro: int

    def of(self, config: SureFitConfig) -> SureFitConfig:
        train = {"gradient_checkpointing": self.checkpointing, "per_device_train_batch_size": self.micro}
        return config.model_copy(
            update={
                "train": config.train.model_copy(update=train),
                "speed": config.speed.model_copy(update={"tiled_mlp": self.tiled}),
            }
        )


def decide_memory(config: SureFitConfig, capacity: int, needed: Needed) -> dict[str, tuple[Any, str]] | None:
    """Choose the first combination that fits, in the order of `LEVELS`, with the largest useful micro batch.

    Args:
        config: everything else is decided; values that are not "auto" are kept.
        capacity: the device's memory in bytes.
        needed: function that returns the memory of a step.

    Returns:
        Dotted key → (value, reason), whether "auto" or not; where nothing fits, the first combination that needs least
        memory. None where the memory is unknown.
    """
    estimates: list[tuple[int, MemoryChoice]] = []
    too_large: dict[str, int] = {}
    for choice in _ways(config):
        candidate = choice.of(config)
        step_bytes = needed(candidate, count_accumulation_steps(candidate))
        if step_bytes is None:
            return None
        estimates.append((step_bytes, choice))
        if step_bytes <= capacity:
            break
        # The smallest micro batch of each level comes last: it shows whether the level can fit at all.
        too_large[_level(choice)] = step_bytes
    # Where nothing fits, several choices may need the least: the optimizer update needs the same memory under any
    # gradient checkpointing.
    size, choice = estimates[-1] if estimates[-1][0] <= capacity else min(estimates, key=lambda estimate: estimate[0])
    too_large.pop(_level(choice), None)
    return _explained(choice, size, capacity, too_large)


def _ways(config: SureFitConfig) -> list[MemoryChoice]:
    train, speed = config.train, config.speed
    batch_size = decided(train.global_batch_size)
    length = config.data.max_length * config.objective.answers_per_example
    divisors = [size for size in range(1, examples_per_data_rank(config) + 1) if batch_size % size == 0]
    efficient_micro = next((size for size in divisors if size * length >= EFFICIENT_TOKENS), batch_size)
    micros = [size for size in reversed(divisors) if size <= efficient_micro]
    levels = dict.fromkeys(
        (
            checkpointing if train.gradient_checkpointing == "auto" else train.gradient_checkpointing,
            tiled if speed.tiled_mlp == "auto" else speed.tiled_mlp,
        )
        for checkpointing, tiled in LEVELS
    )
    choices = []
    for checkpointing, tiled in levels:
        is_last = (checkpointing, tiled) == list(levels)[-1]
        useful_micros = [
            size for size in micros if is_last or size * length >= min(FEW_TOKENS, efficient_micro * length)
        ]
        configured = train.per_device_train_batch_size
        choices += [
            MemoryChoice(checkpointing, tiled, size)
            for size in (useful_micros if configured == "auto" else [configured])
        ]
    return choices


def _level(way: MemoryChoice) -> str:
    return WORDS[way.checkpointing] + (", MLPs in tiles" if way.tiled else "")


def _explained(way: MemoryChoice, size: int, capacity: int, too_large: dict[str, int]) -> dict[str, tuple[Any, str]]:
    memory_text = f"up to {bytes_text(size)} of {bytes_text(capacity)}"
    if size > capacity:
        memory_text = f"the smallest option, but still {memory_text}"
    smaller_levels = "".join(
        f"; {level} would need {bytes_text(bytes_needed)}" for level, bytes_needed in too_large.items()
    )
    return {
        CHECKPOINTING: (way.checkpointing, f"{memory_text}{smaller_levels}"),
        MICRO: (way.micro, f"the most examples that fit and still help: {memory_text}"),
        TILED: (way.tiled, f"{'nothing else fits' if way.tiled else 'not needed'}: {memory_text}"),
    }
