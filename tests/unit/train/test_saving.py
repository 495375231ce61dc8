"""Checkpoints are written while training goes on, the right ones are kept, and nothing gets lost in between."""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from surefit.checkpoint import manager
from surefit.checkpoint.files import find_checkpoint_damage, list_steps
from surefit.checkpoint.manager import latest_complete
from surefit.core.errors import ConfigError, GateError, Interrupted, MachineError
from surefit.core.rundir import RunDir, read_json, read_jsonl
from surefit.train import checkpointing
from surefit.train.heldout import perplexity
from surefit.train.loop import Trainer
from surefit.train.signals import StopRequest
from surefit.train.step import train_step

SAVE = manager.save_checkpoint
BEST = {"metric_for_best_model": "eval_loss", "save_total_limit": 1}
WORSE = {"learning_rate": 0.5, "lr_scheduler_type": "constant_with_warmup"}
"""So high that the held-out loss soon gets worse."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Checkpoints that take a while to write, at least until the next step is done where events of steps are added;
    returns what began and ended, in order."""
    events: list[str] = []

    def save(directory: Path, step: int, state: manager.CheckpointState) -> Path:
        events.append(f"begin {step}")
        end = time.monotonic() + 20
        time.sleep(0.2)
        while any(event.startswith("step") for event in events) and step < 12 and f"step {step + 1}" not in events:
            assert time.monotonic() < end, "training does not go on while a checkpoint is written"
            time.sleep(0.01)
        path = SAVE(directory, step, state)
        events.append(f"end {step}")
        return path

    monkeypatch.setattr(checkpointing.manager, "save_checkpoint", save)
    return events


def without_dry_pass(training: Trainer) -> Trainer:
    training.dry_pass = lambda write=True: None  # type: ignore[method-assign]
    return training


def run(settings: Any, **callbacks: Any) -> Trainer:
    return without_dry_pass(tiny_run.training(settings, **callbacks))


def full_disk() -> MachineError:
    error = MachineError("cannot write: No space left on device")
    error.__cause__ = OSError(28, "No space left on device")
    return error


def test_training_goes_on_while_a_checkpoint_is_written(base: Path, tmp_path: Path, slow: list[str]) -> None:
    settings = tiny_run.config(base, tmp_path, every=4)
    run(settings, on_progress=lambda progress: slow.append(f"step {progress.step}")).fit()
    assert slow.index("begin 4") < slow.index("step 5") < slow.index("end 4") < slow.index("begin 8")
    one_at_a_time = [f"{what} {step}" for step in (4, 8, 12) for what in ("begin", "end")]
    assert [event for event in slow if not event.startswith("step")] == one_at_a_time


def test_what_is_written_is_the_state_when_it_was_taken(base: Path, tmp_path: Path, slow: list[str]) -> None:
    seen = {}

    def keep(progress: Any) -> None:
        seen[progress.step] = {name: p.detach().clone() for name, p in training.optimizer.parameters.items()}

    training = run(tiny_run.config(base, tmp_path, every=4), on_progress=keep)
    training.fit()
    for step, path in list_steps(tmp_path / "checkpoints"):
        weights = manager.load_checkpoint(path).weights
        assert all(torch.equal(weights[name], tensor) for name, tensor in seen[step].items())
    assert not torch.equal(*(seen[step]["base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight"]
                             for step in (8, 9)))  # fmt: skip


def test_a_fault_of_the_writer_comes_out_at_the_next_call(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("the writer broke")

    monkeypatch.setattr(checkpointing.manager, "save_checkpoint", broken)
    training = run(tiny_run.config(base, tmp_path, every=4))
    with pytest.raises(RuntimeError, match="the writer broke"):
        training.fit()
    assert training.counters.step == 8
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("step-")]


