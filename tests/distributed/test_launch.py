"""`surefit train --gpus 2` as a user meets it: two processes that end together, whatever ends them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefit.core.errors import EXIT_ENVIRONMENT, EXIT_INTERRUPTED, EXIT_LOST, EXIT_SHORT, MachineError
from surefit.core.rundir import read_jsonl
from surefit.launch.local import _verdict

SECONDS = 300


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "recipe: function_calling\n"
        "model: {name_or_path: surefit/nano}\n"
        "data: {train: surefit/function-calling-train, eval: 0.02, packing: false}\n"
        "train: {max_steps: 400, global_batch_size: 4, per_device_train_batch_size: 2, learning_rate: 0.001}\n"
        "checkpoint: {save_steps: 5}\n"
        "hardware: {gpu: cpu, count: 2}\n"
        f"output_dir: {tmp_path / 'run'}\n"
    )
    return path


def started(config: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "surefit", "train", str(config), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


def steps(config: Path) -> int:
    metrics = config.parent / "run/metrics.jsonl"
    return sum("loss" in line for line in read_jsonl(metrics)) if metrics.exists() else 0


def after_a_checkpoint(config: Path, process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + SECONDS
    while not (config.parent / "run/checkpoints/step-5/manifest.json").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.1)


def ranks(launcher: int) -> dict[int, int]:
    """Rank → process id of the launcher's children."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if rank := [entry[5:] for entry in environment if entry.startswith(b"RANK=")]:
            found[int(rank[0])] = int(child)
    return found


