"""The plan of a CPU run beside the run: real processes, trained through the command."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from surefit import nano
from surefit.core.errors import SureFitError

BENCHMARK = Path(__file__).parents[2] / "benchmarks/plan_real.py"


@pytest.fixture(scope="module")
def plan_real() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_real", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_real"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.platform != "linux", reason="the plan is of glibc's malloc")
@pytest.mark.slow
def test_a_real_run_of_the_built_in_model_takes_what_was_planned(plan_real: ModuleType, tmp_path: Path) -> None:
    case = plan_real.Case("nano", 256, 32, set=plan_real.FULL | plan_real.KEPT)
    found = plan_real.run(case, str(nano.PATH), tmp_path)
    assert "failed" not in found, found["failed"]
    assert found["how"] == "simulation"
    assert found["low"] < found["actual"] < found["high"]
    assert abs(plan_real.error(found)) < 0.10
    assert found["tokens"] > 0.9 * 32 * 256


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the plan is of glibc's malloc")
@pytest.mark.parametrize("name", ["lora-256x2-packed-selective", "full-256-whole-logits"])
def test_a_run_of_a_real_model_takes_what_was_planned(plan_real: ModuleType, name: str, tmp_path: Path) -> None:
    from surefit.model.tokenizer import model_path

    try:
        model = model_path(plan_real.MODEL)
    except SureFitError as error:
        pytest.skip(str(error))
    if not Path(model).is_dir():
        pytest.skip(f"{plan_real.MODEL} is not on this machine: the extra real")
    found = plan_real.run(next(case for case in plan_real.CASES if case.name == name), model, tmp_path)
    assert "failed" not in found, found["failed"]
    assert found["low"] < found["actual"] < found["high"]
    assert plan_real.width(found) <= plan_real.WIDEST


def test_the_cases_are_what_was_promised(plan_real: ModuleType) -> None:
    cases = plan_real.CASES
    assert len(cases) >= 12
    assert len({case.name for case in cases}) == len(cases)
    assert (min(case.length for case in cases), max(case.length for case in cases)) == (256, 4096)
    assert {case.packed for case in cases} == {True, False}
    kinds = {case.set.get("train.gradient_checkpointing") for case in cases}
    assert kinds == {False, True, "selective", "offload"}
    assert {case.set.get("model.quantization", "none") for case in cases} >= {"none", "nf4"}
    assert {case.set.get("speed.chunked_loss", True) for case in cases} == {True, False}
    assert {case.set.get("train.method", "lora") for case in cases} == {"lora", "full"}


def test_its_report_says_what_was_missed(plan_real: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    gb = 10**9
    good = {"name": "good", "tokens": 512, "planned": 2 * gb, "low": 1.9 * gb, "high": 2.1 * gb, "actual": 2.02 * gb}
    high = {**good, "name": "high", "actual": 2.2 * gb}
    seconds = {"seconds": 60.0}
    assert plan_real.report([good | seconds])["reached"]
    summary = plan_real.report([good | seconds, high | seconds, {"name": "bad", "failed": ["no room"]}])
    assert (summary["above_the_upper_end"], summary["failed"], summary["reached"]) == (["high"], 1, False)
    assert "failed: no room" in capsys.readouterr().out
