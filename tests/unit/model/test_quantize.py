"""Frozen bases in fewer bits: what is quantised, how far off it is, and what must never happen to it."""

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from surefit.config.schema import LoraSection, ModelSection
from surefit.core.errors import MachineError
from surefit.model import float8_ops, load, quantize
from surefit.model.adapter import add_adapter
from surefit.model.load import load_model
from surefit.model.quantize import (
    Float8Linear,
    finish_loading,
    frozen_matrix,
    hidden_tensors,
    is_four_bit,
    linear_products,
    quantization_config,
    quantize_meta,
    to_float8,
)
from surefit.model.saved import load_adapted

CPU: Any = SimpleNamespace(kind="cpu")
IDS = torch.arange(1, 10)[None]


def shape(tied: bool = True) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attention_bias=True,
    )


def llama(tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(shape(tied))


def on_meta(tied: bool = True) -> Any:
    """As plan.simulate builds it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape(tied), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.tie_weights()
    return model


def section(directory: Path, kind: str, dtype: str = "bfloat16") -> ModelSection:
    return ModelSection(name_or_path=str(directory), dtype=dtype, quantization=kind)  # type: ignore[arg-type]


def loaded(directory: Path, kind: str, dtype: str = "bfloat16", tied: bool = True) -> Any:
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    llama(tied).save_pretrained(directory)
    return load_model(section(directory, kind, dtype), CPU)


def layers(model: torch.nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not model.lm_head]  # type: ignore[union-attr]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_all_but_embeddings_and_head(kind: str, tied: bool, tmp_path: Path) -> None:
    model = loaded(tmp_path, kind, tied=tied)
    assert len(layers(model)) == 2 * 7
    assert all(is_four_bit(m) if kind == "nf4" else type(m) is Float8Linear for m in layers(model))
    assert model.lm_head.weight.dtype == model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.equal(model.lm_head.weight, llama(tied).lm_head.weight.bfloat16())
    assert not any(m.weight.requires_grad for m in layers(model))
    assert not model.training
    with torch.no_grad():
        logits = model(input_ids=IDS, use_cache=False).logits
        exact = llama(tied)(input_ids=IDS, use_cache=False).logits
    assert float((logits.float() - exact).norm() / exact.norm()) < (0.2 if kind == "nf4" else 0.06)


@pytest.mark.parametrize("kind", ["none", "nf4", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_factors_are_in_the_type_the_base_computes_in(kind: str, dtype: str, tmp_path: Path) -> None:
    model = add_adapter(loaded(tmp_path / "base", kind, dtype), LoraSection(r=4))
    wanted = {getattr(torch, dtype)}

    def types(model: torch.nn.Module) -> set[torch.dtype]:
        return {p.dtype for name, p in model.named_parameters() if "lora_" in name}

    assert types(model) == wanted
    model.save_pretrained(tmp_path / "adapter")
    assert types(load_adapted(section(tmp_path / "base", kind, dtype), tmp_path / "adapter", CPU)) == wanted


def test_factors_are_in_that_type_on_meta_too() -> None:
    model = add_adapter(on_meta(), LoraSection(r=4))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_what_nf4_is_asked_for() -> None:
    pytest.importorskip("bitsandbytes")
    config: Any = quantization_config(torch.bfloat16, on_meta())
    assert (config.load_in_4bit, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == (True, "nf4", True)
    assert (config.bnb_4bit_compute_dtype, config.bnb_4bit_quant_storage) == (torch.bfloat16, torch.uint8)
    assert config.llm_int8_skip_modules == [r"(?:lm_head)$"]


def test_nf4_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    llama().save_pretrained(tmp_path)
    with pytest.raises(MachineError, match="bitsandbytes, which is not installed") as caught:
        load_model(section(tmp_path, "nf4"), CPU)
    assert ".[quant]" in str(caught.value.help)


def test_nf4_weights_survive_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that `keep_four_bit_layout` is for; on a CPU with AVX512-BF16 it is seen first without it."""
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import has_avx512bf16

    model = loaded(tmp_path, "nf4")
    before = [frozen_matrix(m).clone() for m in layers(model)]
    for _ in range(3):
        with torch.no_grad():
            model(input_ids=IDS)
    assert all(torch.equal(frozen_matrix(m), old) for m, old in zip(layers(model), before, strict=True))
    if has_avx512bf16():
        monkeypatch.setattr(load, "finish_loading", lambda model, kind: model)
        unguarded = load_model(section(tmp_path, "nf4"), CPU)
        with torch.no_grad():
            unguarded(input_ids=IDS)
        assert not all(torch.equal(frozen_matrix(m), old) for m, old in zip(layers(unguarded), before, strict=True))


def test_the_error_of_float8_weights() -> None:
    weight = torch.randn(40, 3000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 3, 40)[:, None]
    weight[7] = 0
    q, scale = to_float8(weight)
    assert q.dtype == torch.float8_e4m3fn
    assert scale.shape == (40, 1)
    error = (q.double() * scale.double() - weight.double()).abs()
    # Half a unit in the last of 3 mantissa bits, or of the smallest step, 2^-9; and float32's rounding of the quotient.
    bound = torch.maximum(weight.double().abs() / 16, scale.double() / 1024) * (1 + 1e-6)
    assert bool((error <= bound).all())
    assert float(error.norm() / weight.double().norm()) < 0.03
    assert float(q.float().abs().amax(dim=1)[0]) == 448
    assert bool(torch.isfinite(q.float()).all())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_float8_layer_computes_with_its_weights(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(32, 48, bias=bias).to(dtype)
    layer = Float8Linear.of(linear)
    plain = copy.deepcopy(linear)
    plain.weight.data = layer.dequantized()
    assert plain.weight.dtype == dtype
    x, kept = torch.randn(2, 5, 32).to(dtype), []
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = layer(a)
    assert kept == []
    expected = plain(b)
    out.sum().backward()
    expected.sum().backward()
    assert torch.equal(out, expected)
    assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
    assert layer.weight.grad is None


def test_a_float8_layer_keeps_its_types() -> None:
    """Cast like other layers, it would take the stored numbers for weights, without the scale."""
    layer = Float8Linear.of(torch.nn.Linear(16, 16))
    x, expected = torch.randn(3, 16), layer.dequantized()
    for moved in (copy.deepcopy(layer).to(torch.bfloat16), copy.deepcopy(layer).half(), copy.deepcopy(layer).double()):
        assert (moved.weight.dtype, moved.scale.dtype) == (torch.float8_e4m3fn, torch.float32)
        assert torch.equal(moved.dequantized(), expected)
    assert copy.deepcopy(layer).to("meta").weight.is_meta
    other = Float8Linear.of(torch.nn.Linear(16, 16))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_no_row_comes_out_of_float8_s_range() -> None:
    """Of every finite bfloat16 as the largest number of its row, though the division rounds: nothing is clamped."""
    largest = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    rows, scale = float8_ops.quantize_rows(torch.stack([largest, -largest, largest / 3], dim=1))
    quotients = largest.float() / scale[:, 0]
    assert bool((quotients > 448).any())
    assert float(quotients.bfloat16().max()) == 448
    assert float(rows.float().abs().max()) == 448


def test_a_gpu_s_product_of_rows_quantised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit what each layer gives by itself."""
    torch.manual_seed(0)
    linears = [torch.nn.Linear(64, outputs) for outputs in (48, 32, 40)]
    x = torch.randn(32, 64) * torch.logspace(-2, 2, 32)[:, None]
    layers, low = [Float8Linear.of(linear.bfloat16()) for linear in linears], x.bfloat16()
    whole = [layer.product_of(*float8_ops.quantize_rows(low)) for layer in layers[:2]]
    whole.append(layers[2](low))  # whose 40 outputs are no multiple of 16
    monkeypatch.setattr(quantize, "_multiplies_float8", lambda x, layer: layer.out_features % 16 == 0)
    calls = []
    rows = float8_ops.quantize_rows
    monkeypatch.setattr(float8_ops, "quantize_rows", lambda x: calls.append(x) or rows(x))
    shared = [product() for product in linear_products(layers, low)]
    assert len(calls) == 1
    alone = [layer(low) for layer in layers]
    assert all(map(torch.equal, shared, whole))
    assert all(map(torch.equal, shared, alone))
    for linear, found in zip(linears, shared, strict=True):
        exact = torch.nn.functional.linear(low.float(), linear.weight.float(), linear.bias.float())
        assert found.dtype == torch.bfloat16
        assert float(((found.float() - exact).norm(dim=1) / exact.norm(dim=1)).detach().max()) < 0.06


@pytest.mark.gpu
def test_float8_arithmetic_on_a_gpu() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8 arithmetic")
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 512, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer = Float8Linear.of(linear)
    out, exact = layer(x), linear(x)
    assert 0 < float((out - exact).norm() / exact.norm()) < 0.06
    out.sum().backward()
    assert torch.allclose(x.grad, layer.dequantized().sum(0).expand(64, -1), rtol=0.02, atol=0.02)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["none", "nf4", "fp8"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_on_meta_has_the_tensors_of_a_loaded_one(kind: str, tied: bool, tmp_path: Path) -> None:
    real = loaded(tmp_path, kind, tied=tied)
    meta = quantize_meta(on_meta(tied), kind)

    def tensors(model: torch.nn.Module) -> dict[str, tuple[Any, ...]]:
        named = [*model.named_parameters(), *model.named_buffers()]
        named += [(f"{n}.{type(o).__name__}.{i}", t) for i, (n, o, _, t) in enumerate(hidden_tensors(model))]
        return {name: (tuple(t.shape), t.dtype) for name, t in named}

    assert tensors(meta) == tensors(real)
    assert [a for _, _, a, _ in hidden_tensors(meta)] == [a for _, _, a, _ in hidden_tensors(real)]
    assert [type(m) for m in meta.modules()] == [type(m) for m in real.modules()]
    adapted = add_adapter(meta, LoraSection(r=4))
    assert {type(m) for m in adapted.modules()} == {type(m) for m in add_adapter(real, LoraSection(r=4)).modules()}


def test_bytes_of_an_nf4_layer() -> None:
    pytest.importorskip("bitsandbytes")
    model: Any = quantize_meta(on_meta(), "nf4")
    up = model.model.layers[0].mlp.up_proj
    weights = 64 * 192
    assert up.weight.untyped_storage().nbytes() == weights // 2
    sizes = [t.numel() * t.element_size() for name, _, _, t in hidden_tensors(model) if name.endswith("0.mlp.up_proj")]
    assert sorted(sizes) == sorted([weights // 64, 4, 16 * 4, 4, 256 * 4])  # 192 scales need one scale of their own


def test_finish_loading_leaves_what_is_not_quantised() -> None:
    model = llama()
    before = [type(m) for m in model.modules()]
    assert finish_loading(model, "none") is model
    assert [type(m) for m in model.modules()] == before