@pytest.mark.distributed
def test_a_killed_rank_ends_the_run_and_is_named_and_a_stopped_run_resumes(config: Path) -> None:
    """Killed with -9, resumed, asked to stop, and refused with other settings."""
    process = started(config)
    after_a_checkpoint(config, process)
    os.kill(ranks(process.pid)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_ENVIRONMENT
    assert out == ""
    assert "rank 1 of 2 was killed by SIGKILL" in err
    assert "--resume" in err
    assert "Traceback" not in err

    before = steps(config)
    process = started(config, "--resume", "--json")
    limit = time.monotonic() + SECONDS
    while steps(config) <= before + 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED
    assert json.loads(out.splitlines()[-1])["exit_code"] == EXIT_INTERRUPTED
    assert re.search(r"stopped by SIGTERM after step \d+", out)
    process = started(config, "--resume", "--set", "train.seed=7")
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    assert err.count("train.seed was 0 when the checkpoint was written") == 1, "one process says it, not both"


@pytest.mark.distributed
def test_a_stopped_run_that_is_resumed_is_the_one_that_was_not_stopped(config: Path) -> None:
    """SIGUSR1 to the command, as SLURM sends it: one checkpoint, and in the end the same bits."""
    short = ("--set", "train.max_steps=12")
    process = started(config, *short)
    after_a_checkpoint(config, process)
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED, err
    stopped = int(re.search(r"stopped by SIGUSR1 after step (\d+) of 12", err)[1])  # type: ignore[index]
    assert (config.parent / f"run/checkpoints/step-{stopped}/manifest.json").exists()
    process = started(config, *short, "--resume")
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    whole = started(config, *short, "--set", f"output_dir={config.parent / 'whole'}")
    _, err = whole.communicate(timeout=SECONDS)
    assert whole.returncode == 0, err
    stopped_bits, bits = (
        (config.parent / run / "adapter/adapter_model.safetensors").read_bytes() for run in ("run", "whole")
    )
    assert stopped_bits == bits


FAULT = """
import os
if os.environ.get("RANK") == "1":
    import torch
    from surefit.core.errors import DataError
    from surefit.train import loop
    real, seen = loop.train_step, []
    def failing(*given, **named):
        seen.append(1)
        if len(seen) > 3:
            raise {error}
        return real(*given, **named)
    loop.train_step = failing
"""


HANG = """
import os, signal
if os.environ.get("RANK") == "1":
    from surefit.train.checkpointing import CheckpointWriter
    real = CheckpointWriter.save
    def hanging(saving, step, state):
        if step == 10:
            os.kill(os.getpid(), signal.SIGSTOP)
        real(saving, step, state)
    CheckpointWriter.save = hanging
"""


def with_fault(directory: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every Python process that is started run this first."""
    (directory / "fault").mkdir()
    (directory / "fault/sitecustomize.py").write_text(code)
    known = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory / "fault"), *([known] if known else [])]))


@pytest.mark.distributed
def test_a_rank_that_hangs_at_a_checkpoint_is_noticed_and_named(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the others may wait for a disk, as long as that takes; but not for one that never comes."""
    with_fault(tmp_path, HANG, monkeypatch)
    process = started(config, "--set", "parallel.timeout_minutes=0.3")
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == EXIT_ENVIRONMENT, err
    assert "rank 1 of 2 did not respond or exit" in err
    assert "parallel.timeout_minutes" in err
    assert "Traceback" not in err
    assert (config.parent / "run/checkpoints/step-5/manifest.json").exists()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("DataError('row 17 cannot be read', help='tokenise anew')", 2, "row 17 cannot be read"),
        ("torch.OutOfMemoryError('no room')", EXIT_ENVIRONMENT, "the machine's memory ran out in step 4"),
    ],
)
def test_an_error_of_one_rank_ends_the_run_and_is_said_with_its_rank(
    config: Path, tmp_path: Path, error: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(tmp_path, FAULT.format(error=error), monkeypatch)
    process = started(config)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == code, err
    assert re.search(rf"error(\[E\d+\])? \[rank 1\].*{re.escape(said)}", err)
    assert "rank 1 of 2 failed" in err
    assert err.count("Traceback") == 0
    assert "lost" not in err, "the other rank says nothing of its own"


@pytest.mark.distributed
def test_the_whole_pipeline_shares_its_training_and_says_one_thing_on_stdout(config: Path) -> None:
    brief = ("train.max_steps=1", "evaluate.max_examples=1", "evaluate.max_new_tokens=4")
    command = [sys.executable, "-m", "surefit", "run", str(config), "--json"]
    done = subprocess.run(
        [*command, *(part for one in brief for part in ("--set", one))],
        capture_output=True, text=True, timeout=SECONDS, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 0, "one JSON object and nothing else"
    assert "2 processes, ddp: 4 rows a step, in each 1 micro batch of 2" in done.stderr
    assert "Trained 1 step in" in done.stderr


@pytest.mark.distributed
def test_two_processes_that_read_shards_learn_what_one_learns_from_rows(config: Path) -> None:
    shards = f"data.tokenized={config.parent / 'tokens'}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    losses = []
    for name, verbs, sets in (
        ("rows", ["train"], ["hardware.count=1"]),
        ("shards", ["prepare", "train"], [shards]),
    ):
        sets = [*sets, "train.max_steps=3", f"output_dir={config.parent / name}"]
        for verb in verbs:
            command = [sys.executable, "-m", "surefit", verb, str(config)]
            done = subprocess.run(
                [*command, *(part for one in sets for part in ("--set", one))],
                capture_output=True, text=True, timeout=SECONDS, check=False, env=environment,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
        losses.append([line["loss"] for line in read_jsonl(config.parent / name / "metrics.jsonl") if "loss" in line])
    assert "2 processes, ddp" in done.stderr
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.distributed
def test_torchrun_around_it_is_recognised(config: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "surefit",
         "train", str(config), "--dry-run"],
        capture_output=True, text=True, timeout=SECONDS, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Ready: 400 optimizer steps") == 1


def test_the_first_cause_decides_what_the_run_exits_with() -> None:
    assert _verdict({0: 0, 1: 0}, [], 2, "") == 0
    assert _verdict({0: EXIT_INTERRUPTED, 1: EXIT_INTERRUPTED}, [], 2, "") == EXIT_INTERRUPTED
    assert _verdict({1: EXIT_LOST, 0: EXIT_INTERRUPTED}, [], 2, "") == EXIT_INTERRUPTED
    assert _verdict({1: EXIT_LOST, 0: 2}, [], 2, "") == 2
    with pytest.raises(MachineError, match="rank 1 of 2 failed") as caught:
        _verdict({0: EXIT_LOST, 1: 1}, [], 2, "surefit train x --resume")
    assert caught.value.exit_code == 1
    with pytest.raises(MachineError, match="rank 1 of 2 was killed by SIGSEGV"):
        _verdict({0: EXIT_LOST, 1: -signal.SIGSEGV}, [], 2, "")
    assert _verdict({0: EXIT_LOST, 1: EXIT_SHORT}, [], 2, "") == EXIT_SHORT
    assert _verdict({1: EXIT_SHORT, 0: -signal.SIGABRT}, [], 2, "") == EXIT_SHORT, "it was lost, in NCCL's own way"
    with pytest.raises(MachineError, match="rank 0 of 2 was killed by SIGKILL"):
        _verdict({0: -signal.SIGKILL, 1: EXIT_SHORT}, [], 2, "")
    assert _verdict({0: 2, 1: EXIT_SHORT}, [], 2, "") == 2
    with pytest.raises(MachineError, match="rank 1 of 2 did not respond or exit"):
        _verdict({0: EXIT_LOST, 1: -signal.SIGKILL}, [1], 2, "")
    with pytest.raises(MachineError, match="none reported an error"):
        _verdict({0: EXIT_LOST, 1: EXIT_LOST}, [], 2, "")
