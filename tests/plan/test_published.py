"""Predictions against memory and speed that others measured; benchmarks/plan_published.py has all rows of the one,
benchmarks/time_published.py those of an L40S of the other."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoConfig

from surefit.config.schema import LoraSection
from surefit.facts.gpus import GPUS
from surefit.facts.model import catalogue
from surefit.plan.profile import to_device_rates
from surefit.plan.step_config import StepConfig
from surefit.plan.time import count_step_operations, roofline

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


QWEN_7B = {"name": "meta-llama/Llama-2-7b-hf", "vocab_size": 151_936}
"""Qwen-7B's shape: Llama 2's, with another vocabulary."""
QWEN3_8B = {
    "name": "Qwen/Qwen3-4B", "hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {"name": "meta-llama/Llama-3.1-8B"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "gpu", "rank", "rows", "length", "recomputed", "published", "slower", "faster"),
    [
        # QwenLM/Qwen, README, "Profiling of Memory and Speed": LoRA, seconds of eight rows one after the other.
        (QWEN_7B, "a100-80", 64, 1, 256, True, 8 * 256 / 1.2, 0.10, 0.20),
        (QWEN_7B, "a100-80", 64, 1, 1024, True, 8 * 1024 / 2.8, 0.10, 0.35),
        (QWEN_7B, "a100-80", 64, 1, 2048, True, 8 * 2048 / 5.2, 0.10, 0.20),
        (QWEN_7B, "a100-80", 64, 1, 8192, True, 8 * 8192 / 21.3, 0.10, 0.10),
        # Tuned stacks, which a plan of this one must not be far above: NeMo AutoModel (its rank and rows are
        # taken to be these), and Unsloth (taken to recompute).
        (LLAMA, "h100", 16, 4, 2048, False, 12_500, 0.10, 0.05),
        (QWEN3_8B, "h100", 16, 4, 2048, True, 8_900, 0.15, 0.05),
    ],
)
def test_tokens_per_second_on_other_cards(
    shape: dict[str, Any], gpu: str, rank: int, rows: int, length: int, recomputed: bool, published: float,
    slower: float, faster: float,
) -> None:  # fmt: skip
    """Nothing is fitted to these: the rates are those that an L40S reached."""
    config = catalogue()[shape["name"]]["config"] | {key: value for key, value in shape.items() if key != "name"}
    setting = StepConfig(
        AutoConfig.for_model(**config), "bfloat16", LoraSection(r=rank), rows=rows, length=length,
        packed=True, checkpointing=recomputed, fused_lora=True,
    )  # fmt: skip
    planned = setting.tokens / roofline(count_step_operations(setting)[0], to_device_rates(GPUS[gpu]))[0]
    assert (1 - slower) * published < planned < (1 + faster) * published
