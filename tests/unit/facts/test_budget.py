"""The closed form's worked numbers, and its assumptions against what the training code really holds and writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import LoraSection
from surefit.facts import memory_formula
from surefit.facts.hardware import hardware_facts
from surefit.facts.memory_formula import (
    LOSS_BYTES,
    MemoryTerm,
    count_trainable_parameters,
    fullest_moment_bytes,
    memory_terms_on_one,
    target_modules,
    trainable_tensor_sizes,
)
from surefit.facts.model import model_facts
from surefit.facts.tensors import adapter_parameters
from surefit.model.adapter import add_adapter, trainable_parameters
from surefit.plan.build_plan import build_plan

LLAMA_8B = "meta-llama/Llama-3.1-8B"
N = 20_971_520
"""LoRA factors of Llama-3.1-8B at r = 8 on all linear layers."""


def sizes(terms: list[MemoryTerm]) -> dict[str, int]:
    return {term.term: term.bytes for term in terms}


def test_memory_of_8b_lora_in_bfloat16(make_resolved: Callable[..., ResolvedConfig]) -> None:
    resolved = make_resolved(
        LLAMA_8B, "lora.r=8", "train.per_device_train_batch_size=2", "train.global_batch_size=8",
        "speed.chunked_loss=false",
    )  # fmt: skip
    terms = memory_terms_on_one(resolved, model_facts(LLAMA_8B))
    known = {
        "weights": 2 * 8_030_261_248,
        "adapter": 2 * N,
        "optimizer": 8 * N,
        "masters": 4 * N,
        "gradients": 2 * N,
        "float32 gradients": 4 * N,
        "logits": 12 * 2 * 2047 * 128_256,
    }
    sums = sizes(terms)
    assert known.items() <= sums.items()
    beside = sums["activations"] + sums["batch"] + sums["workspace"]
    assert fullest_moment_bytes(terms) == 2 * 8_030_261_248 + 16 * N + 12 * 2 * 2047 * 128_256 + beside


def test_full_training_holds_twenty_bytes_per_parameter(make_resolved: Callable[..., ResolvedConfig]) -> None:
    resolved = make_resolved(
        LLAMA_8B, "train.method=full", "train.global_batch_size=1", "train.per_device_train_batch_size=1"
    )
    model = model_facts(LLAMA_8B)
    names = ("weights", "optimizer", "masters", "gradients", "float32 gradients")
    assert (
        sum(sizes(memory_terms_on_one(resolved, model))[name] for name in names) == (2 + 2 + 8 + 4 + 4) * 8_030_261_248
    )


def test_gradients_are_held_with_the_logits_only_when_they_accumulate(
    make_resolved: Callable[..., ResolvedConfig],
) -> None:
    model = model_facts(LLAMA_8B)

    def moment(micro: int) -> str:
        overrides = ("train.global_batch_size=4", f"train.per_device_train_batch_size={micro}")
        terms = memory_terms_on_one(make_resolved(LLAMA_8B, *overrides), model)
        return next(term.moment for term in terms if term.term == "gradients")

    assert (moment(4), moment(2)) == ("step", "always")


def test_the_fullest_moment_is_not_the_sum() -> None:
    terms = [
        MemoryTerm("a", 5, ""),
        MemoryTerm("b", 3, "", "loss"),
        MemoryTerm("c", 4, "", "step"),
        MemoryTerm("d", 2, "", "backward"),
    ]
    assert fullest_moment_bytes(terms) == 9
    assert fullest_moment_bytes([]) == 0


def test_an_unknown_model_has_no_terms(make_resolved: Callable[..., ResolvedConfig]) -> None:
    model = replace(model_facts(LLAMA_8B), parameters=None, linear_modules={})
    resolved = make_resolved(LLAMA_8B)
    assert memory_terms_on_one(resolved, model) == []
    assert count_trainable_parameters(model, None, "float32") is None


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], ["self_attn.o_proj"], ["lm_head", "up_proj"]])
def test_trained_parameters_are_those_peft_makes(
    make_tiny: Callable[..., LlamaForCausalLM], tmp_path: Path, targets: str | list[str], dora: bool
) -> None:
    model = make_tiny(tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    section = LoraSection(r=3, target_modules=targets, use_dora=dora)  # type: ignore[arg-type]
    part = count_trainable_parameters(model_facts(str(tmp_path)), section, "float32")
    adapted = add_adapter(model, section)
    assert part is not None
    assert part.parameters == trainable_parameters(adapted)[0]
    named = {name: tuple(p.shape) for name, p in adapted.named_parameters() if p.requires_grad}
    assert dict(adapter_parameters(model_facts(str(tmp_path)), section)) == named
    sizes = [numbers for numbers, _ in trainable_tensor_sizes(model_facts(str(tmp_path)), section)]
    assert sorted(sizes) == sorted(math.prod(shape) for shape in named.values())


def test_of_dora_the_closed_form_knows_no_activations(make_resolved: Callable[..., ResolvedConfig]) -> None:
    model, plain = model_facts(LLAMA_8B), make_resolved(LLAMA_8B)
    adapter = plain.config.adapter.model_copy(update={"use_dora": True})
    speed = plain.config.speed.model_copy(update={"fused_lora": False})
    dora = replace(plain, config=plain.config.model_copy(update={"lora": adapter, "speed": speed}))
    assert memory_formula.peak_bytes_on_one(plain, model) is not None
    assert memory_formula.peak_bytes_on_one(dora, model) is None
    assert "activations" in " ".join(build_plan(dora, model, hardware_facts("h100"), quick=True)["left_out"])
    assert "activations" not in " ".join(build_plan(plain, model, hardware_facts("h100"), quick=True)["left_out"])
    terms = {term.term: term.bytes for term in memory_terms_on_one(dora, model)}
    # 32 layers of q, o, down: 4,096 outputs each; k, v: 1,024; gate, up: 14,336
    assert terms["optimizer"] == 8 * (N * adapter.r // 8 + 32 * (3 * 4_096 + 2 * 1_024 + 2 * 14_336))


def test_all_linear_leaves_the_head_out() -> None:
    modules = target_modules(model_facts(LLAMA_8B), LoraSection())
    assert "lm_head" not in modules
    assert len(modules) == 7 * 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_holds_twelve_bytes_per_token_and_vocabulary_entry(dtype: torch.dtype) -> None:
    tokens, vocabulary = 64, 4096
    hidden = torch.randn(1, tokens, 8, dtype=dtype, requires_grad=True)
    head = torch.randn(vocabulary, 8, dtype=dtype)
    labels = torch.randint(0, vocabulary, (tokens,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        F.cross_entropy((hidden @ head.T).flatten(0, 1).float(), labels, reduction="sum").backward()
    assert peak_bytes(recorded) == pytest.approx(LOSS_BYTES * tokens * vocabulary, rel=0.02)


def peak_bytes(recorded: profile) -> int:
    """The most memory allocated at one time while the profiler looked."""
    held, peak = 0, 0
    assert recorded.profiler is not None
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
