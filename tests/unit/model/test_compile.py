"""Compiled decoder layers: the same numbers, one artefact for like layers, none anew for another length."""

import re
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from peft import PeftModel
from torch._inductor.utils import run_and_get_code
from transformers import LlamaConfig, LlamaForCausalLM

from surefit.config.schema import LoraSection
from surefit.core.errors import ConfigError, MachineError
from surefit.model import compile as subject
from surefit.model.adapter import add_adapter
from surefit.model.compat import checkpoint_activations
from surefit.model.compile import compile_layers
from surefit.model.fused_lora import fuse_lora

LENGTHS = (19, 33, 40, 27)


def adapted(layers: int = 3) -> PeftModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,  # with the default, 0.02, float32 gradients are 1e-5 off float64's by themselves
    )
    model = add_adapter(LlamaForCausalLM(config), LoraSection(r=4))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def steps(model: PeftModel) -> list[list[torch.Tensor]]:
    """Logits and gradients for each length."""
    found = []
    for length in LENGTHS:
        ids = torch.randint(1, 64, (1, length), generator=torch.Generator().manual_seed(length))
        logits = model(input_ids=ids, use_cache=False).logits
        logits.pow(2).mean().backward()
        found.append([logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        model.zero_grad()
    return found


@pytest.fixture
def graphs() -> Iterator[dict[str, int]]:
    """torch's own count of the graphs it compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()


def same(got: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> bool:
    pairs = [pair for g, e in zip(got, expected, strict=True) for pair in zip(g, e, strict=True)]
    return all(float((g - e).norm()) <= 1e-5 * float(e.norm()) for g, e in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_traced_layers_compute_the_same_and_share_their_graph(
    graphs: dict[str, int], fused: bool, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a code generator: the way through dynamo and autograd is the real one."""
    model = adapted()
    if checkpointing:
        checkpoint_activations(model)
    expected = steps(model)
    if fused:
        assert fuse_lora(model) == 3 * 7
    original = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: original(self, backend="aot_eager", **how))
    assert compile_layers(model) == 3
    assert same(steps(model), expected)
    # Where nothing is recomputed, the first layer's input needs no gradient: a form of its own.
    assert 1 <= graphs["unique_graphs"] <= 2


@pytest.mark.slow
def test_compiled_code_computes_the_same(graphs: dict[str, int]) -> None:
    """And adds LoRA's products in place: 14 `addmm` per layer would each write a tensor of their own."""
    model = adapted(layers=2)
    expected = steps(model)
    fuse_lora(model)
    compile_layers(model)
    found, codes = run_and_get_code(lambda: steps(model))
    assert same(found, expected)
    assert graphs["unique_graphs"] <= 2
    assert len(codes) == 4, "forward and backward, with and without a gradient of the input"
    for code in codes:
        called = Counter(re.findall(r"(?:extern_kernels|torch\.ops\.surefit)\.(\w+)(?:\.default)?\(", code))
        assert not any("addmm" in name for name in called)
        # q, k and v; o; gate and up; down
        assert called["lora"] + called["lora_backward"] == 4


def test_nothing_to_compile_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_cpp", lambda: False)
    with pytest.raises(MachineError, match=r"needs a C\+\+ compiler") as caught:
        compile_layers(adapted())
    assert "speed.compile: false" in str(caught.value.help)
    monkeypatch.setattr(subject, "_c", lambda: False)
    monkeypatch.setattr(subject.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(MachineError, match="needs a C compiler"):
        subject._require_compiler("cuda")
    monkeypatch.setattr(subject.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="needs triton"):
        subject._require_compiler("cuda")


def test_a_model_without_such_layers() -> None:
    with pytest.raises(ConfigError, match="Linear has no decoder layers"):
        compile_layers(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
