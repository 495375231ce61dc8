"""A checkpoint in parts: what several processes write is one checkpoint, or none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from surefit.checkpoint import manager, shards
from surefit.checkpoint.files import checkpoint_weights_sha256, file_names, find_checkpoint_damage, list_steps
from surefit.checkpoint.manager import CheckpointState, delete_old_checkpoints, latest_complete, load_checkpoint
from surefit.checkpoint.snapshot import Snapshot
from surefit.core.errors import MachineError, ModelError
from surefit.parallel.shard_ranges import FlatRange, read_flat_range, read_shape

PARTS = 3
WHOLE = {
    "a": torch.arange(35, dtype=torch.float32).view(7, 5),
    "b": torch.arange(2.0).bfloat16(),  # the last of three processes has nothing of it
    "c": torch.arange(6.0).view(1, 2, 3),
}
STEP = torch.tensor(4.0)


def flats(tensors: dict[str, torch.Tensor], number: int) -> dict[str, FlatRange]:
    """Rows, as FSDP deals them out."""
    found = {}
    for name, tensor in tensors.items():
        each = -(-len(tensor) // PARTS)
        rows = tensor[each * number : each * (number + 1)]
        first = min(len(tensor), each * number)
        found[name] = FlatRange(rows.reshape(-1), first * tensor[0].numel(), tuple(tensor.shape))
    return found


def state(number: int, add: float = 0) -> CheckpointState:
    weights = flats({name: tensor + add for name, tensor in WHOLE.items()}, number)
    optimizer = {f"exp_avg.{name}": flat for name, flat in flats(WHOLE, number).items()}
    if number == 0:
        optimizer["step.a"] = FlatRange(STEP.reshape(-1), 0, ())
    part = shards.build_checkpoint_shard(number, PARTS, weights, optimizer)
    return CheckpointState(
        shards.shard_values(weights), shards.shard_values(optimizer), {"counters": {"step": 7}}, part
    )


def saved(directory: Path, step: int = 7, add: float = 0) -> Path:
    place = manager.begin_sharded_checkpoint(directory, step)
    for number in range(PARTS):
        assert not shards.has_all_records(place, PARTS)
        manager.write_part(place, state(number, add))
    assert shards.has_all_records(place, PARTS)
    return manager.commit_sharded_checkpoint(place, step, state(0, add))


def test_what_all_have_written_is_read_whole(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert path == tmp_path / "step-7"
    assert sorted(file.name for file in path.iterdir()) == sorted(
        [f"{kind}-0000{n}-of-00003.safetensors" for kind in ("weights", "optimizer") for n in (1, 2, 3)]
        + ["trainer.json", "manifest.json"]
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-7"]
    loaded = load_checkpoint(path)
    assert loaded.part is None
    assert loaded.trainer == {"counters": {"step": 7}}
    assert set(loaded.weights) == set(WHOLE)
    for name, tensor in WHOLE.items():
        assert loaded.weights[name].dtype == tensor.dtype
        assert torch.equal(loaded.weights[name], tensor)
        assert torch.equal(loaded.optimizer[f"exp_avg.{name}"], tensor)
    assert torch.equal(loaded.optimizer["step.a"], STEP)
    assert latest_complete(tmp_path).step == 7
    assert "d" not in loaded.weights
    with pytest.raises(KeyError):
        loaded.weights["d"]


def test_every_number_is_written_exactly_once(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for name, tensor in WHOLE.items():
        found = torch.zeros(tensor.numel())
        for file in file_names("weights", PARTS):
            offset = state(int(file[8:13]) - 1).part.ranges[name][0]  # type: ignore[union-attr]
            part = load_file(path / file)[name]
            found[offset : offset + part.numel()] += 1
        assert (found == 1).all(), name


@pytest.mark.parametrize(("offset", "count"), [(0, 35), (0, 15), (3, 9), (14, 2), (15, 15), (30, 5), (34, 1), (35, 0)])
def test_a_range_of_a_tensor_is_read_alone(tmp_path: Path, offset: int, count: int) -> None:
    weights = load_checkpoint(saved(tmp_path)).weights
    assert torch.equal(read_flat_range(weights, "a", offset, count), WHOLE["a"].flatten()[offset : offset + count])
    assert torch.equal(read_flat_range(WHOLE, "a", offset, count), WHOLE["a"].flatten()[offset : offset + count])
    assert read_shape(weights, "a") == read_shape(WHOLE, "a") == (7, 5)


def test_restored_into_a_model_it_is_the_same(tmp_path: Path) -> None:
    path = saved(tmp_path)
    ours = {name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in WHOLE.items()}
    manager.restore_weights(load_checkpoint(path), ours, path)
    assert all(torch.equal(ours[name], tensor) for name, tensor in WHOLE.items())
    with pytest.raises(ModelError, match=r"c is float32 \(1, 2, 3\) in the checkpoint and missing in the model"):
        manager.restore_weights(load_checkpoint(path), {name: ours[name] for name in "ab"}, path)


def lost(path: Path) -> None:
    (path / "weights-00002-of-00003.safetensors").unlink()


def short(path: Path) -> None:
    os.truncate(path / "optimizer-00003-of-00003.safetensors", 40)


def flipped(path: Path) -> None:
    file = path / "weights-00002-of-00003.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def not_listed(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["optimizer-00002-of-00003.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("harm", "fault"),
    [
        (lost, "weights-00002-of-00003.safetensors is missing"),
        (short, "optimizer-00003-of-00003.safetensors has 40 bytes, but the manifest says"),
        (flipped, "the content of weights-00002-of-00003.safetensors has changed since it was written"),
        (not_listed, "manifest.json was not written by this version of SureFit"),
    ],
)
def test_a_damaged_part_is_named_and_the_checkpoint_passed_over(tmp_path: Path, harm: Any, fault: str) -> None:
    saved(tmp_path, 5)
    harm(saved(tmp_path, 6))
    latest = latest_complete(tmp_path)
    assert latest.step == 5
    assert [path.name for path, _ in latest.skipped] == ["step-6"]
    assert latest.skipped[0][1].startswith(fault)


def test_a_version_that_knows_no_parts_passes_it_over(tmp_path: Path) -> None:
    """Versions before knew format 1 alone, and looked at the manifest first."""
    assert json.loads((saved(tmp_path) / "manifest.json").read_text())["format"] == 2


@pytest.mark.parametrize("file", ["manifest.json", "weights-00002-of-00003.safetensors", "the directory"])
def test_one_that_was_deleted_meanwhile_is_an_error_of_the_system(tmp_path: Path, file: str) -> None:
    """`surefit evaluate --all-checkpoints` reads them while training deletes old ones."""
    path = saved(tmp_path)
    if file == "the directory":
        path.rename(tmp_path / "elsewhere")
    else:
        (path / file).unlink()
    with pytest.raises((OSError, SafetensorError)):
        load_checkpoint(path)


def test_ranges_that_leave_a_gap_are_refused(tmp_path: Path) -> None:
    place = manager.begin_sharded_checkpoint(tmp_path, 1)
    for number in (0, 1, 1):
        given = state(number)
        assert given.part is not None
        file = len(list(place.glob("weights*")))
        manager.write_part(
            place,
            CheckpointState(given.weights, given.optimizer, {}, shards.CheckpointShard(file, 3, given.part.ranges)),
        )
    path = manager.commit_sharded_checkpoint(place, 1, state(0))
    with pytest.raises(ModelError, match="the parts of a do not cover it exactly once"):
        load_checkpoint(path)


def test_what_identifies_the_weights_changes_with_them(tmp_path: Path) -> None:
    first, again, other = (saved(tmp_path / name, add=add) for name, add in (("1", 0), ("2", 0), ("3", 1)))
    assert checkpoint_weights_sha256(first) == checkpoint_weights_sha256(again) != checkpoint_weights_sha256(other)
    assert checkpoint_weights_sha256(tmp_path) is None
    (first / "manifest.json").write_text('{"format": 2, "files": {}}')
    assert checkpoint_weights_sha256(first) is None


def test_without_all_parts_there_is_no_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    place = manager.begin_sharded_checkpoint(tmp_path, 7)
    manager.write_part(place, state(0))
    manager.write_part(place, state(2))
    assert not shards.has_all_records(place, PARTS)
    assert latest_complete(tmp_path).step == 3
    assert manager.begin_sharded_checkpoint(tmp_path, 7) != place, (
        "a process that was left behind may still write into it"
    )
    assert not place.exists()


def test_a_newer_one_replaces_it_as_it_does_a_whole_one(tmp_path: Path) -> None:
    manager.save_checkpoint(tmp_path, 7, CheckpointState({"a": torch.ones(2)}, {}, {}))
    for add in (0, 1):
        path = saved(tmp_path, 7, add)
        assert torch.equal(load_checkpoint(path).weights["a"], WHOLE["a"] + add)
    manager.save_checkpoint(tmp_path, 7, CheckpointState({"a": torch.ones(2)}, {}, {}))
    assert load_checkpoint(path).weights["a"].tolist() == [1, 1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-7"]


def test_old_ones_are_deleted_whatever_they_are(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    manager.save_checkpoint(tmp_path, 2, CheckpointState({"a": torch.ones(2)}, {}, {}))
    saved(tmp_path, 3)
    assert delete_old_checkpoints(tmp_path, keep=1, best=[1]) == []
    assert [step for step, _ in list_steps(tmp_path)] == [1, 3]
    assert find_checkpoint_damage(tmp_path / "step-1", hashes=True) is None


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    place = manager.begin_sharded_checkpoint(tmp_path, 7)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_json", full)
        with pytest.raises(MachineError, match="No space left"):
            manager.write_part(place, state(1))
    assert list(place.iterdir()) == []
    place.rmdir()
    with pytest.raises(MachineError, match="this process does not see it"):
        manager.write_part(place, state(1))


def test_its_size_is_known_beforehand_and_a_copy_stays_a_part(tmp_path: Path) -> None:
    many = {f"layers.{n}.weight": FlatRange(torch.ones(300), 300, (2, 300)) for n in range(50)}
    moments = {f"exp_avg.{name}": flat for name, flat in many.items()}
    part = shards.build_checkpoint_shard(0, 1, many, moments)
    taken = Snapshot().take(CheckpointState(shards.shard_values(many), shards.shard_values(moments), {}, part))
    assert taken.part == part
    place = manager.begin_sharded_checkpoint(tmp_path, 1)
    manager.write_part(place, taken)
    written = sum(file.stat().st_size for file in manager.commit_sharded_checkpoint(place, 1, taken).iterdir())
    assert written < manager.estimate_checkpoint_bytes(taken) == pytest.approx(written, abs=30_000)
