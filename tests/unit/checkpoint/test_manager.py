"""A checkpoint is complete or not there: kills, damage and a full disk included."""

import json
import os
import pickletools
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import kill_nine
import pytest
import torch
from safetensors import SafetensorError
from small_disk import room

from surefit.checkpoint import manager
from surefit.checkpoint.files import find_checkpoint_damage, list_steps
from surefit.checkpoint.manager import (
    CheckpointState,
    delete_old_checkpoints,
    latest_complete,
    load_checkpoint,
    save_checkpoint,
)
from surefit.core.errors import MachineError, ModelError


def state(step: int = 0, size: int = 100) -> CheckpointState:
    weights = {"a.weight": torch.arange(size, dtype=torch.float32) + step, "b.weight": torch.ones(2, 3).bfloat16()}
    return CheckpointState(weights, {"exp_avg.a.weight": torch.full((size,), 0.5)}, {"counters": {"step": step}})


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 7, state(7))
    assert path == tmp_path / "step-7"
    loaded = load_checkpoint(path)
    for theirs, ours in ((loaded.weights, state(7).weights), (loaded.optimizer, state(7).optimizer)):
        assert theirs.keys() == ours.keys()
        for name, tensor in ours.items():
            assert theirs[name].dtype == tensor.dtype
            assert torch.equal(theirs[name], tensor)
    assert loaded.trainer == {"counters": {"step": 7}}
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 7
    assert manifest["versions"]["torch"] == metadata.version("torch")
    assert set(manifest["files"]) == {"weights.safetensors", "optimizer.safetensors", "trainer.json"}


def test_nothing_in_it_is_a_pickle(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, state())
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json", "optimizer.safetensors", "trainer.json", "weights.safetensors",
    ]  # fmt: skip
    for file in path.iterdir():
        assert not file.read_bytes().startswith((b"PK", b"\x80"))  # a zip of pickles, a pickle
        with pytest.raises(ValueError):  # noqa: PT011 - whatever pickletools finds wrong first
            list(pickletools.genops(file.read_bytes()))


def test_the_newest_complete_one_is_found(tmp_path: Path) -> None:
    assert latest_complete(tmp_path / "none").path is None
    for step in (5, 10, 100):
        save_checkpoint(tmp_path, step, state(step))
    found = latest_complete(tmp_path)
    assert (found.path, found.step, found.skipped) == (tmp_path / "step-100", 100, [])


def cut_short(path: Path) -> None:
    (path / "optimizer.safetensors").write_bytes((path / "optimizer.safetensors").read_bytes()[:-1])


def one_bit_flipped(path: Path) -> None:
    content = bytearray((path / "weights.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "weights.safetensors").write_bytes(content)


def a_file_lost(path: Path) -> None:
    (path / "trainer.json").unlink()


def manifest_lost(path: Path) -> None:
    (path / "manifest.json").unlink()


def manifest_broken(path: Path) -> None:
    (path / "manifest.json").write_text('{"files": []}')


def of_another_program(path: Path) -> None:
    (path / "manifest.json").write_text('{"format": 99, "step": 2, "files": {}}')


def emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut_short, "bytes, but the manifest says"),
        (one_bit_flipped, "has changed since it was written"),
        (a_file_lost, "trainer.json is missing"),
        (manifest_lost, "manifest.json is missing"),
        (manifest_broken, "manifest.json is missing or unreadable"),
        (of_another_program, "not written by this version"),
        (emptied, "manifest.json is missing"),
    ],
)
def test_a_damaged_one_is_skipped_and_named(tmp_path: Path, harm, words: str) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, state(step))
    harm(tmp_path / "step-2")
    found = latest_complete(tmp_path)
    assert found.step == 1
    assert [path.name for path, _ in found.skipped] == ["step-2"]
    assert words in found.skipped[0][1]


def test_pruning_counts_only_complete_ones_and_leaves_damaged_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, step, state(step))
    cut_short(tmp_path / "step-4")
    assert delete_old_checkpoints(tmp_path, keep=2) == []
    assert [step for step, _ in list_steps(tmp_path)] == [2, 3, 4]


