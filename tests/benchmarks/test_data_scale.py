"""benchmarks/data_scale.py in miniature: the peer's rows are the same, and so are the bytes after `kill -9`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/data_scale.py"


@pytest.mark.long
def test_the_benchmark_runs_in_miniature(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--rows-mb", "1", "--kills", "2", "--cache", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
    (found,) = json.loads(done.stdout)
    one, two, peer = found["one_worker"], found["two_workers"], found["datasets_map"]
    assert one["sha256"] == two["sha256"]
    assert peer["same_rows"]
    assert (one["rows"], one["tokens"]) == (peer["rows"], peer["tokens"])
    assert found["killed"]["same_bytes"] == found["killed"]["moments"] == 2
    assert found["many"]["rows"] == 10**9
    assert found["many"]["peak_mib"] < 1500
    assert found["first_step"]["seconds"] > 0
    assert not list(tmp_path.glob("work-*"))
