"""A checkpoint in parts, seen from one process: written beside training, waited for, and written again after a fault.
Several real processes are in tests/distributed/test_parts.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surefit.checkpoint import manager, shards
from surefit.checkpoint.disk_guard import DiskGuard
from surefit.checkpoint.files import find_checkpoint_damage, list_steps
from surefit.core.errors import MachineError
from surefit.parallel.process_group import World
from surefit.parallel.shard_ranges import FlatRange
from surefit.train import sharded_checkpoint
from surefit.train.sharded_checkpoint import ShardedCheckpointWriter

WRITE = manager.write_part
COMMIT = manager.commit_sharded_checkpoint


def state(step: int, of: int = 1) -> manager.CheckpointState:
    held = {"a": FlatRange(torch.full((6,), float(step)), 0, (2, 3))}
    return manager.CheckpointState(
        shards.shard_values(held), {}, {"step": step}, shards.build_checkpoint_shard(0, of, held, {})
    )


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def together(tmp_path: Path, notes: list[str]) -> ShardedCheckpointWriter:
    def complete(step: int, write: Callable[[], object]) -> None:
        write()
        notes.append(f"complete {step} {threading.current_thread().name}")

    guard = DiskGuard(tmp_path, notes.append, sleep=lambda seconds: None)
    return ShardedCheckpointWriter(
        World(), tmp_path, guard, lambda: notes.append("room"), lambda: notes.append("ready"), complete
    )


def full(*given: Any) -> None:
    error = MachineError("cannot write: No space left on device")
    error.__cause__ = OSError(28, "No space left on device")
    raise error


def test_a_thread_makes_it_complete(together: ShardedCheckpointWriter, tmp_path: Path, notes: list[str]) -> None:
    together.finish()  # nothing is being written
    together.start(4, state(4))
    together.finish()
    assert notes == ["ready", "complete 4 step-4"]
    assert manager.load_checkpoint(tmp_path / "step-4").weights["a"].tolist() == [[4.0] * 3] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-4"]


@pytest.mark.parametrize("broken", ["write_part", "commit_sharded_checkpoint"])
def test_a_full_disk_is_waited_out(
    together: ShardedCheckpointWriter, tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    tries = []
    real = {"write_part": WRITE, "commit_sharded_checkpoint": COMMIT}[broken]

    def sometimes(*given: Any) -> Any:
        tries.append(1)
        return full() if len(tries) < 4 else real(*given)

    monkeypatch.setattr(sharded_checkpoint.manager, broken, sometimes)
    together.start(4, state(4))
    together.finish()
    assert len(tries) == 4
    assert [note.partition(" ")[0] for note in notes if note[0].isupper() or note.startswith("space")] == [
        "PAUSED:", "space",
    ]  # fmt: skip
    assert notes.count("room") == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-4"]
    assert find_checkpoint_damage(tmp_path / "step-4", hashes=True) is None


@pytest.mark.parametrize("broken", ["write_part", "commit_sharded_checkpoint"])
def test_any_other_fault_comes_out_at_the_next_meeting(
    together: ShardedCheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fails(*given: Any) -> None:
        raise RuntimeError("the writer broke")

    monkeypatch.setattr(sharded_checkpoint.manager, broken, fails)
    together.start(4, state(4))
    with pytest.raises(RuntimeError, match="the writer broke"):
        together.finish()
    together.finish()
    assert not list_steps(tmp_path)


def test_parts_that_never_come_keep_nobody(
    together: ShardedCheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the other of two processes had died, or wrote to another disk."""
    monkeypatch.setattr(sharded_checkpoint, "LAST_SECONDS", 0.1)
    monkeypatch.setattr(sharded_checkpoint, "SEEN_SECONDS", 0.1)
    monkeypatch.setattr(sharded_checkpoint.shards, "has_all_records", lambda place, of: False)
    together.start(4, state(4))
    together.end()
    assert not list(tmp_path.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("step-")]
    together.start(4, state(4))
    with pytest.raises(MachineError, match="cannot see all parts of step-4"):
        together.finish()


def test_whatever_ends_the_run_a_checkpoint_that_all_have_written_is_complete(
    together: ShardedCheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = threading.Event()

    def slow(place: Path, given: manager.CheckpointState) -> None:
        wait.wait(5)
        WRITE(place, given)

    monkeypatch.setattr(sharded_checkpoint.manager, "write_part", slow)
    together.start(4, state(4))
    assert not list_steps(tmp_path)
    threading.Timer(0.1, wait.set).start()
    together.end()
    assert find_checkpoint_damage(tmp_path / "step-4", hashes=True) is None
