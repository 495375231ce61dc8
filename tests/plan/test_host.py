"""Host memory and PCIe traffic: the arithmetic against what the simulated step moves, and bitsandbytes' rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from surefit.plan import cuda
from surefit.plan.host import build_host_plan, paged_bytes, pinned_bytes
from surefit.plan.simulate import record_training
from surefit.plan.step_config import build_step_config


@pytest.mark.parametrize("packing", ["true", "false"])
def test_what_is_offloaded_is_what_the_step_sends_to_the_host(
    place: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    where, facts = place(
        "train.gradient_checkpointing=offload", "train.per_device_train_batch_size=2", f"data.packing={packing}",
        "train.global_batch_size=4", "data.max_length=64",
    )  # fmt: skip
    sent: list[int] = []
    away = cuda._OffloadedFakeTensor.__init__

    def counted(self: Any, tensor: Any) -> None:
        sent.append(tensor.numel() * tensor.element_size())
        away(self, tensor)

    monkeypatch.setattr(cuda._OffloadedFakeTensor, "__init__", counted)
    setting = build_step_config(where.resolved, facts, where.hardware)
    record_training(setting.with_layers(2), watch=lambda *call: None)  # one step
    planned = build_host_plan(where.resolved, facts, where.hardware)
    assert planned is not None
    per_layer = sum(sent) / 2  # of all micro batches, one way
    assert planned["pcie_bytes_per_step"]["layer inputs"] == 2 * facts.num_layers * per_layer
    assert planned["memory_total_bytes"] == facts.num_layers * pinned_bytes(sent[0])


def test_paged_moments(place: Callable[..., Any]) -> None:
    """bitsandbytes pages parameters of 100,000 numbers and more, and keeps embeddings in 32 bits."""
    where, facts = place("train.optim=paged_adamw_8bit", "train.method=full")
    embedding = facts.vocab_size * facts.hidden_size
    paged = paged_bytes(where.resolved, facts)
    inner = facts.parameters - embedding
    assert 8 * embedding + 1.99 * inner < paged <= 8 * embedding + 2 * inner
    planned = build_host_plan(where.resolved, facts, where.hardware)
    assert planned is not None
    assert planned["pcie_bytes_per_step"]["paged moments, at most"] == 2 * paged
    assert planned["ram_bytes"] is None, "a GPU of the catalogue says nothing of the machine around it"


def test_nothing_is_asked_of_the_host_otherwise(place: Callable[..., Any]) -> None:
    where, facts = place()
    planned = build_host_plan(where.resolved, facts, where.hardware)
    assert planned is not None
    assert planned["memory"] == []
    assert planned["pcie_bytes_per_step"] == {"batches": 32 * 8 * 512}
    on_cpu, nano = place("lora.target_modules=[q_proj]", model="surefit/nano", gpu="cpu")
    assert build_host_plan(on_cpu.resolved, nano, on_cpu.hardware) is None


@pytest.mark.parametrize(("size", "pinned"), [(1, 1), (4096, 4096), (4097, 8192), (262_144 * 5_120, 2**31)])
def test_pinned_memory_comes_in_powers_of_two(size: int, pinned: int) -> None:
    assert pinned_bytes(size) == pinned
