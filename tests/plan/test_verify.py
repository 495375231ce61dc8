"""Plan against actual: what a run directory says, phase by phase, and what could not be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefit.core.errors import ConfigError
from surefit.core.rundir import RunDir, append_jsonl
from surefit.plan.verify import measure_plan_deviations

PLAN: dict[str, Any] = {
    "device": {"name": "H100 80 GB"},
    "estimate": {
        "phases": [
            {"name": "load", "allocated_bytes": 100, "reserved_bytes": 120},
            {"name": "step", "allocated_bytes": 300, "reserved_bytes": 320},
        ],
        "peak": {"terms": [{"term": "weights", "bytes": 90}, {"term": "optimizer", "bytes": 20}]},
        "low_bytes": 300,
        "high_bytes": 400,
    },
    "time": {"seconds_per_step": 2.0, "parts": {"steps": 6.0}},
    "steps": {"total_steps": 3},
    "disk": [{"term": "adapter", "bytes": 50}],
}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "one")
    for step, seconds in enumerate((9.0, 1.0, 1.2), start=1):
        append_jsonl(directory.metrics, {"step": step, "loss": 1.0, "seconds": seconds})
    directory.adapter.mkdir()
    (directory.adapter / "adapter_model.safetensors").write_bytes(bytes(40))
    (directory.adapter / "tokenizer.json").write_bytes(bytes(1000))
    return directory


def on_gpu(run: RunDir, **step: int) -> None:
    load = {"allocated": 110, "reserved": 120, "held": 100}
    append_jsonl(run.events, {"stage": "train", "event": "memory", "phases": {"load": load, "step": step}})


def test_every_phase_and_term_that_was_measured(run: RunDir, place) -> None:
    on_gpu(run, allocated=300, reserved=400, held=100)
    found = measure_plan_deviations(PLAN, place()[0].resolved, run)
    rows = {row.what: row for row in found.rows}
    assert (rows["load: allocated"].planned, rows["load: allocated"].actual) == (100, 110)
    assert rows["step: allocated"].error == 0
    assert rows["step: reserved"].error == pytest.approx(-0.2)
    assert rows["between steps: weights, adapter, optimizer"].error == pytest.approx(0.1)
    assert rows["seconds per step (median)"].actual == 1.2, "the slow first step is no typical one"
    assert rows["seconds in all steps"].error == pytest.approx(6 / 11.2 - 1)
    assert rows["adapter on disk"].error == pytest.approx(0.25), "the tokenizer is not the adapter"
    assert found.widest is not None
    assert found.widest.what == "seconds per step (median)"
    assert found.notes == ()


def test_a_resumed_run_counts_with_its_fullest_attempt(run: RunDir, place) -> None:
    on_gpu(run, allocated=300, reserved=320, held=100)
    on_gpu(run, allocated=280, reserved=400, held=100)
    rows = {row.what: row for row in measure_plan_deviations(PLAN, place()[0].resolved, run).rows}
    assert (rows["step: allocated"].actual, rows["step: reserved"].actual) == (300, 400)


def test_on_a_cpu_memory_is_information_only(run: RunDir, place) -> None:
    append_jsonl(run.events, {"stage": "train", "event": "memory", "phases": {"step": {"resident": 350}}})
    run.plan.write_text(json.dumps({"device": {"name": "AMD EPYC"}}))
    found = measure_plan_deviations({**PLAN, "time": None}, place()[0].resolved, run)
    assert not [row for row in found.rows if "allocated" in row.what]
    notes = " ".join(found.notes)
    for part in ("measured on CUDA only", "350 bytes", "planned for AMD EPYC", "`surefit calibrate` measures it"):
        assert part in notes


def test_on_a_cpu_the_whole_process_is_compared(run: RunDir, place) -> None:
    phases = {"dry step": {"resident": 330}, "step": {"resident": 350}}
    append_jsonl(run.events, {"stage": "train", "event": "memory", "phases": phases})
    alone = {"likely_bytes": 343, "low_bytes": 320, "high_bytes": 366}
    found = measure_plan_deviations({**PLAN, "estimate": {"phases": [], "training": alone}}, place()[0].resolved, run)
    (row,) = [row for row in found.rows if row.what == "the process's RAM"]
    assert (row.planned, row.actual) == (343, 350)
    assert "planned 320 to 366" in " ".join(found.notes)


def test_a_run_without_a_step_has_nothing_to_compare(tmp_path: Path, place) -> None:
    with pytest.raises(ConfigError, match="has no training steps"):
        measure_plan_deviations(PLAN, place()[0].resolved, RunDir(tmp_path / "nowhere"))