def test_a_disk_that_fills_up_under_the_writer_is_waited_out(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def save(directory: Path, step: int, state: manager.CheckpointState) -> Path:
        tries.append(step)
        if len(tries) < 4:
            raise full_disk()
        return SAVE(directory, step, state)

    monkeypatch.setattr(checkpointing.manager, "save_checkpoint", save)
    training = run(tiny_run.config(base, tmp_path, every=4))
    training.saving.guard.sleep = lambda seconds: None
    result = training.fit()
    assert tries == [4, 4, 4, 4, 8, 12]
    assert [note.partition(" ")[0] for note in result.notes] == ["PAUSED:", "space"]
    assert [step for step, _ in list_steps(tmp_path / "checkpoints")] == [8, 12]


@pytest.mark.parametrize("at", [4, 5])
def test_a_stop_signal_waits_for_the_writer(base: Path, tmp_path: Path, slow: list[str], at: int) -> None:
    def stop(progress: Any) -> None:
        if progress.step == at:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match=f"after step {at} of 12; it is saved"):
        run(tiny_run.config(base, tmp_path, every=4), on_progress=stop).fit()
    assert latest_complete(tmp_path / "checkpoints").step == at


def test_a_stop_signal_on_a_full_disk_says_which_checkpoint_there_is(base: Path, tmp_path: Path) -> None:
    def fill(progress: Any) -> None:
        if progress.step == 6:
            training.saving.guard.free = lambda directory: 0
            os.kill(os.getpid(), signal.SIGUSR1)

    training = run(tiny_run.config(base, tmp_path, every=4), on_progress=fill)
    with pytest.raises(
        Interrupted,
        match=r"stopped by SIGUSR1 while waiting for space to write step-6; .* complete checkpoint is step-4",
    ):
        training.fit()
    assert run(tiny_run.config(base, tmp_path, every=4)).fit(resume=True).resumed_from == 4


def test_with_too_little_room_old_checkpoints_go_but_neither_the_last_nor_the_best(base: Path, tmp_path: Path) -> None:
    settings = tiny_run.config(
        base, tmp_path, every=2, checkpoint={"metric_for_best_model": "eval_loss", "save_total_limit": 5}
    )
    training = run(settings)
    asked = []

    def free(directory: Path) -> int:
        steps = [step for step, _ in list_steps(tmp_path / "checkpoints")]
        asked.append(steps)
        return 0 if len(steps) > 2 else 1 << 40

    training.saving.guard.free = free
    assert not any("PAUSED" in note for note in training.fit().notes)
    values = {line["step"]: line["eval_loss"] for line in training.held_out.lines}
    last = [step for step, _ in list_steps(tmp_path / "checkpoints")]
    assert 12 in last
    assert min(values, key=lambda step: values[step]) in last


def test_only_what_is_measured_at_a_checkpoint_chooses_the_best(base: Path, tmp_path: Path) -> None:
    settings = tiny_run.config(base, tmp_path, every=4, eval_steps=1, checkpoint=BEST)
    training = run(settings)
    result = training.fit()
    assert [line["step"] for line in training.held_out.lines] == list(range(1, 13))
    values = {line["step"]: line["eval_loss"] for line in training.held_out.at_checkpoints}
    assert sorted(values) == [4, 8, 12]
    assert read_json(tmp_path / "checkpoints" / "best.json")["scores"] == {str(n): v for n, v in values.items()}
    assert result.best_step == min(values, key=lambda step: values[step])


def test_measurements_between_checkpoints_count_for_patience(base: Path, tmp_path: Path) -> None:
    settings = tiny_run.config(base, tmp_path, every=12, eval_steps=1, early_stopping_patience=2, learning_rate=1e-9)
    result = run(settings).fit()
    assert result.stopped_early
    last = result.counters.step
    assert last < 12
    assert [step for step, _ in list_steps(tmp_path / "checkpoints")] == [last], "as after any last step"
    again = run(settings).fit(resume=True)
    assert (again.counters.step, again.stopped_early) == (last, True)


