"""The loop: what it writes, how it stops, what it refuses."""

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from transformers import AutoTokenizer

from surefit.checkpoint.files import list_steps
from surefit.checkpoint.manager import latest_complete
from surefit.core.errors import ConfigError, DataError, GateError, Interrupted, MachineError, ModelError
from surefit.core.rundir import read_jsonl
from surefit.model.load import load_model
from surefit.train.loop import Trainer
from surefit.train.progress import TrainingProgress


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_base(tmp_path_factory.mktemp("model") / "base")


def poisoned(training: Trainer, bad: Callable[[int], bool]) -> Trainer:
    """Make the loss NaN in the steps (counted from 1) for which `bad` holds."""
    layer = training.model.get_submodule("base_model.model.model.norm")
    layer.register_forward_hook(
        lambda module, inputs, output: output * math.nan if bad(training.counters.step + 1) else output
    )
    return training


def send(number: signal.Signals, at: int) -> Callable[[TrainingProgress], None]:
    return lambda progress: os.kill(os.getpid(), number) if progress.step == at else None


def test_a_whole_run(base: Path, tmp_path: Path) -> None:
    seen: list[TrainingProgress] = []
    result = tiny_run.training(tiny_run.config(base, tmp_path, every=5), on_progress=seen.append).fit()
    assert result.output == tmp_path / "adapter"
    assert (result.counters.step, result.counters.rejected, result.resumed_from) == (12, 0, None)
    assert result.counters.tokens == 4 * sum(len(ids) for ids, _ in tiny_run.rows())
    assert [progress.step for progress in seen] == list(range(1, 13))
    assert seen[-1].epoch == 4.0
    assert 0 <= seen[-1].eta_seconds < 60  # the last checkpoint and measurement are still to come
    assert "loss" in seen[-1].text
    assert "held-out" in seen[-1].text
    assert [progress.eval_step for progress in seen] == [*[None] * 5, *[5] * 5, 10, 10]
    assert [step for step, _ in list_steps(tmp_path / "checkpoints")] == [10, 12]
    assert AutoTokenizer.from_pretrained(result.output).pad_token_id == 0
    assert (result.output / "surefit.json").is_file()
    assert not (result.output / "README.md").exists()
    assert result.eval_loss == pytest.approx(seen[-1].eval_loss, rel=0.2)


def test_the_loss_falls_on_rows_that_can_be_learnt(base: Path, tmp_path: Path) -> None:
    seen: list[TrainingProgress] = []
    settings = tiny_run.config(base, tmp_path, kind="full", num_train_epochs=20.0)
    training = tiny_run.training(settings, on_progress=seen.append)
    result = training.fit()
    assert seen[0].loss == pytest.approx(math.log(64), rel=0.1)
    assert seen[-1].loss < 0.5 * seen[0].loss
    assert result.output == tmp_path / "model"
    reloaded = load_model(settings.model.model_copy(update={"name_or_path": str(result.output)}), tiny_run.CPU)
    trained = dict(training.model.named_parameters())
    assert all(torch.equal(p, trained[name]) for name, p in reloaded.named_parameters())


def test_a_whole_model_knows_the_token_that_ends_its_turns(base: Path, tmp_path: Path) -> None:
    training = tiny_run.training(tiny_run.config(base, tmp_path, kind="full", num_train_epochs=1.0))
    training.data.tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    training.data.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    written = json.loads((training.fit().output / "generation_config.json").read_text())
    assert training.data.tokenizer.convert_tokens_to_ids("<end>") in written["eos_token_id"]


def test_metrics_have_the_agreed_fields(base: Path, tmp_path: Path) -> None:
    tiny_run.training(tiny_run.config(base, tmp_path)).fit()
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    held_out = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert set(steps[0]) == {
        "step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "supervised_tokens", "tokens_per_second",
        "seconds", "memory_bytes", "disk_free_bytes", "rejected", "flops", "mfu",
    }  # fmt: skip
    assert steps[0]["tokens_per_second"] == pytest.approx(steps[0]["tokens"] / steps[0]["seconds"])
    assert [set(line) for line in held_out] == [{"step", "eval_loss", "eval_tokens", "eval_perplexity"}] * 3
    assert [line["step"] for line in held_out] == [4, 8, 12]
    assert held_out[0]["eval_tokens"] == sum(int((labels[1:] != -100).sum()) for _, labels in tiny_run.rows(6, seed=1))


