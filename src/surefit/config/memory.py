"""The decisions that depend on how much memory a step takes: the micro batch, what is recomputed, tiles.

The arithmetic itself (`facts/memory_formula.py`) stands above `config/`, so it is passed in as a function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from surefit.config.schema import Config
from surefit.config.world import count_accumulation_steps, examples_per_data_rank
from surefit.core.units import bytes_text

Needed = Callable[[Config, int], int | None]
"""(config, micro batches per step) → bytes that a step takes of the device at most; None where nobody knows."""

EFFICIENT_TOKENS = 8_192
"""Tokens of a micro batch from which on matrix products are as fast as they get: more only take memory."""
FEW_TOKENS = EFFICIENT_TOKENS // 4
"""Recomputing a part is no worse than micro batches of fewer."""
CHECKPOINTING, MICRO, TILED = (
    "train.gradient_checkpointing", "train.per_device_train_batch_size", "speed.tiled_mlp",
)  # fmt: skip
RECOMPUTED: tuple[Any, ...] = (False, "selective", True, "offload")
"""What is recomputed in the backward pass: each kind takes less memory and more time than the one before."""
LEVELS: tuple[tuple[Any, bool], ...] = (*((kind, False) for kind in RECOMPUTED[:-1]), (True, True))
"""(what is recomputed, whether MLPs are tiled), the fastest first."""
WORDS = {False: "nothing recomputed", "selective": "all but attention recomputed", True: "layers recomputed"}
WORDS |= {"offload": "layers recomputed, their inputs on the host"}


@dataclass(frozen=True)
class MemoryChoice:
    """One way to run a step."""

    checkpointing: Any
    tiled: bool
    micro: int

    def of(self, config: Config) -> Config:
        train = {"gradient_checkpointing": self.checkpointing, "per_device_train_batch_size": self.micro}
        return config.model_copy(
            update={
                "train": config.train.model_copy(update=train),
                "speed": config.speed.model_copy(update={"tiled_mlp": self.tiled}),
            }
        )


def decide_memory(config: Config, capacity: int, needed: Needed) -> dict[str, tuple[Any, str]] | None:
    """The first way that fits, in the order of `LEVELS`, with the largest micro batch that is of use.

    Args:
        config: everything else decided; what is not "auto" in it is kept.
        capacity: bytes that the device has.
        needed: what a way takes.

    Returns:
        Dotted key → (value, reason), whether "auto" or not; where nothing fits, the first way that takes least. None
        where nobody knows what is needed.
    """
    tried: list[tuple[int, MemoryChoice]] = []
    too_large: dict[str, int] = {}
    for way in _ways(config):
        changed = way.of(config)
        found = needed(changed, count_accumulation_steps(changed))
        if found is None:
            return None
        tried.append((found, way))
        if found <= capacity:
            break
        # Of each level the smallest micro batch comes last: it says whether the level can be had at all.
        too_large[_level(way)] = found
    # Where nothing fits, several ways may take the least: the update takes the same whatever was recomputed.
    size, way = tried[-1] if tried[-1][0] <= capacity else min(tried, key=lambda one: one[0])
    too_large.pop(_level(way), None)
    return _explained(way, size, capacity, too_large)


def _ways(config: Config) -> list[MemoryChoice]:
    train, speed = config.train, config.speed
    whole, length = train.global_batch_size, config.data.max_length
    divisors = [size for size in range(1, examples_per_data_rank(config) + 1) if whole % size == 0]
    enough = next((size for size in divisors if size * length >= EFFICIENT_TOKENS), whole)
    micros = [size for size in reversed(divisors) if size <= enough]
    levels = dict.fromkeys(
        (
            checkpointing if train.gradient_checkpointing == "auto" else train.gradient_checkpointing,
            tiled if speed.tiled_mlp == "auto" else speed.tiled_mlp,
        )
        for checkpointing, tiled in LEVELS
    )
    ways = []
    for checkpointing, tiled in levels:
        last = (checkpointing, tiled) == list(levels)[-1]
        few = [size for size in micros if last or size * length >= min(FEW_TOKENS, enough * length)]
        given = train.per_device_train_batch_size
        ways += [MemoryChoice(checkpointing, tiled, size) for size in (few if given == "auto" else [given])]
    return ways


def _level(way: MemoryChoice) -> str:
    return WORDS[way.checkpointing] + (", MLPs in tiles" if way.tiled else "")


def _explained(way: MemoryChoice, size: int, capacity: int, too_large: dict[str, int]) -> dict[str, tuple[Any, str]]:
    takes = f"up to {bytes_text(size)} of {bytes_text(capacity)}"
    if size > capacity:
        takes = f"the least of all ways, and still {takes}"
    before = "".join(f"; {level} would take {bytes_text(other)}" for level, other in too_large.items())
    return {
        CHECKPOINTING: (way.checkpointing, f"{takes}{before}"),
        MICRO: (way.micro, f"as many examples as are of use and fit: {takes}"),
        TILED: (way.tiled, f"{'nothing else fits' if way.tiled else 'not needed'}: {takes}"),
    }
