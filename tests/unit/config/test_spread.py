"""What several processes cannot share is refused with the numbers and the way out."""

from __future__ import annotations

from typing import Any

import pytest

from surefit.config.schema import Config
from surefit.config.spread import accumulation, data_ranks, own_batch, require_possible
from surefit.core.errors import ConfigError


def config(count: int, **sections: Any) -> Config:
    return Config.model_validate(
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
        (2, {"parallel": {"mode": "single"}}, "2 processes, and parallel.mode is single"),
        (4, {"parallel": {"mode": "ddp", "cp": 2}}, "parallel.mode is ddp, with cp: 2"),
        (4, {"parallel": {"mode": "cp", "cp": 3}}, "cannot be divided into groups by parallel.cp: 3"),
        (4, {"parallel": {"mode": "tp", "tp": 3}}, "cannot be divided into groups by parallel.tp: 3"),
        (2, {"parallel": {"mode": "pp"}}, "parallel.mode is pp, and parallel.pp is 1"),
        (1, {"parallel": {"mode": "cp"}}, "parallel.mode is cp, and parallel.cp is 1"),
        (2, {"parallel": {"mode": "ddp", "dp_replicate": 2}}, "parallel.mode ddp has no use for it"),
        (2, {"parallel": {"mode": "ddp", "offload": True}}, "parallel.mode ddp with 2 processes keeps nothing"),
        (1, {"parallel": {"mode": "fsdp", "offload": True}}, "parallel.mode fsdp with 1 process keeps nothing"),
        (2, {"parallel": {"mode": "tp", "tp": 2}, "train": {"optimizer": "adamw_8bit"}}, "adamw_8bit cannot update"),
        (2, {"parallel": {"mode": "tp", "tp": 2}, "speed": {"compile": True}}, "cannot be compiled"),
        (
            2,
            {"parallel": {"mode": "cp", "cp": 2}, "speed": {"attention": "flash_attention_2"}},
            "flash_attention_2 cannot",
        ),
    ],
)
def test_impossible_ways_of_sharing(count: int, sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_possible(config(count, **sections))
    assert problem in caught.value.message
    assert caught.value.help


def test_the_arithmetic_of_the_processes() -> None:
    four = config(4, parallel={"mode": "cp", "cp": 2})
    require_possible(four)
    assert (data_ranks(four), own_batch(four), accumulation(four)) == (2, 6, 3)
    layers = config(4, parallel={"mode": "pp", "pp": 2})
    require_possible(layers)
    assert (data_ranks(layers), accumulation(layers)) == (2, 3)
    three = config(3, parallel={"mode": "ddp"}, hardware={"count": 3, "nodes": 2})
    require_possible(three)
    assert (data_ranks(three), own_batch(three), accumulation(three)) == (6, 2, 1)