def test_gradient_checkpointing_changes_nothing_that_is_learnt(base: Path, tmp_path: Path) -> None:
    losses = []
    for checkpointing in (False, True):
        out = tmp_path / str(checkpointing)
        losses.append(tiny_run.training(tiny_run.config(base, out, gradient_checkpointing=checkpointing)).fit().loss)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_rejected_steps_are_counted_and_the_run_goes_on(base: Path, tmp_path: Path) -> None:
    training = poisoned(tiny_run.training(tiny_run.config(base, tmp_path)), lambda step: step in (2, 3))
    result = training.fit()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rejected = [line for line in lines if line.get("rejected")]
    assert [line["step"] for line in rejected] == [2, 3]
    assert [line["loss"] for line in rejected] == [None, None]
    assert result.counters.rejected == 2
    assert result.counters.rejected_in_a_row == 0
    assert result.counters.step == 12


def test_ten_rejected_steps_in_a_row_stop_the_run_and_keep_the_last_checkpoint(base: Path, tmp_path: Path) -> None:
    settings = tiny_run.config(base, tmp_path, every=2, num_train_epochs=10.0)
    training = poisoned(tiny_run.training(settings), lambda step: step > 3)
    with pytest.raises(GateError, match="not finite in steps 4 to 13") as caught:
        training.fit()
    assert caught.value.exit_code == 1
    found = latest_complete(tmp_path / "checkpoints")
    assert found.step == 12
    assert caught.value.path == str(found.path)
    assert not (tmp_path / "adapter").exists()
    # What it holds is step 3, the last that was applied: good enough to go on from.
    assert tiny_run.training(settings).fit(resume=True).counters.rejected == 9


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_stop_signal_saves_the_finished_step(base: Path, tmp_path: Path, number: signal.Signals) -> None:
    settings = tiny_run.config(base, tmp_path)
    training = tiny_run.training(settings, on_progress=send(number, at=3), resume_command="surefit train x --resume")
    with pytest.raises(Interrupted, match=f"stopped by {number.name} after step 3 of 12") as caught:
        training.fit()
    assert caught.value.exit_code == 75
    assert caught.value.help == "continue with: surefit train x --resume"
    assert latest_complete(tmp_path / "checkpoints").step == 3


