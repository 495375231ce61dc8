"""The plan of a run on pairs: the memory of a step is that of twice as many rows, and the reference pass takes time."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from surefit.config.schema import LoraSection, ObjectiveSection
from surefit.facts.sharding import ShardingLayout
from surefit.plan.build_plan import build_plan
from surefit.plan.planner import Planner
from surefit.plan.simulate import simulate_memory
from surefit.plan.step_config import StepConfig
from surefit.plan.time import count_step_operations
from surefit.stages.run_context import load_run_context

CONFIG = LlamaConfig(
    vocab_size=8_192, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
SFT = StepConfig(CONFIG, "bfloat16", LoraSection(r=4), 8, 256, packed=True, micro_batches=2, evaluates=False)


@pytest.mark.parametrize("name", ["dpo", "orpo"])
@pytest.mark.parametrize("changes", [{}, {"adapter": None}, {"packed": False, "padded": True}], ids=str)
def test_a_step_of_pairs_needs_the_memory_of_its_sequences(name: Any, changes: dict[str, Any]) -> None:
    """The tokens' losses are a few numbers more than their sum; the head's gradient is made one pass later."""
    rows = replace(SFT, **changes)
    alone = simulate_memory(rows, merge=False)
    pairs = simulate_memory(replace(rows, objective=ObjectiveSection(name=name, beta=0.1)), merge=False)
    assert pairs.allocated == pytest.approx(alone.allocated, rel=0.02)


MODES = {
    "ddp": ShardingLayout("ddp", 2, 2),
    "fsdp": ShardingLayout("fsdp", 2, 2),
    "fsdp cp": ShardingLayout("fsdp", 2, 2, tokens=2),
    "cp": ShardingLayout("cp", 2, 2, tokens=2),
    "tp": ShardingLayout("tp", 2, 2),
    "first stage": ShardingLayout("pp", 2, 2),
    "last stage": ShardingLayout("pp", 2, 2, rank=1),
}


@pytest.mark.parametrize("mode", MODES)
def test_in_each_process_of_several_it_does_too(mode: str) -> None:
    rows = replace(SFT, sharing=MODES[mode], evaluates=True, adapter=None if mode == "fsdp" else SFT.adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = simulate_memory(rows, merge=False)
        pairs = simulate_memory(replace(rows, objective=ObjectiveSection(name="dpo", beta=0.1)), merge=False)
    assert pairs.allocated == pytest.approx(alone.allocated, rel=0.02)
    assert {phase.name for phase in pairs.phases} == {phase.name for phase in alone.phases}


@pytest.mark.parametrize(
    "changes", [{}, {"adapter": None}, {"packed": False, "padded": True}, {"checkpointing": True}], ids=str
)
def test_mismatched_answers_need_no_more_memory_than_the_step(changes: dict[str, Any]) -> None:
    """Their forward pass comes first, and keeps no activations: by the simulation the peak is the step's, so that the
    formula has nothing to add."""
    rows = replace(SFT, **changes)
    alone = simulate_memory(rows, merge=False)
    kto = simulate_memory(replace(rows, objective=ObjectiveSection(name="kto", beta=0.1)), merge=False)
    assert kto.allocated == pytest.approx(alone.allocated, rel=0.02)


def test_the_time_of_a_step_has_the_mismatched_answers() -> None:
    """A forward pass more: with LoRA about a half more of the products."""
    times = [
        sum(count * operation.flops for operation, count in count_step_operations(setting)[0].items())
        for setting in (SFT, replace(SFT, objective=ObjectiveSection(name="kto", beta=0.1)))
    ]
    assert 1.3 < times[1] / times[0] < 1.6


def test_the_plan_has_the_reference_pass(tmp_path: Path) -> None:
    parts = {}
    for objective in ("dpo", "orpo"):
        path = tmp_path / f"{objective}.yaml"
        path.write_text(
            "model: {name_or_path: surefit/nano}\ndata: {train: surefit/shorter-answers, eval: 0.2, max_length: 128}\n"
            f"objective: {objective}\ntrain: {{global_batch_size: 16}}\nhardware: {{gpu: h100}}\noutput_dir: runs/x\n",
            encoding="utf-8",
        )
        found = load_run_context(path)
        assert found.resolved is not None
        assert found.model is not None
        assert found.hardware is not None
        plan = build_plan(found.resolved, found.model, found.hardware, 400, planner=Planner(found.model))
        assert plan["estimate"]["tokens"] == 2 * plan["estimate"]["micro_batch"] * plan["estimate"]["length"]
        assert plan["estimate"]["not_simulated"] is None
        parts[objective] = plan["time"]["parts"]
    assert "reference" not in parts["orpo"]
    assert 0 < parts["dpo"]["reference"] < parts["dpo"]["steps"]
    # One epoch: a forward pass over the same pairs as the steps and the held-out ones, each of which is measured again.
    assert parts["dpo"]["reference"] == pytest.approx(parts["dpo"]["evaluations"] / 4 * 5, rel=0.3)
