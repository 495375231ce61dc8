"""Out of memory for real: a process that may not allocate what its config needs, and what --adapt makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from surefit.core.rundir import RunDir, read_json, read_jsonl

LIMITED = Path(__file__).parents[1] / "helpers" / "limited.py"
MIB = 420
"""Measured: 32 rows in a micro batch need more, 16 need less."""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts anonymous memory by RLIMIT_DATA")


@pytest.fixture
def too_large(tmp_path: Path) -> Path:
    tools = [{"name": "ring", "description": "Call " * 120, "parameters": {"who": {"description": "?", "type": "str"}}}]
    rows = [
        {
            "query": f"Ring person {number}",
            "tools": json.dumps(tools),
            "answers": json.dumps([{"name": "ring", "arguments": {"who": f"person {number}"}}]),
        }
        for number in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    path = tmp_path / "run.yaml"
    path.write_text(
        "recipe: function_calling\n"
        "model: {name_or_path: surefit/nano}\n"
        "data: {train: rows.jsonl, eval: 0.2, max_length: 328}\n"
        "train: {max_steps: 1, global_batch_size: 32, per_device_train_batch_size: 32}\n"
        "output_dir: out\n",
        encoding="utf-8",
    )
    return path


def limited(config: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, LIMITED, str(MIB), "train", config.name, "--json", *flags]
    # Every tensor a mapping of its own: what one attempt frees, the next one may have, whichever thread asks for it.
    own = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=config.parent, capture_output=True, text=True, timeout=300, check=False, env=os.environ | own
    )


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return value


def test_adapt_goes_on_until_it_fits(too_large: Path) -> None:
    done = limited(too_large, "--adapt")
    assert done.returncode == 0, done.stderr[-2000:]
    changed = answer(done)["adapted"]
    assert changed["train.per_device_train_batch_size"] < 32
    assert "adapting: --set train.per_device_train_batch_size=16" in done.stderr
    run = RunDir(too_large.parent / "out")
    assert run.adapter.exists()
    written = run.resolved.read_text(encoding="utf-8")
    size = changed["train.per_device_train_batch_size"]
    assert f"per_device_train_batch_size: {size}  # auto: adapted after out of memory" in written
    assert "global_batch_size: 32  # user" in written
    adapted = [event["changes"] for event in read_jsonl(run.events) if event["event"] == "adapted"]
    assert adapted[0] == {"train.per_device_train_batch_size": 16}
    assert read_json(run.plan)["estimate"]["micro_batch"] == size
    assert read_json(run.dry_pass)["micro_batches"] == 2
