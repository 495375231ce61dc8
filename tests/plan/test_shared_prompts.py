"""The plan of pairs that share their prompts: the batch of the simulation is the collator's, and what it saves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import LoraSection, ObjectiveSection
from surefit.data.tokens.collate import describe_pairs
from surefit.data.tokens.lengths import sample_lengths
from surefit.data.tokens.prompt_share import worth_sharing
from surefit.data.tokens.shared_prompts import collate_shared
from surefit.facts.flops import TrainingFlops
from surefit.facts.step_shape import StepShape, micro_batch_shape, shared_tokens
from surefit.facts.tokenizer import facts_of_tokenizer
from surefit.plan.building import _packed
from surefit.plan.simulate import simulate_memory
from surefit.plan.step_config import StepConfig
from surefit.stages.run_context import load_run_context

CONFIG = LlamaConfig(
    vocab_size=8_192, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
DPO = StepConfig(
    CONFIG, "float32", LoraSection(r=4), 8, 256, packed=True, micro_batches=2, evaluates=False, cuda=False,
    objective=ObjectiveSection(name="dpo", beta=0.1),
)  # fmt: skip


def test_the_simulated_batch_is_the_one_that_is_collated() -> None:
    setting = replace(DPO, rows=4, length=20, shared=12)
    labels = np.where(np.arange(20) < 12, -100, 1)
    items = [(np.ones(20, np.int64), labels)] * 4
    expected = collate_shared(items) | describe_pairs(items, np.zeros((2, 2), np.float32))
    made = _packed(setting)
    assert made.keys() == expected.keys()
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor):
            assert made[name] == value, name
        elif name not in ("labels", "loss_rows"):
            assert made[name].dtype == value.dtype, name
            assert torch.equal(made[name], value), name
    assert made["loss_rows"].shape == expected["loss_rows"].shape
    assert setting.tokens == expected["input_ids"].numel() == 2 * 28


def test_a_step_needs_less_memory_and_less_arithmetic() -> None:
    two, once = (simulate_memory(replace(DPO, shared=shared), merge=False) for shared in (0, 200))
    assert once.allocated < 0.8 * two.allocated
    flops = TrainingFlops(token=100, supervised=10, pair=1, windows=(None, 4))
    assert flops.of([10, 12], 6, [8]) == flops.of([10], 6) + 100 * 4 + (9 + 10 + 11 + 12) + 4 * 4


def resolved(folder: Path, *changes: str) -> Any:
    path = folder / "run.yaml"
    path.write_text(
        "model: {name_or_path: surefit/nano}\ndata: {train: surefit/shorter-answers, eval: 0.2, max_length: 100}\n"
        "objective: dpo\ntrain: {global_batch_size: 16, per_device_train_batch_size: 4}\nhardware: {gpu: cpu}\n"
        f"output_dir: {folder}/run\n",
        encoding="utf-8",
    )
    found = load_run_context(path, list(changes))
    assert found.resolved is not None
    return found


def test_a_micro_batch_holds_more_pairs(tmp_path: Path) -> None:
    found: ResolvedConfig = resolved(tmp_path).resolved
    assert micro_batch_shape(found) == StepShape(8, 100, 4)
    once = replace(found, shared=0.25)
    assert shared_tokens(once, 100) == 50
    shape = micro_batch_shape(once)  # 800 tokens hold 5.3 pairs of 150
    assert shape == StepShape(12, 91, 3, 50)
    assert 790 <= shape.tokens <= 800
    speed = found.config.speed.model_copy(update={"shared_prompts": False})
    apart = found.config.model_copy(update={"speed": speed})
    assert micro_batch_shape(replace(once, config=apart)) == StepShape(8, 100, 4)


def test_the_sample_knows_what_sharing_saves(tmp_path: Path) -> None:
    found = resolved(tmp_path)
    lengths = sample_lengths(found.rows, found.recipe, found.resolved.config, facts_of_tokenizer(found.model))
    assert lengths is not None
    assert 0.1 < lengths.shared < 0.5


@pytest.mark.parametrize(("prompt", "tokens", "left_out"), [(64, 228, 64), (22, 228, 0), (23, 228, 23), (0, 5, 0)])
def test_a_short_prompt_is_not_worth_sharing(prompt: int, tokens: int, left_out: int) -> None:
    assert worth_sharing(prompt, tokens) == left_out
