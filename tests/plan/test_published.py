"""Predictions against GPU memory that others measured: see benchmarks/plan_published.py, which takes all rows."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT / "../shared/data/planner/peft_metamathqa_l40s.jsonl"
FITTED_LENGTH = 700
"""What the benchmark fits on the row of LoRA of rank 32."""


@pytest.fixture(scope="module")
def benchmark_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_published", ROOT / "benchmarks/plan_published.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    if not DATA.exists():
        pytest.skip("the published measurements are not here")
    return {row["name"]: row for row in map(json.loads, DATA.read_text(encoding="utf-8").splitlines())}


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("lora--llama-3.2-3B-rank64", 0.003),
        pytest.param("ia3--llama-3.2-3B-all-attn-5k-lr0.005", 0.003, marks=pytest.mark.slow),
        ("full-finetuning--llama-3.2-3B-lr_0.00001", 0.005),
    ],
)
def test_a_run_that_was_measured(
    benchmark_module: ModuleType, rows: dict[str, dict[str, Any]], name: str, limit: float
) -> None:
    predicted = benchmark_module.predict(rows[name], FITTED_LENGTH)
    assert predicted == pytest.approx(rows[name]["accelerator_memory_max_reserved"], rel=limit)
