"""The worst case first: it finds what would stop the run later, and leaves nothing behind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch

from surefit.checkpoint import manager
from surefit.core.errors import GateError, MachineError
from surefit.core.rundir import read_json, read_jsonl
from surefit.train import dry_pass as module
from surefit.train.dry_pass import DryPassResult
from surefit.train.loop import Trainer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_base(tmp_path_factory.mktemp("model") / "base")


def files_in(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_run_with_it_equals_one_without(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, packing: bool
) -> None:
    """With dropout (0.1 on the LoRA factors), accumulation over two micro batches and weight decay."""
    runs = []
    for name in ("with", "without"):
        settings = tiny_run.config(base, tmp_path / name, kind, dtype, packing=packing, max_steps=4, weight_decay=0.1)
        training = tiny_run.training(settings)
        if name == "without":
            monkeypatch.setattr(Trainer, "dry_pass", lambda self: None)
        training.fit()
        lines = [line for line in read_jsonl(tmp_path / name / "metrics.jsonl") if "loss" in line]
        learnt = [(line["loss"], line["grad_norm"]) for line in lines]
        runs.append((learnt, training.model.state_dict(), training.optimizer.tensors()))
    (losses, weights, optimizer), (other_losses, other_weights, other_optimizer) = runs
    assert losses == other_losses
    for ours, theirs in ((weights, other_weights), (optimizer, other_optimizer)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert (tmp_path / "with" / "dry_pass.json").exists()
    assert not (tmp_path / "without" / "dry_pass.json").exists()


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_it_leaves_nothing_behind(base: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "not" / "there"
    training = tiny_run.training(tiny_run.config(base, out, kind))
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    torch.manual_seed(7)
    random = torch.random.get_rng_state()
    training.dry_pass(write=False)
    assert files_in(tmp_path) == set()
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in training.model.state_dict().items())
    assert all(p.grad is None for p in training.model.parameters())
    assert not any(name.startswith("exp_avg") for name in training.optimizer.tensors())
    assert training.model.training


def test_it_runs_the_fullest_batch_and_writes_down_what_that_took(base: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    training = tiny_run.training(tiny_run.config(base, tmp_path), on_note=notes.append)
    training.dry_pass()
    lengths = sorted((len(ids) for ids, _ in tiny_run.rows()), reverse=True)
    held_out = sorted((len(ids) for ids, _ in tiny_run.rows(6, seed=1)), reverse=True)
    record = read_json(tmp_path / "dry_pass.json")
    assert record["tokens"] == sum(lengths[:4])
    assert record["eval_tokens"] == sum(held_out[:4])
    assert record["micro_batches"] == 2  # 8 examples, 4 at a time: gradients stay
    assert record["eval_batches"] == 2
    assert record["loss"] == pytest.approx(math.log(64), rel=0.1)
    assert set(record["phases"]) == {"dry step", "dry eval", "dry save", "dry load"}
    trained = sum(p.numel() for p in training.optimizer.parameters.values())
    assert record["checkpoint_bytes"] > 12 * trained  # weights and two moments in float32
    assert [event["event"] for event in read_jsonl(tmp_path / "events.jsonl")] == ["dry pass"]
    assert notes[0].startswith(f"dry pass OK: the largest batch ({sum(lengths[:4])} tokens) took ")


def test_its_line_compares_with_the_plan() -> None:
    gib = 1024**3
    on_gpu = {"dry step": {"allocated": int(21.3 * gib), "reserved": 22 * gib, "held": 1}}
    found = DryPassResult(8192, 1, 2.0, 1.9, 100, 0.2, 3, 0.3, 0.1, 168 * 1024**2, on_gpu)
    plan = {"estimate": {"phases": [{"name": "load", "allocated_bytes": 30 * gib},
                                    {"name": "first step", "allocated_bytes": int(22.1 * gib)},
                                    {"name": "step", "allocated_bytes": 30 * gib}]}}  # fmt: skip
    assert found.text(plan) == (
        "dry pass OK: the largest batch (8,192 tokens) took 21.30 GiB of 22.10 GiB planned, 1.9 s; "
        "a checkpoint takes 0.3 s and 168.0 MiB"
    )
    assert "21.30 GiB, 1.9 s" in found.text(None)
    on_cpu = DryPassResult(8192, 1, 2.0, 1.9, 0, 0.0, 0, 0.3, 0.1, 10, {"dry step": {"resident": gib}})
    plan = {"estimate": {"first_step": {"low_bytes": gib, "high_bytes": 2 * gib}, "phases": []}}
    assert "1.00 GiB of RAM (1.00 GiB to 2.00 GiB planned), 1.9 s" in on_cpu.text(plan)


@pytest.mark.parametrize(
    ("took", "where"), [(0.9, "below"), (1.0, None), (1.5, None), (2.0, None), (2.01, "above")], ids="M1-{}".format
)
def test_a_worst_case_outside_the_plan_is_said(took: float, where: str | None) -> None:
    gib = 1024**3
    found = DryPassResult(8192, 1, 2.0, 1.9, 0, 0.0, 0, 0.3, 0.1, 10, {"dry step": {"resident": int(took * gib)}})
    plan = {"estimate": {"first_step": {"low_bytes": gib, "high_bytes": 2 * gib}, "phases": []}}
    assert (found.against(plan), found.warning(plan) is None) == (where, where is None)
    assert found.against(None) is None
    on_gpu = DryPassResult(8192, 1, 2.0, 1.9, 0, 0.0, 0, 0.3, 0.1, 10, {"dry step": {"allocated": int(took * gib)}})
    plan = {"estimate": {"phases": [{"name": "first step", "allocated_bytes": int(1.5 * gib)}]}}
    assert on_gpu.against(plan) == ("below" if took < 1.4 else "above" if took > 1.6 else None)


def test_a_loss_that_is_not_finite_stops_the_run_before_its_first_step(base: Path, tmp_path: Path) -> None:
    training = tiny_run.training(tiny_run.config(base, tmp_path))
    with torch.no_grad():
        training.model.get_input_embeddings().weight.fill_(math.nan)
    with pytest.raises(GateError, match=r"the fullest batch \(73 tokens\) is nan before the first step"):
        training.fit()
    assert not (tmp_path / "metrics.jsonl").exists() or read_jsonl(tmp_path / "metrics.jsonl") == []
    assert not (tmp_path / "checkpoints").exists()


def test_a_disk_that_gives_back_something_else(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = manager.load_checkpoint

    def corrupted(path: Path) -> manager.CheckpointState:
        state = load(path)
        name = sorted(state.weights)[0]
        return manager.CheckpointState(state.weights | {name: state.weights[name] + 1}, state.optimizer, state.trainer)

    monkeypatch.setattr(module.manager, "load_checkpoint", corrupted)
    with pytest.raises(MachineError, match="1 tensors of a checkpoint differ"):
        tiny_run.training(tiny_run.config(base, tmp_path)).fit()
    assert not (tmp_path / "checkpoints").exists()


def test_without_held_out_rows_nothing_is_measured(base: Path, tmp_path: Path) -> None:
    training = tiny_run.training(tiny_run.config(base, tmp_path), eval_rows=[])
    training.dry_pass()
    assert read_json(tmp_path / "dry_pass.json")["eval_tokens"] == 0


def test_a_resumed_run_has_it_before_it_restores_anything(base: Path, tmp_path: Path) -> None:
    settings = tiny_run.config(base, tmp_path)
    tiny_run.training(settings).fit()
    (tmp_path / "adapter").rename(tmp_path / "first")
    seen: list[Any] = []
    training = tiny_run.training(settings, on_progress=seen.append)
    result = training.fit(resume=True)
    assert result.resumed_from == 12
    assert seen == []
    events = [event["event"] for event in read_jsonl(tmp_path / "events.jsonl")]
    assert events == ["dry pass", "memory", "dry pass", "resumed", "memory"]
    same = [np.fromfile(tmp_path / name / "adapter_model.safetensors", np.uint8) for name in ("first", "adapter")]
    assert np.array_equal(*same)
