"""The GPU benchmark: enough configurations, told apart by name, and honest where there is no GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks/plan_accuracy.py"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    specification = importlib.util.spec_from_file_location("plan_accuracy", BENCHMARK)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["plan_accuracy"] = module
    specification.loader.exec_module(module)
    return module


def test_at_least_sixty_configurations(benchmark: Any) -> None:
    names = [case.name for case in benchmark.cases()]
    assert len(names) == len(set(names)) >= 60


def test_without_a_gpu_it_says_so() -> None:
    listed = subprocess.run([sys.executable, BENCHMARK, "--list"], capture_output=True, text=True, check=True)
    assert len(listed.stdout.split()) >= 60
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, BENCHMARK], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "not measured: no GPU\n")


def test_the_worst_comes_first(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def result(name: str, factor: float) -> dict[str, Any]:
        def phases(bytes_each: float) -> dict[str, Any]:
            return {phase: {"allocated": bytes_each, "reserved": bytes_each} for phase in benchmark.PHASES}

        measured = {"phases": phases(100), "seconds": 2.0}
        return {"name": name, "measured": measured, "predicted": {"phases": phases(100 * factor), "seconds": 2.0}}

    results = [result("good", 1.001), result("bad", 0.9), {"name": "lost", "failed": ["out of memory"]}]
    summary = benchmark.report(results)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["bad", "good", "lost"]
    assert (summary["compared"], summary["failed"]) == (2, 1)
    assert summary["allocated"]["max"] == pytest.approx(0.1)