def test_a_run_without_room_for_one_checkpoint_does_not_start(base: Path, tmp_path: Path) -> None:
    training = run(tiny_run.config(base, tmp_path))
    training.saving.guard.free = lambda directory: 1000
    with pytest.raises(MachineError, match="only 1000 B are free"):
        training.fit()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_damaged_checkpoint_of_the_right_size_does_not_push_out_the_last_good_one(base: Path, tmp_path: Path) -> None:
    settings = tiny_run.config(base, tmp_path, every=4, checkpoint={"save_total_limit": 2})
    run(settings).fit()
    file = tmp_path / "checkpoints/step-12/weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    def stop(progress: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    one = tiny_run.config(base, tmp_path, every=4, checkpoint={"save_total_limit": 1})
    with pytest.raises(Interrupted):
        run(one, on_progress=stop).fit(resume=True)  # saves step-9 and keeps one
    assert [step for step, _ in list_steps(tmp_path / "checkpoints")] == [9, 12]
    assert find_checkpoint_damage(tmp_path / "checkpoints/step-9", hashes=True) is None
    assert run(one).fit(resume=True).resumed_from == 9


def scored(settings: Any) -> Trainer:
    """A run whose metric is best after step 4."""
    training = run(settings, score=lambda model: {"exact_match": 1 / (1 + abs(training.counters.step - 4))})
    return training


def test_the_best_is_kept_and_exported(base: Path, tmp_path: Path) -> None:
    settings = tiny_run.config(base, tmp_path, every=2, checkpoint=BEST | {"metric_for_best_model": "exact_match"})
    result = scored(settings).fit()
    assert [step for step, _ in list_steps(tmp_path / "checkpoints")] == [4, 12]
    assert result.best_step == 4
    assert "exporting step 4, the best by exact_match: 1.0000" in result.notes
    exported = load_file(result.output / "adapter_model.safetensors")
    saved = manager.load_checkpoint(tmp_path / "checkpoints/step-4").weights
    for name, tensor in exported.items():
        assert torch.equal(tensor, saved[name.replace(".weight", ".default.weight")])
    written = read_json(tmp_path / "checkpoints/best.json")
    assert (written["metric"], written["lower_is_better"], written["best"]) == ("exact_match", False, [4])
    assert list(written["scores"]) == ["2", "4", "6", "8", "10", "12"]


def test_a_damaged_best_one_is_passed_over_loudly(base: Path, tmp_path: Path) -> None:
    settings = tiny_run.config(base, tmp_path, every=2, checkpoint=BEST | {"metric_for_best_model": "exact_match"})
    scored(settings).fit()
    (tmp_path / "checkpoints/step-4/weights.safetensors").write_bytes(b"")
    result = scored(settings).fit(resume=True)
    assert result.best_step == 12
    assert any("step-4 has the best exact_match, but it is damaged" in note for note in result.notes)


def test_early_stopping_ends_a_resumed_run_where_it_ends_the_straight_one(base: Path, tmp_path: Path) -> None:
    def settings(out: str) -> Any:
        return tiny_run.config(
            base, tmp_path / out, every=2, checkpoint=BEST, early_stopping_patience=2, num_train_epochs=12.0, **WORSE
        )

    straight = run(settings("straight")).fit()
    assert straight.stopped_early
    assert straight.counters.step < 36
    assert "2 measurements without an improvement of eval_loss" in straight.notes[0]
    for at in range(1, straight.counters.step + 1):

        def stop(progress: Any, at: int = at) -> None:
            if progress.step == at:
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(Interrupted):
            run(settings("stopped"), on_progress=stop).fit(resume=at > 1)
    resumed = run(settings("stopped")).fit(resume=True)
    assert (resumed.counters.step, resumed.best_step) == (straight.counters.step, straight.best_step)
    assert run(settings("stopped")).fit(resume=True).counters.step == straight.counters.step
    for name in ("straight", "stopped"):
        lines = read_jsonl(tmp_path / name / "metrics.jsonl")
        assert lines[-1]["step"] == straight.counters.step


def test_task_scores_and_perplexity_stand_in_the_log_and_may_decide(base: Path, tmp_path: Path) -> None:
    given = iter([0.1, 0.7, 0.7, 0.2, 0.3, 0.4])
    settings = tiny_run.config(
        base, tmp_path, every=2, checkpoint={"metric_for_best_model": "exact_match", "save_total_limit": 1}
    )

    def score(model: torch.nn.Module) -> dict[str, float]:
        model.eval()
        return {"exact_match": next(given), "parse_rate": 1.0}

    training = run(settings, score=score)
    result = training.fit()
    assert training.model.training
    held_out = [line for line in read_jsonl(tmp_path / "metrics.jsonl") if "eval_loss" in line]
    assert set(held_out[0]) == {"step", "eval_loss", "eval_tokens", "eval_perplexity", "exact_match", "parse_rate"}
    assert held_out[0]["eval_perplexity"] == pytest.approx(math.exp(held_out[0]["eval_loss"]))
    assert result.best_step == 4
    assert perplexity(1e6) == math.inf