def test_pruning_keeps_the_best_and_ignores_what_the_run_has_passed_over(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 9):
        save_checkpoint(tmp_path, step, state(step))
    assert delete_old_checkpoints(tmp_path, keep=1, newest=4, best=[2, 77]) == []
    # 9 is damaged in a way that only its hashes show: the run resumed before it. It must not make 4 the surplus one.
    assert [step for step, _ in list_steps(tmp_path)] == [2, 4, 9]


def test_a_save_that_lost_its_name_to_a_kill_gets_it_back(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, state(1))
    (tmp_path / "step-1").rename(tmp_path / ".step-1.4711.old")
    save_checkpoint(tmp_path, 2, state(2))
    assert [step for step, _ in list_steps(tmp_path)] == [1, 2]
    assert find_checkpoint_damage(tmp_path / "step-1", hashes=True) is None


def test_a_full_disk_is_known_by_every_librarys_words() -> None:
    def words(error: type[Exception]) -> None:
        with manager.disk_errors():
            raise error("No space left on device (os error 28)")

    for error in (SafetensorError, Exception):
        with pytest.raises(OSError, match="No space left") as caught:
            words(error)
        assert caught.value.errno == 28
    with pytest.raises(RuntimeError):
        words(RuntimeError)


def test_what_cannot_be_deleted_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, state(step))
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)
    stuck = delete_old_checkpoints(tmp_path, keep=1)
    assert [path.name.startswith(".step-1.") for path in stuck] == [True]
    monkeypatch.undo()
    assert delete_old_checkpoints(tmp_path, keep=1) == []
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_a_checkpoint_of_the_same_step_replaces_the_old(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, state(1))
    cut_short(tmp_path / "step-1")
    save_checkpoint(tmp_path, 1, state(2))
    assert latest_complete(tmp_path).step == 1
    assert load_checkpoint(tmp_path / "step-1").trainer["counters"]["step"] == 2


def test_kill_9_while_saving_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, kill_nine.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 8
    save_checkpoint(tmp_path, latest_complete(tmp_path).step + 1, state())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "a later save clears leftovers"


def test_a_full_disk_is_an_error_of_the_machine_and_harms_nothing(small_disk: Path) -> None:
    room(small_disk, 2**20)
    save_checkpoint(small_disk, 1, state(1))
    (small_disk / "hog").write_bytes(bytes(900_000))
    with pytest.raises(MachineError, match="No space left on device") as caught:
        save_checkpoint(small_disk, 2, state(2, 100_000))
    assert caught.value.exit_code == 3
    assert "free some space" in str(caught.value.help)
    assert sorted(path.name for path in small_disk.iterdir()) == ["hog", "step-1"]
    assert find_checkpoint_damage(small_disk / "step-1", hashes=True) is None
    (small_disk / "hog").unlink()
    save_checkpoint(small_disk, 2, state(2, 1000))
    assert latest_complete(small_disk).step == 2


def test_restore_refuses_another_models_parameters(tmp_path: Path) -> None:
    ours = {
        "a.weight": torch.nn.Parameter(torch.zeros(100)),
        "b.weight": torch.nn.Parameter(torch.zeros(2, 3).bfloat16()),
    }
    manager.restore_weights(state(3), ours, tmp_path)
    assert torch.equal(ours["a.weight"], state(3).weights["a.weight"])
    with pytest.raises(ModelError, match=r"b\.weight is bfloat16 \(2, 3\) in the checkpoint and missing in the model"):
        manager.restore_weights(state(), {"a.weight": ours["a.weight"]}, tmp_path)
    with pytest.raises(ModelError, match=r"a\.weight is float32 \(100,\) in the checkpoint and float32 \(5,\)"):
        manager.restore_weights(state(), ours | {"a.weight": torch.nn.Parameter(torch.zeros(5))}, tmp_path)


def test_changed_software_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint(tmp_path, 1, state())
    assert manager.changed_versions(path) == []
    now = manager.versions()
    monkeypatch.setattr(manager, "versions", lambda: now | {"torch": "9.9", "threads": 64})
    assert manager.changed_versions(path) == [
        f"torch: {now['torch']}, now 9.9", f"threads: {now['threads']}, now 64",
    ]  # fmt: skip
