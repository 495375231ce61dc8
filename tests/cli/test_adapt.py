"""Out of memory, and what --adapt makes of it: pretended, and for real in a process that may not allocate enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Surefit

from surefit.core.rundir import RunDir, read_json, read_jsonl

LIMITED = Path(__file__).parents[1] / "helpers" / "limited.py"
MIB = 420
"""Measured: 32 rows of 328 tokens in a micro batch need more, 16 need less."""


def config_of(directory: Path, words: int) -> Path:
    """A run of one step with 32 rows in a micro batch, each with so many words more than a few."""
    described = {
        "name": "ring",
        "description": "Call " * words,
        "parameters": {"who": {"description": "?", "type": "str"}},
    }
    rows = [
        {
            "query": f"Ring person {number}",
            "tools": json.dumps([described]),
            "answers": json.dumps([{"name": "ring", "arguments": {"who": f"person {number}"}}]),
        }
        for number in range(40)
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    path = directory / "run.yaml"
    path.write_text(
        "recipe: function_calling\n"
        "model: {name_or_path: surefit/nano}\n"
        "data: {train: rows.jsonl, eval: 0.2, max_length: 328}\n"
        "train: {max_steps: 1, global_batch_size: 32, per_device_train_batch_size: 32}\n"
        "output_dir: out\n",
        encoding="utf-8",
    )
    return path


def require_adapted(run: RunDir, changed: dict[str, Any], said: str) -> None:
    """The run went on with 16 rows or fewer, and says so wherever it is asked."""
    size = changed["train.per_device_train_batch_size"]
    assert size < 32
    assert "adapting: --set train.per_device_train_batch_size=16" in said
    assert run.adapter.exists()
    written = run.resolved.read_text(encoding="utf-8")
    assert f"per_device_train_batch_size: {size}  # auto: adapted after out of memory" in written
    assert "global_batch_size: 32  # user" in written
    adapted = [event["changes"] for event in read_jsonl(run.events) if event["event"] == "adapted"]
    assert adapted[0] == {"train.per_device_train_batch_size": 16}
    assert read_json(run.plan)["estimate"]["micro_batch"] == size
    assert read_json(run.dry_pass)["micro_batches"] == 2


@pytest.fixture
def room_for_16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for micro batches of 16 rows of 80 tokens, and what torch says where a CPU has none for more."""
    from surefit.train import dry_pass, loop, step

    def limited_step(model: Any, micro_batches: Any, *others: Any, **options: Any) -> Any:
        if max(batch["input_ids"].numel() for batch in micro_batches) > 2_000:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        return step.train_step(model, micro_batches, *others, **options)

    for place in (dry_pass, loop):
        monkeypatch.setattr(place, "train_step", limited_step)


@pytest.mark.slow
@pytest.mark.usefixtures("room_for_16")
def test_adapt_goes_on_until_it_fits(surefit: Surefit, tmp_path: Path) -> None:
    config = config_of(tmp_path, words=1)
    refused = surefit("train", config)
    assert refused.code == 3, refused.text
    assert "per_device_train_batch_size=16" in refused.text
    done = surefit("train", config, "--adapt", "--overwrite", "--json")
    assert done.code == 0, done.text
    require_adapted(RunDir(tmp_path / "out"), done.json["adapted"], done.stderr)


@pytest.mark.usefixtures("room_for_16")
@pytest.mark.slow
def test_the_whole_pipeline_adapts_in_its_training(surefit: Surefit, tmp_path: Path) -> None:
    brief = ("evaluate.max_examples=1", "evaluate.max_new_tokens=4")
    done = surefit("run", config_of(tmp_path, words=1), "--adapt", *(part for one in brief for part in ("--set", one)))
    assert done.code == 0, done.text
    assert "adapting: --set train.per_device_train_batch_size=16" in done.stderr
    assert (tmp_path / "out/report.html").exists()
    assert "Memory ran out; changed to" in (tmp_path / "out/report.html").read_text(encoding="utf-8")


def test_under_another_launcher_it_is_refused(
    surefit: Surefit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    refused = surefit("train", config_of(tmp_path, words=1), "--adapt")
    assert refused.code == 2, refused.text
    assert "another launcher has started these" in refused.stderr
    assert "surefit train --gpus N" in refused.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts anonymous memory by RLIMIT_DATA")
def test_with_memory_that_really_runs_out(tmp_path: Path) -> None:
    config = config_of(tmp_path, words=120)
    command = [sys.executable, str(LIMITED), str(MIB), "train", config.name, "--json", "--adapt"]
    # Every tensor a mapping of its own: what one attempt frees, the next one may have, whichever thread asks for it.
    own = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False, env=os.environ | own
    )
    assert done.returncode == 0, done.stderr[-2000:]
    changed = json.loads(done.stdout.strip().splitlines()[-1])["adapted"]
    require_adapted(RunDir(tmp_path / "out"), changed, done.stderr)
