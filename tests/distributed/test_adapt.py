"""`surefit train --gpus 2 --adapt`: one of two real processes runs out of memory, and both start again with less."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.test_adapt import config_of

from surefit.core.errors import EXIT_ENVIRONMENT
from surefit.core.rundir import RunDir, read_json, read_jsonl

HELPERS = Path(__file__).parents[1] / "helpers"
MICRO = "train.per_device_train_batch_size"
MIB = 350
"""Measured, beyond the imports: a micro batch of 32 rows of 200 tokens runs with 460 and not with 400, one of 16 rows
with 320 and not with 250."""
LIMITED = f"""
import os, sys
if os.environ.get("RANK") == "1":
    sys.path.append({str(HELPERS)!r})
    import limited
    limited.limit({{mib}})
"""
SHORT = """
import os
if os.environ.get("RANK") == "1":
    import torch
    from surefit.train import {place}
    real, seen = {place}.train_step, []
    def limited(model, batches, *given, **named):
        seen.append(1)
        if {short}:
            raise torch.OutOfMemoryError("no room")
        return real(model, batches, *given, **named)
    {place}.train_step = limited
"""


def trained(directory: Path, fault: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command with two processes, of which each begins with `fault`."""
    (directory / "fault").mkdir(exist_ok=True)
    (directory / "fault/sitecustomize.py").write_text(fault, encoding="utf-8")
    known = os.environ.get("PYTHONPATH")
    own = {
        "PYTHONPATH": os.pathsep.join([str(directory / "fault"), *([known] if known else [])]),
        "GLOO_SOCKET_IFNAME": "lo",
        # Every tensor a mapping of its own: what is freed may be had again, whichever thread asks for it.
        "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "surefit", "train", "run.yaml", "--json", *arguments]
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=300, check=False, env=os.environ | own
    )


def settings(*changes: str) -> tuple[str, ...]:
    return tuple(part for one in changes for part in ("--set", one))


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts anonymous memory by RLIMIT_DATA")
def test_with_memory_that_really_runs_out_in_one_of_them(tmp_path: Path) -> None:
    config_of(tmp_path, words=60)
    two = settings("hardware.gpu=cpu", "hardware.count=2", "train.global_batch_size=64")
    done = trained(tmp_path, LIMITED.format(mib=MIB), "--adapt", *two)
    assert done.returncode == 0, done.stderr[-2000:]
    size = json.loads(done.stdout)["adapted"][MICRO]
    assert size < 32
    assert "rank 1: the machine's memory ran out in the dry pass" in done.stderr
    assert f"adapting: --set {MICRO}=16; all start again" in done.stderr
    assert "2 processes, ddp: 64 rows a step, in each 1 micro batch of 32" in done.stderr
    assert "2 processes, ddp: 64 rows a step, in each 2 micro batches of 16" in done.stderr
    assert "error" not in done.stderr
    run = RunDir(tmp_path / "out")
    written = run.resolved.read_text(encoding="utf-8")
    assert f"per_device_train_batch_size: {size}  # auto: adapted after out of memory" in written
    assert "global_batch_size: 64  # --set" in written
    adapted = [event["changes"] for event in read_jsonl(run.events) if event["event"] == "adapted"]
    assert adapted[0] == {MICRO: 16}
    assert adapted[-1] == {MICRO: size}
    assert read_json(run.plan)["estimate"]["micro_batch"] == size

    plain = trained(tmp_path, "", *two, *settings(f"{MICRO}={size}", "output_dir=plain"))
    assert plain.returncode == 0, plain.stderr[-2000:]
    weights = "adapter/adapter_model.safetensors"
    assert (run.path / weights).read_bytes() == (tmp_path / "plain" / weights).read_bytes()


@pytest.mark.distributed
def test_in_the_middle_of_a_run_it_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    config_of(tmp_path, words=1)
    same = settings(
        "hardware.gpu=cpu", "hardware.count=2", "train.global_batch_size=4", f"{MICRO}=2", "train.max_steps=6",
        "checkpoint.save_steps=2", "data.packing=false",
    )  # fmt: skip
    fault = SHORT.format(place="loop", short="len(seen) == 4 and len(batches[0]['input_ids']) > 1")
    done = trained(tmp_path, fault, "--adapt", *same)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "rank 1: the machine's memory ran out in step 4" in done.stderr
    result = json.loads(done.stdout)
    assert (result["adapted"], result["resumed_from"], result["steps"]) == ({MICRO: 1}, 2, 6)
    run = RunDir(tmp_path / "out")
    events = [event["event"] for event in read_jsonl(run.events)]
    assert [name for name in events if name in ("started", "failed", "adapted", "resumed", "finished")] == [
        "started", "failed", "adapted", "started", "resumed", "finished",
    ]  # fmt: skip

    plain = trained(tmp_path, "", *same, *settings("output_dir=plain"))
    assert plain.returncode == 0, plain.stderr[-2000:]
    losses, expected = (
        [line["loss"] for line in read_jsonl(RunDir(path).metrics) if "loss" in line]
        for path in (run.path, tmp_path / "plain")
    )
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[:2] == expected[:2]


@pytest.mark.distributed
def test_a_dry_run_says_what_would_fit_and_writes_nothing(tmp_path: Path) -> None:
    config_of(tmp_path, words=1)
    same = settings("hardware.gpu=cpu", "hardware.count=2", "train.global_batch_size=4", f"{MICRO}=2")
    fault = SHORT.format(place="dry_pass", short="len(batches[0]['input_ids']) > 1")
    tried = trained(tmp_path, fault, "--adapt", "--dry-run", *same, *settings("data.packing=false"))
    assert tried.returncode == 0, tried.stderr[-2000:]
    assert json.loads(tried.stdout)["adapted"] == {MICRO: 1}, "one JSON object, by the last who was first"
    assert not (tmp_path / "out").exists()


@pytest.mark.distributed
def test_where_nothing_is_left_to_change_it_ends_with_the_error(tmp_path: Path) -> None:
    config_of(tmp_path, words=1)
    lowest = settings(
        "hardware.gpu=cpu", "hardware.count=2", f"{MICRO}=1", "train.gradient_checkpointing=true",
        "speed.chunked_loss=true", "speed.tiled_mlp=true",
    )  # fmt: skip
    done = trained(tmp_path, SHORT.format(place="loop", short="True"), "--adapt", *lowest)
    assert done.returncode == EXIT_ENVIRONMENT, done.stderr[-2000:]
    assert re.search(r"error(\[E\d+\])? \[rank 1\]:? the machine's memory ran out in step 1", done.stderr)
    assert "the remaining options change the training result" in done.stderr
    assert "adapting" not in done.stderr
