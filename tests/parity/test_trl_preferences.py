"""Losses and gradients of preference objectives equal TRL's, where it is installed; tests/numerics/test_preferences.py
and test_kto.py have the papers' formulas in float64 for everywhere else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="compares with TRL")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "preference.py"


@pytest.fixture(scope="module")
def preference() -> Any:
    spec = importlib.util.spec_from_file_location("preference_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's trainers ask accelerate, which takes these variables, left by whoever ran before, for a launcher's."""
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "name",
    [
        "dpo sigmoid",
        "dpo ipo",
        "dpo sigmoid_norm",
        "dpo sigmoid + sft",
        "orpo",
        "simpo",
        "kto",
        "kto weighted",
    ],
)
def test_trl_computes_the_same(preference: Any, name: str, packed: bool) -> None:
    _, loss_difference, gradient_difference = preference.compare(name, packed)
    assert loss_difference <= preference.LIMIT
    assert gradient_difference <= preference.LIMIT