def test_a_best_that_nobody_measures_is_refused(base: Path, tmp_path: Path) -> None:
    settings = tiny_run.config(base, tmp_path, checkpoint={"metric_for_best_model": "exact_match"})
    with pytest.raises(ConfigError, match="exact_match is not measured during training"):
        run(settings)
    with pytest.raises(ConfigError, match=r"was not measured; available: .* did you mean 'exact_matches'"):
        run(settings, score=lambda model: {"exact_matches": 1.0}).fit()


def test_the_batch_that_stops_a_run_can_be_replayed(base: Path, tmp_path: Path) -> None:
    settings = tiny_run.config(base, tmp_path, every=2, num_train_epochs=10.0)
    training = run(settings)

    def poison(model: Any, bad: Callable[[], bool]) -> None:
        layer = model.get_submodule("base_model.model.model.norm")
        layer.register_forward_hook(lambda module, inputs, output: output * math.nan if bad() else output)

    poison(training.model, lambda: training.counters.step >= 3)
    with pytest.raises(GateError, match="not finite in steps 4 to 13") as caught:
        training.fit()
    file = tmp_path / "rejected/step-13.safetensors"
    assert str(file) in str(caught.value.help)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    with safe_open(file, "pt") as opened:
        facts = opened.metadata()
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no dict
    assert (facts["format"], facts["step"], facts["micro_batches"], facts["loss"]) == (
        "surefit-rejected-1", "13", "2", "nan",
    )  # fmt: skip
    batches = [
        {name.removeprefix(f"{n}."): tensor for name, tensor in tensors.items() if name.startswith(f"{n}.")}
        for n in range(2)
    ]
    expected = [training.batches.make(micro) for micro in training.batches.of_step(12)]
    assert all(torch.equal(batches[n]["input_ids"], expected[n]["input_ids"]) for n in range(2))
    torch.manual_seed(int(facts["dropout_seed"]))
    assert not train_step(training.model, batches, training.optimizer, 1.0).applied


def test_what_may_change_on_resume_is_noted(base: Path, tmp_path: Path) -> None:
    def stop(progress: Any) -> None:
        if progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        run(tiny_run.config(base, tmp_path), on_progress=stop).fit()
    result = run(tiny_run.config(base, tmp_path, per_device_train_batch_size=2)).fit(resume=True)
    assert result.notes == [
        "train.per_device_train_batch_size: 4, now 2: the last bits may differ from an uninterrupted run",
        "another micro batch changes the random numbers of dropout and noise: the last bits may differ from an "
        "uninterrupted run",
    ]


def test_the_log_is_whole_before_a_checkpoint_counts(base: Path, tmp_path: Path) -> None:
    """A line that a full disk kept back would be missing after kill -9: the checkpoint waits for it."""
    training = run(tiny_run.config(base, tmp_path, every=4))
    waiting = iter([True, True, False])
    flush = training.log.flush
    training.log.flush = lambda: next(waiting, False) or flush()  # type: ignore[method-assign]
    training.saving.guard.sleep = lambda seconds: None
    result = training.fit()
    assert [note.partition(" ")[0] for note in result.notes] == ["PAUSED:", "space"]


def test_one_run_at_a_time(base: Path, tmp_path: Path) -> None:
    with StopRequest() as stop:
        training = run(tiny_run.config(base, tmp_path))
        with training.saving.open(stop):
            assert json.loads((tmp_path / ".lock").read_text())["stage"] == "train"
            child = os.fork()
            if child == 0:
                # A fork shares the table of held locks, not their description: it must open its own.
                from surefit.core import lock

                lock._held.clear()
                try:
                    with RunDir(tmp_path).locked("train"):
                        os._exit(0)
                except MachineError:
                    os._exit(3)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
