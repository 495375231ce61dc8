"""The table of what cannot be combined: who reads it, and that everything is said at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_run

from surefit.config.capabilities import (
    CONFLICTS,
    TRAITS,
    WITHOUT,
    conflict_with_trait,
    conflicts,
    require_compatible_settings,
    traits,
)
from surefit.config.schema import SureFitConfig
from surefit.config.world import decide_mode, parallel_candidates
from surefit.core.errors import ConfigError


def config(**sections: Any) -> SureFitConfig:
    return SureFitConfig.model_validate(
        {"model": {"name_or_path": "base"}, "data": {"train": "rows.jsonl"}, "output_dir": "run"} | sections
    )


ZERO3 = config(
    hardware={"gpu": "h100", "count": 2},
    model={"name_or_path": "base", "quantization": "nf4"},
    train={"optim": "adamw_8bit"},
    speed={"compile": True, "fused_lora": True},
    parallel={"mode": "zero3"},
)


def test_every_conflict_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        require_compatible_settings(ZERO3)
    said = [caught.value, *caught.value.also]
    assert [error.field for error in said] == [
        "model.quantization", "train.optim", "speed.fused_lora", "speed.compile",
    ]  # fmt: skip
    assert said[0].message == (
        "parallel.mode zero3 and model.quantization nf4 cannot be combined: quantized weights lose their scales when "
        "they are cut up"
    )
    assert said[0].help == "set model.quantization: none; or parallel.mode: zero2 or ddp"


def test_what_is_auto_is_no_trait() -> None:
    assert traits(config(parallel={"mode": "zero3"})) == {"zero3"}
    assert traits(config(parallel={"tp": 2})) == {"tp"}, "its size alone says which mode auto will be"
    assert traits(config(train={"method": "full"}, lora={"use_dora": True}, speed={"fused_lora": True})) == {
        "all weights"
    }


def test_an_obstacle_is_of_the_trait_that_is_asked_for() -> None:
    found = conflict_with_trait(ZERO3.model_copy(update={"speed": config().speed}), "fused LoRA")
    assert found is not None
    assert found.other == "fused LoRA"
    assert conflict_with_trait(config(), "fused LoRA") is None


def test_the_way_out_is_one() -> None:
    """Giving up the named setting leaves no row with it; a row that nobody can leave helps nobody."""
    for row in CONFLICTS:
        assert row.other in WITHOUT, row
        assert row.one in TRAITS
        assert not [left for left in conflicts(frozenset({row.one, row.other}) - {row.other}) if left == row]


@pytest.mark.parametrize(
    ("sections", "modes"),
    [
        ({}, {("ddp", 1), ("fsdp", 1), ("cp", 2), ("fsdp", 2)}),
        ({"train": {"optim": "adamw_8bit"}}, {("ddp", 1), ("cp", 2)}),
        ({"train": {"neftune_noise_alpha": 5}}, {("ddp", 1), ("fsdp", 1)}),
        ({"lora": {"use_dora": True}}, {("ddp", 1), ("fsdp", 1)}),
        ({"evaluate": {"in_training": True}}, {("ddp", 1)}),
        # What cannot be combined in any mode is said by `check`, and leaves the choice of mode as it is.
        (
            {"train": {"method": "full"}, "model": {"name_or_path": "base", "quantization": "nf4"}},
            {("ddp", 1), ("cp", 2)},
        ),
    ],
)
def test_auto_takes_no_mode_that_conflicts(sections: dict[str, Any], modes: set[tuple[str, int]]) -> None:
    settings = config(hardware={"count": 2}, data={"train": "rows.jsonl", "packing": True}, **sections)
    found = {(way["parallel.mode"], way.get("parallel.cp", 1)) for way in parallel_candidates(settings, 2)}
    assert found == modes


def test_where_every_mode_conflicts_one_is_named_all_the_same() -> None:
    settings = config(hardware={"count": 2}, parallel={"cp": 2}, evaluate={"in_training": True})
    assert list(parallel_candidates(settings, 2)) == []
    assert decide_mode(settings, 10**9, lambda shared: 1)[0] == {"parallel.mode": "cp"}


def test_training_refuses_what_check_would_have(tmp_path: Path) -> None:
    made = tiny_run.config(tiny_run.save_base(tmp_path / "base"), tmp_path / "run", adapter={"use_dora": True})
    compiled = made.model_copy(update={"speed": made.speed.model_copy(update={"compile": True})})
    with pytest.raises(ConfigError, match="DoRA and compiled layers cannot be combined"):
        tiny_run.training(compiled)
