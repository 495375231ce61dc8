"""How a step is cut, for memory and for time."""

from __future__ import annotations

from collections.abc import Callable

from surefit.config.resolve import ResolvedConfig
from surefit.facts.step_shape import StepShape, micro_batch_shape, usual_shape

LLAMA_8B = "meta-llama/Llama-3.1-8B"


def test_a_packed_micro_batch_has_no_more_than_one_rank_s_part(make_resolved: Callable[..., ResolvedConfig]) -> None:
    """64 examples of 305 tokens over 8 ranks: 8 examples each, though 27 would fit; over one all that fit."""
    settings = "train.global_batch_size=64", "train.per_device_train_batch_size=4", "data.max_length=2048"
    eight = make_resolved(LLAMA_8B, *settings, "hardware.count=8", "parallel.mode=ddp")
    assert micro_batch_shape(eight, 305) == StepShape(8, 305, 1)
    assert usual_shape(eight, 305) == StepShape(8, 305, 1)
    assert micro_batch_shape(eight) == StepShape(4, 2048, 2)
    assert usual_shape(eight, 1500) == StepShape(4, 1500, 2)
    one = make_resolved(LLAMA_8B, *settings)
    assert micro_batch_shape(one, 305) == usual_shape(one, 305) == StepShape(27, 303, 3)


def test_ranks_fill_two_rows_each_evenly_where_one_is_not_enough(make_resolved: Callable[..., ResolvedConfig]) -> None:
    """8 examples of 305 tokens are more than a row of 2,048: usually two rows of four; at most one of seven."""
    resolved = make_resolved(
        LLAMA_8B, "train.global_batch_size=64", "train.per_device_train_batch_size=1", "data.max_length=2048",
        "hardware.count=8", "parallel.mode=ddp",
    )  # fmt: skip
    assert usual_shape(resolved, 305) == StepShape(4, 305, 2)
    assert micro_batch_shape(resolved, 305) == StepShape(7, 292, 2)
