"""Micro batches of an optimizer step: for memory the fullest, for time the usual ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import decided
from surefit.config.world import count_data_ranks, examples_per_data_rank


@dataclass(frozen=True)
class StepShape:
    """Size of a step's micro batches: `rows` sequences of `length` tokens; a pair is two sequences, of which the second
    is without its first `shared` tokens."""

    rows: int
    length: int
    micro_batches: int
    shared: int = 0

    @property
    def tokens(self) -> int:
        return self.rows * self.length - self.rows // 2 * self.shared


def micro_batch_shape(resolved: ResolvedConfig, length: int | None = None) -> StepShape:
    """Return the fullest micro batch of a step whose examples have `length` tokens, and the number of micro batches.

    Packed, a row holds `per_device_train_batch_size` × `data.max_length` tokens, and one rank's part of an optimizer
    step at most (`data.tokens.pack.pack_for`): it is assumed to be full of examples of equal length.

    Args:
        resolved: the config without "auto".
        length: tokens of each example; `data.max_length` if not given.
    """
    config, train, answers = resolved.config, resolved.config.train, resolved.config.objective.answers_per_example
    size = train.per_device_train_batch_size
    assert isinstance(size, int)
    rows = answers * size
    max_length = config.data.max_length
    length = max_length if length is None else min(length, max_length)
    if config.data.packing is not True:
        return StepShape(rows, length, resolved.gradient_accumulation_steps)
    capacity, shared = rows * max_length, shared_tokens(resolved, length)
    each = answers * length - shared
    examples = min(examples_per_data_rank(config), -(-capacity // each))
    batches = math.ceil(decided(train.global_batch_size) * each / capacity)
    micro_batches = max(1, math.ceil(batches / count_data_ranks(config)))
    length = min(length, (capacity // examples + shared) // answers)
    return StepShape(answers * examples, length, micro_batches, shared)


def shared_tokens(resolved: ResolvedConfig, length: int) -> int:
    """Return the tokens of the prompt that two answers of `length` tokens, prompt included, have in common and that are
    computed once; 0 where prompts are not shared."""
    shares = resolved.config.speed.shared_prompts is True and resolved.config.data.packing is True
    return min(length - 1, round(2 * length * resolved.shared)) if shares else 0


def usual_shape(resolved: ResolvedConfig, length: int) -> StepShape:
    """Return the shape of a step of usual examples, for its time: packed micro batches are even, not full."""
    config, shape = resolved.config, micro_batch_shape(resolved, length)
    if config.data.packing is not True or count_data_ranks(config) == 1:
        return shape
    rows = config.objective.answers_per_example * math.ceil(examples_per_data_rank(config) / shape.micro_batches)
    length = min(length, config.data.max_length)
    return StepShape(rows, length, shape.micro_batches, shared_tokens(resolved, length))
