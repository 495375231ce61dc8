"""A resumed run equals the uninterrupted one, and the same config twice gives the same bits."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from safetensors.torch import load_file

from surefit.checkpoint.manager import latest_complete
from surefit.core.errors import Interrupted
from surefit.core.rundir import read_jsonl

pytestmark = pytest.mark.usefixtures("one_thread")
TIMES = ("seconds", "tokens_per_second", "mfu", "disk_free_bytes")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Dropout in the attention as well as in the adapter.
    return tiny_run.save_base(tmp_path_factory.mktemp("model") / "base", attention_dropout=0.1)


def result_of(out: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Trained weights, and the metrics without what a clock decides."""
    file = next(path for name in ("adapter", "model") if (path := out / name).is_dir())
    weights = load_file(next(file.glob("*model*.safetensors")))
    lines = [{k: v for k, v in line.items() if k not in TIMES} for line in read_jsonl(out / "metrics.jsonl")]
    return weights, lines


def assert_same(one: Path, two: Path) -> None:
    (weights, lines), (other_weights, other_lines) = result_of(one), result_of(two)
    assert lines == other_lines
    assert weights.keys() == other_weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, other_weights[name]), name
    for name in ("weights", "optimizer"):
        ours, theirs = (load_file(out / "checkpoints" / "step-12" / f"{name}.safetensors") for out in (one, two))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours.keys() | theirs.keys())


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_equals_uninterrupted_bit_for_bit(base: Path, tmp_path: Path, kind: str, dtype: str) -> None:
    def settings(out: str) -> Any:
        return tiny_run.config(base, tmp_path / out, kind=kind, dtype=dtype, weight_decay=0.01)

    tiny_run.training(settings("straight")).fit()
    for stop_at in (3, 4, 9):  # off and on a regular checkpoint

        def stop(progress: Any, at: int = stop_at) -> None:
            if progress.step == at:
                os.kill(os.getpid(), signal.SIGTERM)

        resume = stop_at != 3
        with pytest.raises(Interrupted):
            tiny_run.training(settings("stopped"), on_progress=stop).fit(resume=resume)
        torch.manual_seed(stop_at)  # whatever else the process drew in between must not matter
    tiny_run.training(settings("stopped")).fit(resume=True)
    assert_same(tmp_path / "straight", tmp_path / "stopped")


def test_measurements_between_checkpoints_are_taken_up_again(base: Path, tmp_path: Path) -> None:
    """Checkpoints at 4, 8 and 12, measurements at 3, 6, 9 and 12 as well; stopped at one, and while one is taken."""

    def settings(out: str) -> Any:
        return tiny_run.config(base, tmp_path / out, eval_steps=3)

    tiny_run.training(settings("straight")).fit()
    measured = [line for line in result_of(tmp_path / "straight")[1] if "eval_loss" in line]
    assert [line["step"] for line in measured] == [3, 4, 6, 8, 9, 12]
    assert [line["step"] for line in measured if "between_checkpoints" in line] == [3, 6, 9]

    def stop(progress: Any) -> None:
        if progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        tiny_run.training(settings("stopped"), on_progress=stop).fit()
    job = tiny_run.training(settings("stopped"))
    inner, calls = job.held_out.batches.all, []

    def while_measuring(*place: int) -> Any:
        calls.append(job.counters.step)
        for batch in inner(*place):
            if job.counters.step == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    job.held_out.batches.all = while_measuring  # type: ignore[method-assign]
    with pytest.raises(Interrupted, match="after step 6"):
        job.fit(resume=True)
    assert calls == [3, 4, 6]
    assert latest_complete(tmp_path / "stopped" / "checkpoints").step == 6
    tiny_run.training(settings("stopped")).fit(resume=True)
    assert_same(tmp_path / "straight", tmp_path / "stopped")


def test_the_same_config_twice_gives_the_same_bits_and_another_seed_does_not(base: Path, tmp_path: Path) -> None:
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        tiny_run.training(tiny_run.config(base, tmp_path / out, seed=seed)).fit()
        torch.rand(7)
    assert_same(tmp_path / "a", tmp_path / "b")
    assert result_of(tmp_path / "a")[1] != result_of(tmp_path / "c")[1]


@pytest.mark.slow
def test_ctrl_c_in_a_process_of_its_own(base: Path, tmp_path: Path) -> None:
    """As tests/cli/test_bad_input.py does with the command line, but bit for bit with optimizer and log."""
    # In the same environment: with OMP_NUM_THREADS=1 MKL multiplies otherwise than with one thread set by torch.
    command = [sys.executable, "-u", tiny_run.__file__, str(base), str(tmp_path / "stopped")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.strip() == "step 2" for line in process.stdout)
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()
    assert process.returncode == 75, output
    assert "stopped by SIGINT" in output
    found = latest_complete(tmp_path / "stopped" / "checkpoints")
    assert found.step >= 2
    assert found.skipped == []
    tiny_run.training(tiny_run.config(base, tmp_path / "stopped")).fit(resume=True)
    tiny_run.training(tiny_run.config(base, tmp_path / "straight")).fit()
    assert_same(tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.parametrize("change", [{"packing": True}, {"per_device_train_batch_size": 1}], ids=["packed", "8 x 1"])
def test_packed_and_accumulated_runs_resume_bit_for_bit(base: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    plain = tiny_run.save_base(tmp_path / "base")  # packed attention has no dropout; the adapter has

    def stop(progress: Any) -> None:
        if progress.step == 7:
            os.kill(os.getpid(), signal.SIGUSR1)

    def settings(out: str) -> Any:
        return tiny_run.config(plain, tmp_path / out, **change)

    tiny_run.training(settings("straight")).fit()
    with pytest.raises(Interrupted):
        tiny_run.training(settings("stopped"), on_progress=stop).fit()
    torch.manual_seed(1)
    tiny_run.training(settings("stopped")).fit(resume=True)
    assert_same(tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_nothing_but_time() -> None:
    """A short run of the benchmark, which says what it compares; the long one has 100 kills."""
    command = [sys.executable, str(BENCHMARKS / "kill_resume.py"), "--kills", "6", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kills"] == 6
    assert sum(row["runs"] for row in result["rows"]) >= 1


@pytest.mark.slow
def test_a_full_disk_loses_nothing_but_time() -> None:
    """On a real small disk; tests/unit/train/test_saving.py fills one that is pretended, in the same ways."""
    command = [sys.executable, str(BENCHMARKS / "disk_full.py"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode == 77:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr + done.stdout
    assert [len(row["pauses"]) for row in json.loads(done.stdout.splitlines()[-1])["rows"]] == [1, 1, 1, 1]
