"""benchmarks/data_scale.py in miniature: the peers' rows are the same, and so are the bytes after `kill -9`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/data_scale.py"


@pytest.mark.long
def test_the_benchmark_runs_in_miniature(tmp_path: Path) -> None:
    pytest.importorskip("datatrove")
    (one,) = measured(tmp_path).values()
    assert one["one_worker"]["sha256"] == one["two_workers"]["sha256"]
    for peer in ("datasets_map", "datatrove"):
        assert one[peer]["same"]
        assert [one[peer][key] for key in ("rows", "tokens")] == [one["one_worker"][key] for key in ("rows", "tokens")]
    assert one["killed"]["same_bytes"] == one["killed"]["moments"] == 2
    assert one["many"]["rows"] == 10**9
    assert one["many"]["peak_mib"] < 1500
    assert one["training"]["shards"]["first_step_seconds"] > 0
    assert not list(tmp_path.glob("work-*"))
    assert measured(tmp_path) == {"1000000": one}, "what has been measured was measured again"


def measured(cache: Path) -> dict[str, dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), "--rows-mb", "1", "--kills", "2", "--cache", str(cache), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found
