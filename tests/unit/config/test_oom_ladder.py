"""What is changed where memory runs out, and that it can be told from everything else."""

from __future__ import annotations

from pathlib import Path

from surefit.config.oom_ladder import adaptations, adapted, as_arguments
from surefit.config.resolve import Origin, Resolved, leaves, write_resolved
from surefit.config.schema import Config

CONFIG = Config.model_validate(
    {
        "model": {"name_or_path": "any"},
        "data": {"train": "unused"},
        "train": {"global_batch_size": 12, "per_device_train_batch_size": 12},
        "hardware": {"count": 2},
        "output_dir": "unused",
    }
)
RESOLVED = Resolved(CONFIG, {dotted: Origin("default") for dotted, _ in leaves(CONFIG)}, 1, 10)
MICRO = "train.per_device_train_batch_size"


def test_later_changes_come_on_top_and_nothing_else_counts_as_adapted(tmp_path: Path) -> None:
    assert adaptations(RESOLVED) == {}
    once = adapted(RESOLVED, {MICRO: 6})
    twice = adapted(once, {MICRO: 3, "train.gradient_checkpointing": "selective"})
    assert adaptations(once) == {MICRO: 6}
    assert adaptations(twice) == {MICRO: 3, "train.gradient_checkpointing": "selective"}
    assert (once.gradient_accumulation_steps, twice.gradient_accumulation_steps) == (1, 2)
    assert twice.config.train.global_batch_size == 12
    assert RESOLVED.config.train.per_device_train_batch_size == 12
    write_resolved(twice, tmp_path / "resolved.yaml")
    written = (tmp_path / "resolved.yaml").read_text(encoding="utf-8")
    assert "per_device_train_batch_size: 3  # auto: adapted after out of memory" in written


def test_arguments_are_what_set_reads() -> None:
    assert as_arguments({"train.gradient_checkpointing": "selective"}) == "--set train.gradient_checkpointing=selective"
