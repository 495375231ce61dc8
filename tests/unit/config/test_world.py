"""What several processes cannot share is refused with the numbers and the way out."""

from __future__ import annotations

from typing import Any

import pytest

from surefit.config.schema import SureFitConfig
from surefit.config.world import (
    count_accumulation_steps,
    count_data_ranks,
    decide_mode,
    examples_per_data_rank,
    require_shareable,
)
from surefit.core.errors import ConfigError


def config(count: int, **sections: Any) -> SureFitConfig:
    return SureFitConfig.model_validate(
        {
            "model": {"name_or_path": "m"},
            "data": {"train": "rows.jsonl"},
            "output_dir": "out",
            "hardware": {"count": count, **sections.pop("hardware", {})},
            "train": {"global_batch_size": 12, "per_device_train_batch_size": 2, **sections.pop("train", {})},
            **sections,
        }
    )


@pytest.mark.parametrize(
    ("count", "sections", "problem"),
    [
        (2, {"parallel": {"mode": "single"}}, "parallel.mode is single, but there are 2 processes"),
        (4, {"parallel": {"mode": "ddp", "cp": 2}}, "parallel.mode is ddp, with cp: 2"),
        (4, {"parallel": {"mode": "fsdp", "tp": 2}}, "parallel.mode is fsdp, with tp: 2"),
        (4, {"parallel": {"mode": "fsdp", "cp": 2, "pp": 2}}, "parallel.mode is fsdp, with pp: 2, cp: 2"),
        (4, {"parallel": {"mode": "zero3", "cp": 2}}, "parallel.mode is zero3, with cp: 2"),
        (4, {"parallel": {"mode": "cp", "cp": 3}}, "cannot be divided into groups of 3 (parallel.cp)"),
        (4, {"parallel": {"mode": "fsdp", "cp": 3}}, "cannot be divided into groups of 3 (parallel.cp)"),
        (4, {"parallel": {"mode": "tp", "tp": 3}}, "cannot be divided into groups of 3 (parallel.tp)"),
        (2, {"parallel": {"mode": "pp"}}, "parallel.mode is pp, but parallel.pp is 1"),
        (1, {"parallel": {"mode": "cp"}}, "parallel.mode is cp, but parallel.cp is 1"),
        (2, {"parallel": {"mode": "ddp", "dp_replicate": 2}}, "parallel.mode ddp does not use it"),
        (2, {"parallel": {"mode": "ddp", "offload": True}}, "parallel.mode ddp with 2 processes offloads nothing"),
        (1, {"parallel": {"mode": "fsdp", "offload": True}}, "parallel.mode fsdp with 1 process offloads nothing"),
    ],
)
def test_impossible_ways_of_sharing(count: int, sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_shareable(config(count, **sections))
    assert problem in caught.value.message
    assert caught.value.help


def test_the_arithmetic_of_the_processes() -> None:
    four = config(4, parallel={"mode": "cp", "cp": 2})
    require_shareable(four)
    assert (count_data_ranks(four), examples_per_data_rank(four), count_accumulation_steps(four)) == (2, 6, 3)
    both = config(8, parallel={"mode": "fsdp", "cp": 2, "dp_replicate": 2})
    require_shareable(both)
    assert (count_data_ranks(both), examples_per_data_rank(both), count_accumulation_steps(both)) == (4, 3, 2)
    layers = config(4, parallel={"mode": "pp", "pp": 2})
    require_shareable(layers)
    assert (count_data_ranks(layers), count_accumulation_steps(layers)) == (2, 3)
    three = config(3, parallel={"mode": "ddp"}, hardware={"count": 3, "nodes": 2})
    require_shareable(three)
    assert (count_data_ranks(three), examples_per_data_rank(three), count_accumulation_steps(three)) == (6, 2, 1)


def test_tp_and_pp_are_refused_within_fsdp_with_the_reason() -> None:
    with pytest.raises(ConfigError) as caught:
        require_shareable(config(4, parallel={"mode": "fsdp", "tp": 2}))
    assert "cut the weights that fsdp would shard again; only cp can be combined with it" in str(caught.value.help)


def needed(model: int, tokens: int) -> Any:
    """Bytes of a run whose weights and whose activations take so much in one process."""

    def of(shared: SureFitConfig) -> int:
        shards = 8 if shared.parallel.mode == "fsdp" else 1
        return model // shards + tokens // shared.parallel.cp

    return of


@pytest.mark.parametrize(
    ("model", "tokens", "way", "reason"),
    [
        (50, 50, {"mode": "ddp"}, "a whole model on each device: up to 100 B of 100 B"),
        (800, 0, {"mode": "fsdp"}, "a share of it: up to 100 B of 100 B; a whole model"),
        (40, 200, {"mode": "cp", "cp": 4}, "a share of each example's tokens: up to 90 B"),
        (400, 200, {"mode": "fsdp", "cp": 4}, "a share of the model and a share of each example's tokens: up to 100 B"),
        (
            8000,
            800,
            {"mode": "fsdp", "cp": 8},
            "a share of each example's tokens: nothing fits; the smallest option needs up to",
        ),
    ],
)
def test_auto_shares_as_little_as_fits(model: int, tokens: int, way: dict[str, Any], reason: str) -> None:
    found, why = decide_mode(config(8, data={"train": "rows.jsonl", "packing": True}), 100, needed(model, tokens))
    assert found == {f"parallel.{name}": value for name, value in way.items()}
    assert reason in why


@pytest.mark.parametrize(
    ("model", "capacity", "mode"), [(40, 100, "cp"), (400, 100, "fsdp"), (4000, 100, "fsdp"), (4000, None, "cp")]
)
def test_auto_keeps_the_tokens_shared_as_they_are_set(model: int, capacity: int | None, mode: str) -> None:
    found, why = decide_mode(config(8, parallel={"cp": 4}), capacity, needed(model, 200))
    assert found == {"parallel.mode": mode}
    assert "tokens" in why or why == "parallel.cp is 4"
    assert decide_mode(config(8, parallel={"cp": 3}), capacity, needed(model, 200))[0] == {"parallel.mode": "cp"}
    replicas = config(8, parallel={"cp": 2, "dp_replicate": 2})
    assert decide_mode(replicas, capacity, needed(model, 200))[0] == {"parallel.mode": "fsdp"}
