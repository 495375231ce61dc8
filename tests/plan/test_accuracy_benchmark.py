"""The GPU benchmark: enough configurations, told apart by name, and honest where there is no GPU."""

from __future__ import annotations

import argparse
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


def test_twelve_of_them_have_every_value_of_every_switch(benchmark: Any) -> None:
    cases = {case.name: case for case in benchmark.cases()}
    twelve = [cases[name] for name in benchmark.TWELVE]
    assert len(set(benchmark.TWELVE)) == 12
    for field in ("shape", "kind", "recomputed", "packed", "loss", "expandable"):
        assert {getattr(case, field) for case in twelve} == {getattr(case, field) for case in cases.values()}, field


def test_measured_case_by_case_against_what_was_predicted_before(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    done = subprocess.CompletedProcess([], 0, '{"phases": {}, "seconds": 1.0, "gpu": "NVIDIA H200"}\n', "")
    limits: list[float] = []

    def child(command: list[str], *, timeout: float, **options: Any) -> Any:
        limits.append(timeout)
        if "8B" in command[-1]:
            raise subprocess.TimeoutExpired(command, timeout)
        return done

    monkeypatch.setattr(benchmark.subprocess, "run", child)
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: None)
    cases = {case.name: case for case in benchmark.cases()}
    chosen = [cases[name] for name in benchmark.TWELVE]
    asked = argparse.Namespace(results=tmp_path / "results.jsonl", limit=90.0)
    found = benchmark.measure_all(chosen, asked, {chosen[0].name: {"seconds": 2.0}})
    assert found[0]["predicted"] == {"seconds": 2.0}
    assert "predicted" not in found[1], "nothing is calculated where minutes count"
    assert {case["name"] for case in found if "failed" in case} == {
        case.name for case in chosen if case.shape == "8B" and case.kind != "qlora"
    }
    assert {case["kind"] for case in found if "skipped" in case} == {"qlora"}
    with asked.results.open("a") as file:
        file.write('{"name": "1B-')
    calls = len(limits)
    assert benchmark.measure_all(chosen, asked, {}) == found
    assert len(limits) == calls


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_the_base_is_loaded_as_in_training(
    benchmark: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through `load_model`, from a file without weights, which transformers' warm-up of the allocator is no part of."""
    import torch
    from transformers import LlamaConfig, modeling_utils

    from surefit.facts.hardware import hardware_facts
    from surefit.model.quantize import frozen_matrix

    if kind == "qlora":
        pytest.importorskip("bitsandbytes")
    shape = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    monkeypatch.setattr(benchmark, "_config", lambda case: shape)
    monkeypatch.setattr(modeling_utils, "caching_allocator_warmup", lambda *_: pytest.fail("the allocator is warmed"))
    case = next(case for case in benchmark.cases() if case.kind == kind)
    model = benchmark._model(case, benchmark.resolved(case).config, hardware_facts("cpu", tmp_path))
    assert model.config.num_hidden_layers == 2
    for layer in (model.model.layers[0].self_attn.q_proj, model.model.layers[1].mlp.down_proj):
        matrix = frozen_matrix(layer).float()
        assert matrix.isfinite().all()
        assert 0.005 < matrix.std() < 0.05
    assert (model.model.layers[0].self_attn.q_proj.weight.dtype == torch.uint8) == (kind == "qlora")


def test_a_hollow_base_takes_no_room(benchmark: Any, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    benchmark.write_hollow_base(LlamaConfig(num_hidden_layers=2, vocab_size=32_000), tmp_path)
    file = (tmp_path / "model.safetensors").stat()
    assert file.st_size > 1_000_000_000
    assert file.st_blocks * 512 < 1_000_000
