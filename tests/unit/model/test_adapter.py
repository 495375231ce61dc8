"""LoRA factors: where they go, how they start, and the gate on what training made of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from surefit.config.schema import LoraSection
from surefit.core.errors import ConfigError, GateError
from surefit.model.adapter import (
    adapted_modules,
    add_adapter,
    lora_modules,
    require_complete_adapter,
    trainable_parameters,
)

WEIGHTS = "adapter_model.safetensors"


def adapt(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PeftModel:
    return add_adapter(tiny_run.llama().to(dtype), LoraSection(r=4, lora_alpha=8.0, **changes), seed)


def factors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def test_all_linear_means_every_layer_but_the_head() -> None:
    model = adapt()
    assert len(lora_modules(model)) == 2 * 7
    assert not any("lm_head" in name for name in lora_modules(model))
    assert lora_modules(model)["model.layers.0.self_attn.k_proj"] == (16, 32)
    # r × (outputs + inputs) for q, k, v, o, gate, up, down
    per_layer = 4 * ((32 + 32) + (16 + 32) + (16 + 32) + (32 + 32) + 3 * (32 + 48))
    trained, everything = trainable_parameters(model)
    assert trained == 2 * per_layer
    assert everything == trained + sum(p.numel() for p in tiny_run.llama().parameters())
    assert all("lora_" in name for name in factors(model))


def test_a_list_of_endings() -> None:
    model = adapt(target_modules=["q_proj", "layers.1.mlp.down_proj"])
    assert sorted(lora_modules(model)) == [
        "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj",
    ]  # fmt: skip


def test_every_ending_must_match() -> None:
    with pytest.raises(ConfigError, match="no linear layer's name ends in 'q_porj'; did you mean 'q_proj'") as caught:
        adapt(target_modules=["k_proj", "q_porj"])  # PEFT would take the first and leave the second out in silence
    assert "down_proj, gate_proj" in str(caught.value.help)
    with pytest.raises(ConfigError, match="'norm'"):
        adapt(target_modules=["norm"])


def test_a_tied_head_is_refused_and_an_untied_one_is_not() -> None:
    with pytest.raises(ConfigError, match="shares its weight with the input embedding"):
        adapt(target_modules=["lm_head"])
    assert adapted_modules(tiny_run.llama(tie_word_embeddings=False), ["lm_head"]) == {"lm_head": (64, 32)}


def test_transposed_layers_of_gpt2() -> None:
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=8, bos_token_id=0, eos_token_id=0)
    )
    assert adapted_modules(model, ["c_attn"]) == {"transformer.h.0.attn.c_attn": (96, 32)}
    assert lora_modules(add_adapter(model, LoraSection(target_modules=["c_attn"]))) == {
        "transformer.h.0.attn.c_attn": (96, 32)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_are_in_the_dtype_of_the_base(dtype: torch.dtype) -> None:
    assert {p.dtype for p in adapt(dtype=dtype).parameters()} == {dtype}


def test_the_start_depends_on_the_seed_alone_and_changes_nothing() -> None:
    torch.manual_seed(1)
    first = adapt(seed=5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = adapt(seed=5)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(p, factors(second)[name]) for name, p in factors(first).items())
    other = factors(adapt(seed=6))
    assert any(not torch.equal(p, other[name]) for name, p in factors(first).items())
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(first(input_ids=ids).logits, tiny_run.llama()(input_ids=ids).logits)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, PeftModel]:
    """An adapter whose factors are all non-zero, as after training."""
    model = adapt()
    with torch.no_grad():
        for parameter in factors(model):
            dict(model.named_parameters())[parameter].normal_()
    model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    return tmp_path, model


def test_a_trained_adapter_passes_with_either_way_to_name_its_layers(saved: tuple[Path, PeftModel]) -> None:
    directory, model = saved
    require_complete_adapter(directory, lora_modules(model))
    require_complete_adapter(directory, adapted_modules(tiny_run.llama(), "all-linear"))
    targets = json.loads((directory / "adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets)
    require_complete_adapter(directory, adapted_modules(tiny_run.llama(), targets))


A = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({A: None}, "up_proj.lora_A.weight is missing"),
        ({"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.ones(4, 32)}, "belongs to no layer"),
        ({A: torch.ones(8, 32)}, r"has shape \(8, 32\), expected \(4, 32\)"),
        ({A: torch.full((4, 32), torch.nan)}, "not finite"),
        ({B: torch.zeros(48, 4)}, "up_proj.lora_B.weight is all zero"),
    ],
)
def test_an_incomplete_adapter_is_stopped(saved: tuple[Path, PeftModel], change: dict[str, Any], words: str) -> None:
    directory, model = saved
    tensors: dict[str, Any] = load_file(directory / WEIGHTS) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, directory / WEIGHTS)
    with pytest.raises(GateError, match=words):
        require_complete_adapter(directory, lora_modules(model))


MAGNITUDE = A.replace("lora_A.weight", "lora_magnitude_vector")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({MAGNITUDE: None}, "up_proj.lora_magnitude_vector is missing"),
        ({MAGNITUDE: torch.ones(32)}, r"has shape \(32,\), expected \(48,\)"),
        ({MAGNITUDE: torch.full((48,), torch.inf)}, "not finite"),
    ],
)
def test_of_dora_the_magnitudes_belong_to_it(tmp_path: Path, change: dict[str, Any], words: str | None) -> None:
    model = adapt(use_dora=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    tensors: dict[str, Any] = load_file(tmp_path / WEIGHTS) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / WEIGHTS)
    if words is None:
        require_complete_adapter(tmp_path, lora_modules(model))
        return
    with pytest.raises(GateError, match=words):
        require_complete_adapter(tmp_path, lora_modules(model))


def test_an_unreadable_adapter_is_stopped(saved: tuple[Path, PeftModel]) -> None:
    directory, model = saved
    (directory / WEIGHTS).write_bytes(b"")
    with pytest.raises(GateError, match="cannot be read"):
        require_complete_adapter(directory, lora_modules(model))
    with pytest.raises(GateError, match="cannot be read"):
        require_complete_adapter(directory / "nowhere", lora_modules(model))


def test_an_untrained_adapter_is_stopped(tmp_path: Path) -> None:
    model = adapt()
    model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    with pytest.raises(GateError, match=r"is all zeros: this layer was not trained; .* and 11 more"):
        require_complete_adapter(tmp_path, lora_modules(model))
