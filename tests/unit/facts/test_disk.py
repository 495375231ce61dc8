"""Planned bytes on disk against the files of real runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_run

from surefit.config.resolve import ResolvedConfig
from surefit.facts.disk import disk_terms
from surefit.facts.model import model_facts
from surefit.generate.save import save_model

LLAMA_8B = "meta-llama/Llama-3.1-8B"
WIDE = {"hidden_size": 128, "intermediate_size": 256}


def sizes(resolved: ResolvedConfig, model: str) -> dict[str, int]:
    return {term.term: term.bytes for term in disk_terms(resolved, model_facts(model))}


def bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_disk_of_8b_lora(make_resolved: Callable[..., ResolvedConfig]) -> None:
    single = sizes(make_resolved(LLAMA_8B, "lora.r=8", "model.dtype=float32"), LLAMA_8B)
    assert single["adapter"] == pytest.approx(83.9e6, rel=0.002)
    assert single["checkpoints"] / 3 - single["adapter"] == pytest.approx(167.8e6, rel=0.003)
    half = sizes(make_resolved(LLAMA_8B, "lora.r=8", "checkpoint.save_total_limit=4"), LLAMA_8B)
    assert half["adapter"] == pytest.approx(41.9e6, rel=0.003)
    assert half["checkpoints"] / 5 - half["adapter"] == pytest.approx(167.8e6 + 83.9e6, rel=0.003)
    assert half["merged"] == pytest.approx(16_060_522_496, rel=1e-5)


def test_disk_of_full_training(make_resolved: Callable[..., ResolvedConfig]) -> None:
    disk = sizes(make_resolved(LLAMA_8B, "train.method=full"), LLAMA_8B)
    assert set(disk) == {"checkpoints", "model", "tokenizer"}
    assert disk["checkpoints"] == pytest.approx(3 * (2 + 4 + 8) * 8_030_261_248, rel=1e-4)


def test_in_parts_a_checkpoint_has_more_headers(make_resolved: Callable[..., ResolvedConfig]) -> None:
    """Two files of each process, every one with the names of all tensors and which part of them it has."""
    full = ("train.method=full", "hardware.count=4")
    whole, parts = (
        sizes(make_resolved(LLAMA_8B, *full, f"parallel.mode={mode}"), LLAMA_8B)["checkpoints"] / 3
        for mode in ("ddp", "fsdp")
    )
    tensors = 291 * (1 + 4)  # weights; masters, two moments and a step
    assert 4 * 2 * 80 * tensors < parts - whole < 4 * 2 * 160 * tensors


def test_no_more_checkpoints_are_planned_than_the_run_writes(make_resolved: Callable[..., ResolvedConfig]) -> None:
    def checkpoints(every: int) -> int:
        limits = ("train.global_batch_size=8", "train.per_device_train_batch_size=8", f"checkpoint.save_steps={every}")
        return sizes(make_resolved(LLAMA_8B, *limits, rows=80), LLAMA_8B)["checkpoints"]

    assert checkpoints(1) == checkpoints(4) == 3 * checkpoints(10)
    assert checkpoints(5) == 2 * checkpoints(10)


def test_an_unknown_model_has_no_terms(make_resolved: Callable[..., ResolvedConfig]) -> None:
    model = replace(model_facts(LLAMA_8B), parameters=None, linear_modules={})
    assert disk_terms(make_resolved(LLAMA_8B), model) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_a_run_directory_has_the_size_that_is_planned(
    make_resolved: Callable[..., ResolvedConfig], tmp_path: Path, kind: str, dtype: str
) -> None:
    base = tiny_run.save_base(tmp_path / "base", **WIDE)
    adapter = {"use_dora": kind == "dora"}
    kind = "lora" if kind == "dora" else kind
    config = tiny_run.config(base, tmp_path / "out", kind, dtype, adapter=adapter)
    run = tiny_run.training(config)
    run.fit()
    resolved = replace(
        make_resolved(str(base)), config=config, gradient_accumulation_steps=2, total_steps=run.total_steps
    )
    planned = sizes(resolved, str(base))
    kept = config.checkpoint.save_total_limit
    assert bytes_in(run.run.checkpoints) == pytest.approx(planned["checkpoints"] * kept / (kept + 1), rel=0.01)
    result = run.run.adapter if kind == "lora" else run.run.model
    named = planned["adapter" if kind == "lora" else "model"] + planned["tokenizer"] / (2 if kind == "lora" else 1)
    assert bytes_in(result) == pytest.approx(named, rel=0.01)
    assert run.run.metrics.stat().st_size == pytest.approx(planned["log"], rel=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_model_has_the_size_that_is_planned(
    make_resolved: Callable[..., ResolvedConfig], tmp_path: Path, dtype: str
) -> None:
    base = tiny_run.save_base(tmp_path / "base", **WIDE)
    merged = tmp_path / "merged"
    config = tiny_run.config(base, tmp_path / "out", "lora", dtype)
    save_model(tiny_run.training(config).model.unload(), tiny_run.tokenizer(), base, merged)
    planned = sizes(replace(make_resolved(str(base)), config=config, total_steps=None), str(base))
    assert bytes_in(merged) == pytest.approx(planned["merged"] + planned["tokenizer"] / 2, rel=0.01)
