"""What is changed where memory runs out, and that it can be told from everything else."""

from __future__ import annotations

from pathlib import Path

from surefit.config.oom_ladder import as_arguments, oom_changes, with_oom_changes
from surefit.config.resolve import ResolvedConfig, ValueOrigin, iter_config_values, write_resolved
from surefit.config.schema import SureFitConfig

CONFIG = SureFitConfig.model_validate(
    {
        "model": {"name_or_path": "any"},
        "data": {"train": "unused"},
        "train": {"global_batch_size": 12, "per_device_train_batch_size": 12},
        "hardware": {"count": 2},
        "output_dir": "unused",
    }
)
RESOLVED = ResolvedConfig(CONFIG, {dotted: ValueOrigin("default") for dotted, _ in iter_config_values(CONFIG)}, 1, 10)
MICRO = "train.per_device_train_batch_size"


def test_later_changes_come_on_top_and_nothing_else_counts_as_adapted(tmp_path: Path) -> None:
    assert oom_changes(RESOLVED) == {}
    once = with_oom_changes(RESOLVED, {MICRO: 6})
    twice = with_oom_changes(once, {MICRO: 3, "train.gradient_checkpointing": "selective"})
    assert oom_changes(once) == {MICRO: 6}
    assert oom_changes(twice) == {MICRO: 3, "train.gradient_checkpointing": "selective"}
    assert (once.gradient_accumulation_steps, twice.gradient_accumulation_steps) == (1, 2)
    assert twice.config.train.global_batch_size == 12
    assert RESOLVED.config.train.per_device_train_batch_size == 12
    write_resolved(twice, tmp_path / "resolved.yaml")
    written = (tmp_path / "resolved.yaml").read_text(encoding="utf-8")
    assert "per_device_train_batch_size: 3  # auto: adapted after out of memory" in written


def test_arguments_are_what_set_reads() -> None:
    assert as_arguments({"train.gradient_checkpointing": "selective"}) == "--set train.gradient_checkpointing=selective"
