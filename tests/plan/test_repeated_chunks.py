"""A loss in many chunks: those that are repeated leave the very trace, and the operators, that running them leaves."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from transformers import LlamaConfig

from surefit.config.schema import LoraSection, ObjectiveSection
from surefit.facts import activations
from surefit.plan import simulate
from surefit.plan.operations import Operations
from surefit.plan.step_config import StepConfig
from surefit.plan.time import _count
from surefit.plan.trace import Trace
from surefit.train import loss

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
LORA = StepConfig(CONFIG, "bfloat16", LoraSection(r=4), 2, 40, packed=True, micro_batches=2)
FULL = replace(LORA, adapter=None)
DPO = ObjectiveSection(name="dpo", beta=0.1)


@pytest.fixture(autouse=True)
def _many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """78 targets in nine chunks of nine or fewer."""
    monkeypatch.setattr(activations, "CHUNK_ROWS", 9)


def _both(setting: StepConfig) -> tuple[Trace, tuple[Operations, Operations]]:
    return simulate.record_training(setting), _count(setting)


def _without_modules(trace: Trace, operators: Any) -> tuple[Trace, Any]:
    """Without the modules' names: in a backward pass, where the head of pairs runs again, an allocation between two
    chunks has the name of the module that ran last."""
    return replace(trace, allocations=[replace(one, module="") for one in trace.allocations]), operators


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(LORA, id="lora"),
        pytest.param(FULL, id="full"),
        pytest.param(replace(LORA, objective=DPO), id="pairs"),
        pytest.param(replace(FULL, objective=DPO), id="pairs-full"),
        *(
            pytest.param(setting, id=name, marks=pytest.mark.slow)
            for name, setting in {
                "padded": replace(LORA, packed=False, padded=True, checkpointing=True, supervised=0.7),
                "head": replace(LORA, adapter=LoraSection(r=4, target_modules=["v_proj", "lm_head"], lora_dropout=0.1)),
                "turing": replace(LORA, dtype="float16", capability=(7, 5), cuda=True, fused_lora=True),
                "cpu": replace(LORA, cuda=False, dtype="float32"),
                "full-fp32": replace(FULL, dtype="float32", capability=(9, 0)),
            }.items()
        ),
    ],
)
def test_repeating_chunks_changes_nothing(setting: StepConfig) -> None:
    chunks: list[int] = []
    add_chunk = loss.add_chunk

    def counted(head: Any, rows: slice, *rest: Any) -> None:
        chunks.append(rows.stop - rows.start)
        add_chunk(head, rows, *rest)

    with patch.object(loss, "add_chunk", counted):
        repeated = _both(setting)
        some = len(chunks)
        with patch.object(simulate, "_repeated_chunks", lambda recorder: contextlib.nullcontext()):
            all_of_them = _both(setting)
    if setting.objective is not None:
        repeated, all_of_them = (_without_modules(trace, operators) for trace, operators in (repeated, all_of_them))
    assert repeated == all_of_them
    assert some < (len(chunks) - some) / 2