def test_a_stop_during_the_held_out_loss_is_made_up_for_on_resume(base: Path, tmp_path: Path) -> None:
    settings = tiny_run.config(base, tmp_path)
    with pytest.raises(Interrupted):
        tiny_run.training(settings, on_progress=send(signal.SIGTERM, at=4)).fit()
    assert not any("eval_loss" in line for line in read_jsonl(tmp_path / "metrics.jsonl"))
    tiny_run.training(settings).fit(resume=True)
    held_out = [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl") if "eval_loss" in line]
    assert held_out == [4, 8, 12]


def test_a_second_ctrl_c_stops_at_once(base: Path, tmp_path: Path) -> None:
    def twice(progress: TrainingProgress) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        tiny_run.training(tiny_run.config(base, tmp_path), on_progress=twice).fit()
    assert list_steps(tmp_path / "checkpoints") == []


def test_a_stop_in_the_last_step_leaves_only_the_export_to_do(base: Path, tmp_path: Path) -> None:
    settings = tiny_run.config(base, tmp_path)
    with pytest.raises(Interrupted):
        tiny_run.training(settings, on_progress=send(signal.SIGTERM, at=12)).fit()
    assert not (tmp_path / "adapter").exists()
    result = tiny_run.training(settings).fit(resume=True)
    assert result.resumed_from == 12
    assert result.output.is_dir()
    steps = [line for line in read_jsonl(tmp_path / "metrics.jsonl") if "loss" in line]
    assert result.loss == steps[-1]["loss"]
    assert result.eval_loss is not None
    # And resuming a run that is complete is harmless.
    assert tiny_run.training(settings).fit(resume=True).counters.step == 12


def test_damaged_checkpoints_are_skipped_loudly(base: Path, tmp_path: Path) -> None:
    settings = tiny_run.config(base, tmp_path)
    tiny_run.training(settings).fit()
    (tmp_path / "checkpoints" / "step-12" / "weights.safetensors").write_bytes(b"")
    notes: list[str] = []
    result = tiny_run.training(settings, on_note=notes.append).fit(resume=True)
    assert result.resumed_from == 8
    assert result.notes == notes
    assert "step-12 is damaged and was skipped: weights.safetensors has 0 bytes" in notes[1]
    resumed = [event for event in read_jsonl(tmp_path / "events.jsonl") if event["event"] == "resumed"]
    assert [(event["step"], event["skipped"]) for event in resumed] == [(8, ["step-12"])]
    for _, path in list_steps(tmp_path / "checkpoints"):
        (path / "manifest.json").unlink()
    with pytest.raises(ModelError, match="all 2 checkpoints are damaged"):
        tiny_run.training(settings).fit(resume=True)


def test_a_run_is_neither_overwritten_nor_mixed_with_another(base: Path, tmp_path: Path) -> None:
    tiny_run.training(tiny_run.config(base, tmp_path)).fit()
    with pytest.raises(
        ConfigError, match="the directory already contains a run: its newest checkpoint is step 12"
    ) as caught:
        tiny_run.training(tiny_run.config(base, tmp_path)).fit()
    assert "--resume" in str(caught.value.help)
    for change, words in (
        ({"learning_rate": 0.5}, r"train\.learning_rate was 0\.01 when .* and is 0\.5 now"),
        ({"global_batch_size": 16}, r"train\.global_batch_size was 8"),
        ({"num_train_epochs": 5.0}, "total_steps was 12 .* and is 15 now"),
        ({"dtype": "bfloat16"}, r"model\.dtype was 'float32'"),
    ):
        with pytest.raises(ConfigError, match=words):
            tiny_run.training(tiny_run.config(base, tmp_path, **change)).fit(resume=True)
    with pytest.raises(ConfigError, match="content was"):
        tiny_run.training(tiny_run.config(base, tmp_path), tiny_run.rows(24, seed=9)).fit(resume=True)


def test_another_micro_batch_may_resume(base: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        tiny_run.training(tiny_run.config(base, tmp_path), on_progress=send(signal.SIGTERM, at=6)).fit()
    smaller = tiny_run.config(base, tmp_path, per_device_train_batch_size=1, gradient_checkpointing=True)
    assert tiny_run.training(smaller).fit(resume=True).resumed_from == 6


def test_resume_where_nothing_was_saved_starts_at_the_beginning(base: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 9.9}\n'
    )  # of a run that died before its first checkpoint
    result = tiny_run.training(tiny_run.config(base, tmp_path)).fit(resume=True)
    assert result.resumed_from is None
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl") if "loss" in line] == list(range(1, 13))


def test_max_steps_and_no_held_out_rows(base: Path, tmp_path: Path) -> None:
    settings = tiny_run.config(base, tmp_path, max_steps=3)
    result = tiny_run.training(settings, eval_rows=[]).fit()
    assert (result.counters.step, result.eval_loss) == (3, None)


def test_a_run_that_learnt_nothing_exports_nothing(base: Path, tmp_path: Path) -> None:
    training = tiny_run.training(tiny_run.config(base, tmp_path, max_steps=2))
    poisoned(training, lambda step: (tmp_path / "dry_pass.json").exists())
    with pytest.raises(GateError, match="all 2 steps were rejected"):
        training.fit()
    assert not (tmp_path / "adapter").exists()


def test_an_adapter_with_an_untrained_layer_is_not_exported(base: Path, tmp_path: Path) -> None:
    training = tiny_run.training(tiny_run.config(base, tmp_path, max_steps=2))
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.default.weight"
    training.optimizer.parameters[name].register_hook(torch.zeros_like)
    with pytest.raises(GateError, match=r"up_proj\.lora_B\.weight is all zero"):
        training.fit()
    assert not (tmp_path / "adapter").exists()


def test_bad_input(base: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows to train on"):
        tiny_run.training(tiny_run.config(base, tmp_path), [])
    masked = [(np.arange(1, 6), np.full(5, -100))]
    with pytest.raises(DataError, match="row 0 has no supervised token among its 5"):
        tiny_run.training(tiny_run.config(base, tmp_path), masked)


def test_a_gpu_without_memory_is_explained(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("surefit.train.loop.train_step", full)
    with pytest.raises(
        MachineError, match="ran out in step 1, with micro batches of 4 rows of up to 20 tokens"
    ) as caught:
        tiny_run.training(tiny_run.config(base, tmp_path)).fit()
    assert caught.value.field == "train.per_device_train_batch_size"


def test_an_output_directory_that_is_full_of_a_file(base: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the directory should be")
    with pytest.raises(MachineError, match="cannot write"):
        tiny_run.training(tiny_run.config(base, tmp_path)).fit()
