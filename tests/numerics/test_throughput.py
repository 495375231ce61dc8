"""The throughput benchmarks in miniature: SureFit and its peer compute what the float32 reference computes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BENCHMARK = BENCHMARKS / "throughput.py"


@pytest.mark.slow
def test_no_stack_is_void() -> None:
    pytest.importorskip("trl")
    command = [sys.executable, str(BENCHMARK), "--workload", "cpu-mini", "--lengths", "mixed", "--repeats", "1"]
    done = subprocess.run([*command, "--peers", "trl", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["stack"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert rows.keys() == {"surefit", "trl-default", "trl-tuned"}
    assert all(row["void"] is None and row["tokens_per_second"] > 0 for row in rows.values()), rows


def compared(monkeypatch: pytest.MonkeyPatch, theirs: list[float]) -> dict[str, Any]:
    """A peer's losses beside ours, which part from themselves by 1e-4 in the second step when nudged."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import real_peer

    ours = [{"losses": [2.0, 1.0, 0.5]}, {"losses": [2.0, 1.0001, 0.5]}]
    found: dict[str, Any] = real_peer.curves(ours, [{"losses": theirs}, {"losses": theirs}])
    return found


def test_two_curves_may_part_by_four_times_what_rounding_has_done_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(monkeypatch, [2.0002, 1.0003, 0.5003])["agree"]
    assert not compared(monkeypatch, [2.0003, 1.0, 0.5])["agree"], "before anything was nudged apart: a share of 1e-4"
    assert not compared(monkeypatch, [2.0, 1.0005, 0.5])["agree"]
    assert not compared(monkeypatch, [2.0, 1.0, 0.5005])["agree"]


def test_what_was_measured_is_kept_and_what_failed_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import real_peer

    with pytest.raises(SystemExit, match="1-surefit failed: no memory"):
        real_peer.kept(tmp_path, "1-surefit", lambda: {"error": "no memory"})
    assert real_peer.kept(tmp_path, "1-surefit", lambda: {"loss": 1.0}) == {"loss": 1.0}
    assert real_peer.kept(tmp_path, "1-surefit", lambda: {"loss": 2.0}) == {"loss": 1.0}


def test_a_call_that_was_ended_is_gone_on_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import throughput

    calls: list[str] = []

    def run_child(stack: str, job: dict[str, Any]) -> dict[str, Any]:
        calls.append(stack)
        return {"error": "no memory"} if stack == "trl-tuned" else {"seconds": [1.0]}

    monkeypatch.setattr(throughput, "run_child", run_child)
    options = argparse.Namespace(results=tmp_path / "results.jsonl", workload="cpu-mini", lengths="full", set=[])
    for _ in range(2):
        assert throughput.kept(options, "surefit", 0, {}) == {"seconds": [1.0]}
        assert throughput.kept(options, "trl-tuned", 0, {}) == {"error": "no memory"}
    assert calls == ["surefit", "trl-tuned", "trl-tuned"]
    options.set = ["speed.compile=true"]
    throughput.kept(options, "surefit", 0, {})
    assert calls[-1] == "surefit", "with other settings it is another measurement"


@pytest.mark.slow
def test_in_memory_the_peer_starts_where_surefit_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_stages
    import throughput

    job = gpu_stages.made_job(tmp_path, gpu_stages.workload_of("cpu-mini", 1, 1), profile=str(tmp_path / "table.txt"))
    ours, theirs = (throughput.run_child(stack, job, loud=True) for stack in ("surefit", "trl-tuned"))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert "aten::mm" in (tmp_path / "table.txt").read_text()
    assert not (tmp_path / "model/model.safetensors").exists(), "nothing is written to the disk and read again"
