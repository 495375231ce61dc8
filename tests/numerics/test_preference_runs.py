"""Runs on pairs: the stored reference, the first batch as a certificate, resume, metrics."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors

from surefit.core.errors import ConfigError, GateError, Interrupted, MachineError
from surefit.core.rundir import read_jsonl
from surefit.train import first_batch, loop, reference
from surefit.train.first_batch import closed_form

pytestmark = pytest.mark.usefixtures("one_thread")
DPO = {"name": "dpo", "beta": 0.1}
TIMES = ("seconds", "tokens_per_second", "mfu", "disk_free_bytes")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The model's own dropout: the reference has none, so that training pairs has none either.
    return tiny_run.save_base(tmp_path_factory.mktemp("model") / "base", attention_dropout=0.1)


def settings(base: Path, out: Path, objective: dict[str, Any] = DPO, **changes: Any) -> Any:
    return tiny_run.config(base, out, objective=objective, **({"max_steps": 8} | changes))


def stored(out: Path) -> dict[str, np.ndarray]:
    return load_file(out / "reference.safetensors")


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMES} for line in read_jsonl(out / "metrics.jsonl")]


def assert_same(one: Path, two: Path) -> None:
    assert lines_of(one) == lines_of(two)
    ours, theirs = (load_tensors(out / "adapter" / "adapter_model.safetensors") for out in (one, two))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours.keys() | theirs.keys())
    ours_stored, theirs_stored = stored(one), stored(two)
    assert all(np.array_equal(ours_stored[key], theirs_stored[key], equal_nan=True) for key in ("train", "eval"))


@pytest.mark.parametrize(
    "objective",
    [
        DPO,
        DPO | {"label_smoothing": 0.1, "sft_weight": 0.5},
        DPO | {"loss_type": "ipo"},
        {"name": "dpo", "loss_type": "sigmoid_norm", "beta": 5.0},
        {"name": "orpo", "beta": 0.1},
        {"name": "simpo", "beta": 2.0},
    ],
    ids=["sigmoid", "smoothed rpo", "ipo", "sigmoid_norm", "orpo", "simpo"],
)
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_run_learns_the_rule_and_starts_at_its_known_loss(
    base: Path, tmp_path: Path, objective: dict[str, Any], packing: bool
) -> None:
    job = tiny_run.training(settings(base, tmp_path, objective, packing=packing, max_steps=24, num_train_epochs=8.0))
    result = job.fit()
    first = json.loads((tmp_path / "first_batch.json").read_text())
    assert first["passed"]
    form = closed_form(job.config.objective)
    if form is not None and not objective.get("sft_weight"):
        assert first["expected"] == form
        assert first["loss"] == pytest.approx(form, abs=1e-6 * max(1, form))
    assert any("first batch" in note for note in result.notes)
    lines = [line for line in lines_of(tmp_path) if "loss" in line]
    assert lines[0]["loss"] == pytest.approx(first["expected"], rel=0.05)
    names = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen"}
    assert names | {"logps/rejected"} <= lines[0].keys()
    assert ("nll" in lines[0]) == (objective["name"] == "orpo" or "sft_weight" in objective)
    held_out = [line for line in lines_of(tmp_path) if "eval_loss" in line][-1]
    assert held_out["eval_rewards/accuracies"] > 0.8
    assert "eval_perplexity" not in held_out
    assert (tmp_path / "reference.safetensors").exists() == (objective["name"] == "dpo")


def test_the_reference_is_the_model_of_step_0(base: Path, tmp_path: Path) -> None:
    """Continued from an adapter it is the adapter, and not the base: LLaMA-Factory takes the base without a word."""
    tiny_run.training(settings(base, tmp_path / "sft", None, max_steps=12)).fit()
    adapter = {"start_from": str(tmp_path / "sft" / "adapter")}
    for out, changes in {"fresh": {}, "continued": {"adapter": adapter}, "full": {"kind": "full"}}.items():
        tiny_run.training(settings(base, tmp_path / out, max_steps=2, **changes)).fit()
        assert json.loads((tmp_path / out / "first_batch.json").read_text())["offset"] < 1e-6
    fresh, continued, full = (stored(tmp_path / out)["train"] for out in ("fresh", "continued", "full"))
    assert np.allclose(fresh, full, atol=1e-4, equal_nan=True)
    seen = ~np.isnan(fresh).any(axis=1)
    assert seen.sum() == 16  # two steps of eight pairs: no other is computed
    assert np.abs(fresh - continued)[seen].max() > 1


@pytest.mark.parametrize("when", ["in the pass", "in the steps"])
def test_killed_and_resumed_equals_uninterrupted(base: Path, tmp_path: Path, when: str, monkeypatch: Any) -> None:
    """kill -9 leaves what was saved: in a pass after every micro batch here, in the steps a checkpoint every four."""
    monkeypatch.setattr(reference, "SAVED_EVERY", 4)
    tiny_run.training(settings(base, tmp_path / "straight")).fit()

    class Killed(BaseException):
        pass

    calls = 0
    inner = reference.StoredReference._measure

    def killed_in_the_pass(self: Any, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise Killed
        return inner(self, *given)

    def killed_in_step_6(progress: Any) -> None:
        if when == "in the steps" and progress.step == 6:
            raise Killed

    with monkeypatch.context() as patched:
        if when == "in the pass":
            patched.setattr(reference.StoredReference, "_measure", killed_in_the_pass)
        job = tiny_run.training(settings(base, tmp_path / "killed"), on_progress=killed_in_step_6)
        with pytest.raises(Killed):
            job.fit()
    known = (~np.isnan(stored(tmp_path / "killed")["train"]).any(axis=1)).sum()
    assert known == (12 if when == "in the pass" else 24)
    torch.manual_seed(9)
    tiny_run.training(settings(base, tmp_path / "killed")).fit(resume=True)
    assert_same(tmp_path / "straight", tmp_path / "killed")


@pytest.mark.slow
def test_kill_nine_in_the_pass_and_in_the_steps(base: Path, tmp_path: Path) -> None:
    """The same in a process of its own, with the signal that no process can catch."""
    tiny_run.training(settings(base, tmp_path / "straight")).fit()
    command = [sys.executable, "-u", tiny_run.__file__, str(base), str(tmp_path / "killed"), "--pairs"]
    for until, flags in (("phase reference", []), ("step 6", ["--resume"])):
        with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert any(line.strip() == until for line in process.stdout)
            process.kill()
    assert subprocess.run([*command, "--resume"], check=False, capture_output=True).returncode == 0
    assert_same(tmp_path / "straight", tmp_path / "killed")


def test_a_signal_in_the_pass_saves_it(base: Path, tmp_path: Path, monkeypatch: Any) -> None:
    inner = reference.StoredReference._measure

    def signaled(self: Any, *given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return inner(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(reference.StoredReference, "_measure", signaled)
        job = tiny_run.training(settings(base, tmp_path))
        with pytest.raises(Interrupted):
            job.fit()
    assert 0 < (~np.isnan(stored(tmp_path)["train"]).any(axis=1)).sum() < 24
    assert tiny_run.training(settings(base, tmp_path)).fit(resume=True).counters.step == 8


def test_a_stale_reference_is_never_used(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    tiny_run.training(settings(base, out, max_steps=4, every=2)).fit()
    before = stored(out)["train"]
    other = tiny_run.save_base(tmp_path / "other", attention_dropout=0.1, rope_theta=500.0)
    model = tiny_run.llama(seed=3, attention_dropout=0.1)
    model.save_pretrained(other)
    # A start that is no resume computes it anew, whatever lies there.
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "reference.safetensors").write_bytes((out / "reference.safetensors").read_bytes())
    result = tiny_run.training(settings(other, tmp_path / "new", max_steps=2)).fit()
    assert any("of another run" in note for note in result.notes)
    assert np.nanmax(np.abs(stored(tmp_path / "new")["train"] - before)) > 0.5
    # The base was replaced under a run: its checkpoints are another model's.
    model.save_pretrained(base_copy := tmp_path / "copy")
    tiny_run.tokenizer().save_pretrained(base_copy)
    tiny_run.training(settings(base_copy, tmp_path / "under", max_steps=4, every=2)).fit()
    tiny_run.llama(seed=4, attention_dropout=0.1).save_pretrained(base_copy)
    with pytest.raises(ConfigError) as error:
        tiny_run.training(settings(base_copy, tmp_path / "under", max_steps=4, every=2)).fit(resume=True)
    assert Path(error.value.path or "") == tmp_path / "under" / "reference.safetensors"


def test_other_rows_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    tiny_run.training(settings(base, tmp_path, max_steps=4, every=2)).fit()
    with pytest.raises(ConfigError) as error:
        tiny_run.training(settings(base, tmp_path, max_steps=4, every=2), tiny_run.pairs(24, seed=7)).fit(resume=True)
    assert error.value.field == "data.train"
    with pytest.raises(ConfigError) as error:
        tiny_run.training(settings(base, tmp_path, DPO | {"beta": 0.2}, max_steps=4, every=2)).fit(resume=True)
    assert error.value.field == "objective.beta"


@pytest.mark.parametrize("damage", ["cut", "changed", "of another model"])
def test_a_damaged_reference_is_noticed(base: Path, tmp_path: Path, damage: str, monkeypatch: Any) -> None:
    """A file that cannot be read, or was changed, is computed again; numbers that are not the model's stop the run
    before any step."""
    tiny_run.training(settings(base, tmp_path / "good", max_steps=2)).fit()
    out = tmp_path / "bad"
    out.mkdir()
    file = out / "reference.safetensors"
    content = (tmp_path / "good" / "reference.safetensors").read_bytes()
    if damage != "of another model":
        file.write_bytes(content[:-8] if damage == "cut" else content[:-6] + b"\x01" + content[-5:])
        result = tiny_run.training(settings(base, out, max_steps=2)).fit()
        assert any("damaged" in note for note in result.notes)
        return
    from safetensors import safe_open

    with safe_open(tmp_path / "good" / "reference.safetensors", framework="numpy") as opened:
        metadata = opened.metadata()
    numbers = stored(tmp_path / "good")
    numbers["train"] += np.float32(0.01)
    save_file(numbers, file, metadata | {"sha256": reference._sha256(numbers)})
    with pytest.raises(GateError) as error:
        tiny_run.training(settings(base, out, max_steps=2)).fit()
    assert error.value.field == "objective"
    assert not json.loads((out / "first_batch.json").read_text())["passed"]
    assert not (out / "checkpoints").exists()


def test_another_process_that_is_off_stops_all(base: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(first_batch, "all_gather", lambda value, world: [value, 0.5])
    with pytest.raises(GateError):
        tiny_run.training(settings(base, tmp_path, max_steps=1)).fit()
    assert json.loads((tmp_path / "first_batch.json").read_text())["offset"] == 0.5


def test_too_little_memory_for_the_check_is_explained(base: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def out_of_memory(*given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loop, "check_first_batch", out_of_memory)
    with pytest.raises(MachineError, match="the first batch"):
        tiny_run.training(settings(base, tmp_path, max_steps=1)).fit()


def test_dropout_that_comes_back_stops_the_run(base: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(loop, "switch_off_dropout", lambda model: 0)
    with pytest.raises(GateError) as error:
        tiny_run.training(settings(base, tmp_path)).fit()
    assert error.value.field == "objective"


@pytest.mark.parametrize("setting", ["dropout", "noise", "truncated", "prepared"])
def test_what_cannot_be_combined_is_refused(base: Path, tmp_path: Path, setting: str) -> None:
    changed = settings(base, tmp_path)
    section, update, field = {
        "dropout": ("lora", {"lora_dropout": 0.05}, "lora.lora_dropout"),
        "noise": ("train", {"neftune_noise_alpha": 5.0}, "train.neftune_noise_alpha"),
        "truncated": ("data", {"too_long": "truncate"}, "data.too_long"),
        "prepared": ("data", {"tokenized": "shards"}, "data.tokenized"),
    }[setting]
    changed = changed.model_copy(update={section: getattr(changed, section).model_copy(update=update)})
    with pytest.raises(ConfigError) as error:
        tiny_run.training(changed)
    assert error.value.field == field


def test_the_certificate_of_ipo_is_25(base: Path, tmp_path: Path) -> None:
    tiny_run.training(settings(base, tmp_path, DPO | {"loss_type": "ipo"}, max_steps=1)).fit()
    assert json.loads((tmp_path / "first_batch.json").read_text())["expected"] == pytest.approx(25.0)
    assert closed_form(settings(base, tmp_path).objective) == math.log(2)
