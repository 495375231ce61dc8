"""Fused LoRA against PEFT: every set of target layers, dropout, bias, 16-bit, 4-bit and float8 bases."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM

from surefit.config.schema import LoraSection, ModelSection
from surefit.model.adapter import add_adapter
from surefit.model.compat import checkpoint_activations
from surefit.model.fused_lora import fuse_lora
from surefit.model.kernels import use_kernels
from surefit.model.load import load_model
from surefit.model.quantize import frozen_matrix
from surefit.model.sdpa import gpu_assumed
from surefit.model.tiling import tile_mlps

NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = [[name] for name in NAMES] + [list(pair) for pair in itertools.combinations(NAMES, 2)] + [list(NAMES)]
CPU: Any = SimpleNamespace(kind="cpu")


def base(bias: bool = False, layers: int = 1, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=bias,
        mlp_bias=bias,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model.to(dtype)  # type: ignore[no-any-return]


def adapted(model: Any, targets: Any = "all-linear", dropout: float = 0.0) -> PeftModel:
    """With factors of some size, so that they matter; r and alpha/r are no powers of two."""
    adapter = add_adapter(model, LoraSection(r=6, lora_alpha=10.0, lora_dropout=dropout, target_modules=targets))
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter.parameters():
        if parameter.requires_grad:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter.dtype)
    return adapter.train()


def result(model: PeftModel, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Hidden states, the gradient of the input embeddings, and the gradients of the factors, in float64."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 9, 64, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(2, 9, 64, generator=generator).to(dtype)
    torch.manual_seed(3)  # of dropout
    out = model.get_base_model().model(inputs_embeds=x, use_cache=False).last_hidden_state  # type: ignore[operator]
    (out * weight).sum().backward()
    found = {"out": out.detach(), "x": x.grad} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {name: tensor.double() for name, tensor in found.items()}  # type: ignore[union-attr]


def error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of any tensor, relative to its norm."""
    assert got.keys() == expected.keys()
    return max(float((got[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def both(model: PeftModel, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], dict[str, Any]]:
    """(PEFT's, ours)."""
    theirs = result(model, dtype)
    assert fuse_lora(model) > 0
    return theirs, result(model, dtype)


@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bias", [False, True])
def test_equal_to_peft_for_every_set_of_layers(targets: list[str], dropout: float, bias: bool) -> None:
    theirs, ours = both(adapted(base(bias), targets, dropout))
    assert len(ours) == 2 + 2 * len(targets)
    assert error(ours, theirs) < 1e-6


def test_it_is_the_same_formula() -> None:
    """In float64 nothing but the order of sums is left."""
    theirs, ours = both(adapted(base(layers=2, dtype=torch.float64)), torch.float64)
    assert error(ours, theirs) < 1e-14


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_quantised_bases(kind: str, dropout: float, tmp_path: Path) -> None:
    theirs, ours = both(adapted(quantised(kind, "float32", tmp_path), dropout=dropout))
    assert error(ours, theirs) < 1e-6


@pytest.mark.parametrize("kind", ["none", "nf4", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_no_less_exact_than_pefts(kind: str, dtype: str, tmp_path: Path) -> None:
    """Both against float64 arithmetic on the same weights. The sum over all tensors: single ones differ by luck."""
    model = adapted(quantised(kind, dtype, tmp_path))
    exact = adapted(exact_copy(model))
    exact.load_state_dict({n: p for n, p in model.state_dict().items() if "lora_" in n}, strict=False)
    reference = result(exact, torch.float64)
    theirs, ours = both(model, getattr(torch, dtype))
    assert set(ours) == set(reference)

    def total(found: dict[str, torch.Tensor]) -> float:
        return sum(float((found[n] - reference[n]).norm() / reference[n].norm()) for n in reference) / len(reference)

    assert total(ours) <= 1.05 * total(theirs)
    assert total(ours) < (0.05 if dtype == "bfloat16" else 0.01)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_under_checkpointing(dropout: float) -> None:
    model = adapted(base(layers=2), dropout=dropout)
    expected = result(model)
    checkpoint_activations(model)
    fuse_lora(model)
    assert error(result(model), expected) < 1e-6


@pytest.mark.parametrize("kind", ["none", "nf4", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_with_fused_kernels_sixteen_bits_are_no_less_exact(kind: str, dtype: str, tmp_path: Path) -> None:
    """Against float64, as above: the kernels round less often. LoRA's part is computed inside, over any base."""
    model = adapted(quantised(kind, dtype, tmp_path))
    exact = adapted(exact_copy(model))
    exact.load_state_dict({n: p for n, p in model.state_dict().items() if "lora_" in n}, strict=False)
    reference = result(exact, torch.float64)
    _, without = both(model, getattr(torch, dtype))
    assert use_kernels(model) == (3, 1, 1)
    with gpu_assumed((9, 0)):
        found = result(model, getattr(torch, dtype))
    assert found.keys() == reference.keys()

    def total(found: dict[str, torch.Tensor]) -> float:
        return sum(float((found[n] - reference[n]).norm() / reference[n].norm()) for n in reference) / len(reference)

    assert total(found) <= 1.05 * total(without)


@pytest.mark.parametrize("dora", [False, True])
def test_fused_kernels_in_tiles_and_beside_dora(dora: bool) -> None:
    model = add_adapter(base(layers=2), LoraSection(r=6, lora_alpha=10.0, use_dora=dora)).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    fuse_lora(model)
    expected = result(model)
    use_kernels(model)
    tile_mlps(model, 5)
    with gpu_assumed((9, 0)):
        assert error(result(model), expected) < 1e-5


def quantised(kind: str, dtype: str, directory: Path) -> Any:
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    base(dtype=getattr(torch, dtype)).save_pretrained(directory)
    return load_model(ModelSection(name_or_path=str(directory), dtype=dtype, quantization=kind), CPU)  # type: ignore[arg-type]


def exact_copy(model: PeftModel) -> LlamaForCausalLM:
    """A float64 model that holds the very weights that `model` computes with."""
    plain = base(dtype=torch.float64)
    modules = dict(model.get_base_model().named_modules())
    for name, parameter in plain.named_parameters():
        owner = modules[name.removesuffix(".weight")]
        source = getattr(owner, "base_layer", owner)
        value = frozen_matrix(source) if isinstance(source, torch.nn.Linear) else source.weight
        parameter.data = value.detach().double()
    return plain
