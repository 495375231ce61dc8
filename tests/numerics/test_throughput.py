"""The throughput benchmark in miniature: SureFit and its peer compute what the float32 reference computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "throughput.py"


@pytest.mark.slow
def test_no_stack_is_void() -> None:
    pytest.importorskip("trl")
    command = [sys.executable, str(BENCHMARK), "--workload", "cpu-mini", "--lengths", "mixed", "--repeats", "1"]
    done = subprocess.run([*command, "--peers", "trl", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["stack"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert rows.keys() == {"surefit", "trl-default", "trl-tuned"}
    assert all(row["void"] is None and row["tokens_per_second"] > 0 for row in rows.values()), rows
