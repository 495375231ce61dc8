"""A snapshot does not change with what it was taken of."""

import pytest
import torch

from surefit.checkpoint.manager import CheckpointState, estimate_checkpoint_bytes, save_checkpoint
from surefit.checkpoint.snapshot import Snapshot


def test_it_is_a_copy_in_buffers_that_are_used_again() -> None:
    weights = {"a": torch.nn.Parameter(torch.arange(6.0).view(2, 3)), "b": torch.ones(4, dtype=torch.bfloat16)}
    optimizer = {"step.a": torch.tensor(3.0), "exp_avg.a": torch.ones(3, 2).T}
    snapshot = Snapshot()
    taken = snapshot.take(CheckpointState(weights, optimizer, {"n": 1}))
    with torch.no_grad():
        weights["a"].mul_(7)
        optimizer["step.a"] += 1
    assert torch.equal(taken.weights["a"], torch.arange(6.0).view(2, 3))
    assert taken.weights["b"].dtype == torch.bfloat16
    assert taken.optimizer["step.a"].item() == 3
    assert taken.optimizer["exp_avg.a"].is_contiguous()
    assert not taken.weights["a"].requires_grad
    again = snapshot.take(CheckpointState(weights, optimizer, {"n": 2}))
    assert again.weights["a"].data_ptr() == taken.weights["a"].data_ptr()
    assert torch.equal(again.weights["a"], weights["a"])
    snapshot.take(CheckpointState({"a": torch.zeros(5)}, {}, {}))
    assert len(snapshot._buffers) == 1


def test_its_size_is_known_beforehand(tmp_path) -> None:
    state = CheckpointState(
        {f"layers.{n}.weight": torch.ones(300, 7) for n in range(20)}, {"m": torch.ones(9)}, {"n": 1}
    )
    written = sum(file.stat().st_size for file in save_checkpoint(tmp_path, 1, state).iterdir())
    assert written < estimate_checkpoint_bytes(state) == pytest.approx(written, abs=20_000)
