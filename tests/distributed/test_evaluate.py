"""`evaluate` and `predict` in two real processes: what one process writes, to the byte; killed, it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from surefit.core.errors import EXIT_ENVIRONMENT
from surefit.core.rundir import read_json

pytestmark = pytest.mark.distributed
SECONDS = 300
TOOLS = '[{"name": "ring", "description": "Call", "parameters": {"who": {"description": "Name", "type": "str"}}}]'


@dataclass
class Runs:
    """A run that was trained for two steps, evaluated by one process and, in a copy, by two."""

    folder: Path

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "surefit", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )

    def __call__(self, *arguments: object, code: int = 0) -> str:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=SECONDS)
        assert process.returncode == code, out + err
        return out + err


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("ranks")
    rows = []
    for number in range(31):  # an odd number: the parts are not equal
        answers = json.dumps([{"name": "ring", "arguments": {"who": f"person {number}"}}])
        query = f"Ring person {number}, please" + " now" * (number % 7)
        rows.append({"query": query, "tools": TOOLS, "answers": answers})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "run.yaml").write_text(
        "recipe: function_calling\n"
        "model: {name_or_path: surefit/nano}\n"
        "data: {train: rows.jsonl, eval: 0.6, max_length: 256}\n"
        "train: {max_steps: 2, global_batch_size: 4, learning_rate: 5e-3}\n"
        "checkpoint: {save_steps: 1, save_total_limit: 5}\n"
        "evaluate: {max_new_tokens: 16, batch_size: 2}\n"
        "hardware: {gpu: cpu}\n"
        "output_dir: run\n",
        encoding="utf-8",
    )
    found = Runs(folder)
    found("train", "run.yaml")
    return found


def written(folder: Path) -> dict[str, Any]:
    """Every file of eval/, without what was measured with a clock."""
    files: dict[str, Any] = {}
    for path in sorted((folder / "run" / "eval").rglob("[!.]*.*")):  # locks name the process, and are hidden
        content: Any = path.read_bytes()
        if path.suffix == ".json":
            content = {k: v for k, v in read_json(path).items() if k not in ("seconds", "tokens_per_second")}
        files[path.relative_to(folder).as_posix()] = content
    return files


def test_two_processes_write_what_one_writes(runs: Runs) -> None:
    """The variants, every checkpoint, and a file of answers."""
    commands = [
        ("evaluate", "run", "--variant", "base", "--variant", "adapter"),
        ("evaluate", "run", "--all-checkpoints"),
    ]
    for command in commands:
        runs(*command)
    one = written(runs.folder)
    for name in ("eval/adapter.predictions.jsonl", "eval/step-2.json", "checkpoints.json", "checkpoints.svg"):
        assert f"run/eval/{name}" in one
    (runs.folder / "run" / "eval").rename(runs.folder / "one")
    for command in commands:
        told = runs(*command, "--gpus", 2)
        assert "2 processes, each with a model of its own" in told
        assert told.count("95 % intervals") == 1, "the first speaks for both"
    assert written(runs.folder) == one
    runs("predict", "run", "rows.jsonl", "-o", "one.jsonl", "--adapter")
    runs("predict", "run", "rows.jsonl", "-o", "two.jsonl", "--adapter", "--gpus", 2)
    assert (runs.folder / "two.jsonl").read_bytes() == (runs.folder / "one.jsonl").read_bytes()


def test_a_killed_process_ends_the_job_and_what_all_had_is_kept(runs: Runs) -> None:
    many = ("--variant", "base", "--set", "evaluate.max_new_tokens=200", "--set", "evaluate.batch_size=1")
    process = runs.start("evaluate", "run", *many, "--gpus", 2)
    kept = runs.folder / "run" / "eval" / "eval"
    limit = time.monotonic() + SECONDS
    parts = [kept / "base.partial.jsonl", kept / "base.partial.1.jsonl"]
    while not all(part.exists() and b'"key"' in part.read_bytes() for part in parts):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.02)
    os.kill(_ranks(process.pid)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_ENVIRONMENT
    assert "rank 1 of 2 was killed by SIGKILL" in err
    assert "continue where it was, with: surefit evaluate run" in err
    assert "Traceback" not in err
    before = sum(path.read_bytes().count(b'"key"') for path in kept.glob("base.partial*"))
    assert before > 0
    told = runs("evaluate", "run", *many)
    assert "95 % intervals" in told
    assert not list(kept.glob("*.partial*"))


def _ranks(launcher: int) -> dict[int, int]:
    """Rank → process id of the launcher's children."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if rank := [entry[5:] for entry in environment if entry.startswith(b"RANK=")]:
            found[int(rank[0])] = int(child)
    return found
