"""What a LoRA step moves and launches on a GPU, and where it waits, counted by benchmarks/traffic.py."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from surefit.config.schema import LoraSection
from surefit.plan.step_config import StepConfig

BENCHMARK = Path(__file__).parents[2] / "benchmarks/traffic.py"
SHAPE = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
)  # fmt: skip
ROWS, LENGTH = 4, 256
LORA = LoraSection(r=8, target_modules="all-linear")
STEP = "surefit/train/step.py"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    specification = importlib.util.spec_from_file_location("traffic", BENCHMARK)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["traffic"] = module
    specification.loader.exec_module(module)
    yield module
    del sys.modules["traffic"]


def setting_of(capability: tuple[int, int], packed: bool = True) -> StepConfig:
    dtype = "bfloat16" if capability >= (8, 0) else "float16"
    return StepConfig(
        SHAPE, dtype, LORA, ROWS, LENGTH, packed=packed, padded=not packed, fused_lora=True, capability=capability
    )


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0)], ids=str)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_the_processor_waits_once_per_step(benchmark: Any, capability: tuple[int, int], packed: bool) -> None:
    waits = benchmark.waits_of(setting_of(capability, packed))
    assert [(wait.per_step, wait.place.partition(":")[0]) for wait in waits] == [(1, STEP)], "loss and norm, at once"
    assert not any(wait.per_micro_batch or wait.per_layer for wait in waits)


@pytest.mark.parametrize(("packed", "asked"), [(True, 1), (False, 2)], ids=["packed", "padded"])
def test_transformers_asks_the_gpu_what_it_is_not_told(
    benchmark: Any, packed: bool, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed rows for their documents, padded ones twice for their padding: what `compat.rows_known` is there for."""
    monkeypatch.setattr("surefit.train.loss.avoid_mask_syncs", lambda batch: nullcontext())
    micro = [wait for wait in benchmark.waits_of(setting_of((9, 0), packed)) if wait.per_micro_batch]
    assert sum(wait.per_micro_batch for wait in micro) == asked
    assert all(wait.place.startswith("transformers/masking_utils.py:") for wait in micro)


def test_one_more_wait_is_seen_and_named(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaMLP.forward

    def waiting(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) * float(x.abs().amax())

    monkeypatch.setattr(LlamaMLP, "forward", waiting)
    more = [wait for wait in benchmark.waits_of(setting_of((9, 0))) if wait.per_layer]
    assert [wait.per_layer for wait in more] == [1]
    assert "modeling_llama.py" in more[0].place
    assert "surefit/train/loss.py" in more[0].place


# For each layer: launches of a micro batch, and bytes per token and number of the hidden state, all of November 2026.
LAYER = {(7, 5): (176, 446), (8, 0): (151, 425), (9, 0): (151, 425)}


@pytest.mark.parametrize("capability", LAYER, ids=str)
def test_a_layer_moves_and_launches_no_more_than_it_did(benchmark: Any, capability: tuple[int, int]) -> None:
    setting, sums = setting_of(capability), []
    for layers in (2, 3):
        counted, _ = benchmark.count_step_operations(setting.with_layers(layers))
        rows = [row for row in benchmark.rows_of(counted, setting.tokens) if row.kind == "elementwise"]
        launches = sum(times * operation.kernels for operation, times in counted.items())
        sums.append((launches, sum(row.megabytes_per_token for row in rows) * 1e6 / SHAPE.hidden_size))
    launches, moved = (more - few for few, more in zip(*sums, strict=True))
    most_launches, most_moved = LAYER[capability]
    assert 0 < launches <= most_launches
    assert 0 < moved <= most_moved


@pytest.mark.parametrize(
    ("kernels", "operator", "each"),
    [(False, "linalg_vector_norm", 2), (True, "float8_rows", 3)],
    ids=["plain", "fused"],
)
def test_projections_that_share_their_input_quantise_it_once(
    benchmark: Any, kernels: bool, operator: str, each: int
) -> None:
    """A layer has four inputs: of q, k and v; of o; of gate and up; of down. `each`: bytes per number. Weights are made
    of float8 ones for the gradient alone, 3 bytes per number in one pass."""
    setting, sums = replace(setting_of((9, 0)), quantization="fp8", kernels=kernels), []
    for layers in (2, 3):
        counted, _ = benchmark.count_step_operations(setting.with_layers(layers))
        found = {row.operator: row for row in benchmark.rows_of(counted, setting.tokens)}
        made = found["float8_weights"].megabytes_per_token if kernels else 0.0
        sums.append((found[operator].launches, found[operator].megabytes_per_token * 1e6, made * 1e6 * setting.tokens))
    launches, moved, made = (more - few for few, more in zip(*sums, strict=True))
    hidden, queries, keys, width = 256, 256, 64, 768
    assert launches == 4
    assert moved == pytest.approx(each * (2 * hidden + queries + width), rel=0.02)
    if kernels:
        assert made == pytest.approx(3 * hidden * (2 * queries + 2 * keys + 3 * width), rel=0.01)


def test_the_loss_moves_no_more_per_logit_than_it_did(benchmark: Any) -> None:
    """Of an entry of the vocabulary and a token: 18 bytes besides the matrix products, 6 to float32, 8 for the
    log-probability and 4 for the softmax in place."""
    setting, sums = setting_of((9, 0)), []
    for vocabulary in (512, 1024):
        shape = LlamaConfig(**{**SHAPE.to_dict(), "vocab_size": vocabulary})
        counted, _ = benchmark.count_step_operations(replace(setting, config=shape))
        rows = [row for row in benchmark.rows_of(counted, setting.tokens) if row.kind == "elementwise"]
        sums.append(sum(row.megabytes_per_token for row in rows) * 1e6 / vocabulary)
    few, more = sums
    assert 0 < 2 * more - few <= 18.1


@pytest.mark.parametrize(("model", "most", "launches"), [("1b", 6.74, 115), ("8b", 18.83, 208)])
def test_with_fused_kernels_the_goal_is_met(benchmark: Any, model: str, most: float, launches: int) -> None:
    found = benchmark.traffic(benchmark.setting_of(model, (9, 0), kernels=True))
    assert most <= benchmark.GOALS[model][1]
    assert 0 < found["kinds"]["elementwise"]["megabytes_per_token"] <= most
    assert found["launches_per_thousand_tokens"] <= launches
    assert [(wait["per_step"], wait["per_micro_batch"], wait["per_layer"]) for wait in found["waits"]] == [(1, 0, 0)]


def test_it_prints_that_nothing_is_measured(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(BENCHMARK), "--json"])
    assert benchmark.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Counted, not measured")
    assert any(line.startswith("all: elementwise") and "goal: from 18.3 to at most 8" in line for line in lines)
    found = json.loads(lines[-1])
    assert (found["counted"], found["measured"], found["goal"]) == (True, False, 8.0)
    assert found["kinds"]["elementwise"]["megabytes_per_token"] <= 16.94
    assert found["kinds"]["product"]["megabytes_per_token"] <= 9.16
    assert found["launches_per_thousand_tokens"] <= 178
    assert found["launches"] == sum(row["launches"] for row in found["operators"])
