"""Which parts of a model get a fused kernel, and that what they compute stays the same.

The operators run their form in PyTorch here; tests/cuda/test_kernels.py has the kernels themselves.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GemmaConfig,
    GlmConfig,
    GPT2Config,
    LlamaConfig,
    Olmo2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from surefit.config.schema import LoraSection
from surefit.core.errors import MachineError
from surefit.model import kernel_ops, kernels
from surefit.model.adapter import add_adapter
from surefit.model.compat import checkpoint_activations
from surefit.model.compile import compile_layers
from surefit.model.fused_lora import fuse_lora
from surefit.model.kernels import (
    FusedModuleCounts,
    GatedMlpNames,
    RmsNormSpec,
    find_gated_mlp,
    find_rms_norm,
    find_rope_function,
    use_kernels,
)
from surefit.model.sdpa import gpu_assumed

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
IDS = torch.arange(18).view(2, 9)


def model_of(kind: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**SIZES | changes))


def result(model: Any) -> list[torch.Tensor]:
    """Logits and every gradient of one step, as on a GPU."""
    model.zero_grad()
    torch.manual_seed(3)  # of dropout
    with gpu_assumed((9, 0)):
        out = model(input_ids=IDS, labels=IDS, use_cache=False)
        out.loss.backward()
    return [out.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], error: float = 1e-5) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= error * other.norm()


@pytest.mark.parametrize(
    ("kind", "fused"),
    [
        (LlamaConfig, FusedModuleCounts(5, 2, 2)),
        (Qwen3Config, FusedModuleCounts(9, 2, 2)),
        (Olmo2Config, FusedModuleCounts(9, 2, 2)),  # the weight is multiplied before rounding, and is not 1 + w
        (GemmaConfig, FusedModuleCounts(5, 0, 2)),  # 1 + w; gelu
        (Gemma2Config, FusedModuleCounts(9, 0, 2)),
        (Qwen3MoeConfig, FusedModuleCounts(9, 0, 2)),  # experts
        (GlmConfig, FusedModuleCounts(5, 0, 0)),  # pairs of neighbours are rotated
        (CohereConfig, FusedModuleCounts(0, 2, 0)),  # norms with a mean
        (GPT2Config, FusedModuleCounts(0, 0, 0)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_families_get_what_fits_them_and_compute_the_same(kind: Any, fused: FusedModuleCounts) -> None:
    model = model_of(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    expected = result(model.eval())
    assert use_kernels(model) == fused
    assert_close(result(model), expected)


def test_on_a_cpu_nothing_changes() -> None:
    model = model_of(LlamaConfig)
    expected = model(input_ids=IDS).logits
    before = copy.deepcopy(list(model.state_dict()))
    use_kernels(model)
    assert torch.equal(model(input_ids=IDS).logits, expected)
    assert list(model.state_dict()) == before
    assert "surefit" not in repr(apply_rotary_pos_emb), "the module of the family stays as it is"


class Scaled(torch.nn.Module):
    """What a norm may compute that only looks like one of Llama's: `change` decides."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor], eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps, self.change = torch.nn.Parameter(torch.ones(64)), eps, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copy = x.float()
        scaled = copy * torch.rsqrt(self.change(copy))
        return self.weight * scaled.to(x.dtype)


def test_a_norm_is_known_by_what_it_computes() -> None:
    assert find_rms_norm(LlamaRMSNorm(64, eps=1e-6)) == RmsNormSpec(1e-6, 0.0, False)
    assert find_rms_norm(GemmaRMSNorm(64, eps=1e-5)) == RmsNormSpec(1e-5, 1.0, True)
    assert find_rms_norm(Scaled(lambda x: x.pow(2).mean(-1, keepdim=True) + 1e-6)) == RmsNormSpec(1e-6, 0.0, False)
    others: list[Any] = [
        torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.Embedding(8, 64),
        Scaled(lambda x: x.pow(2).sum(-1, keepdim=True) + 1e-6),
        Scaled(lambda x: x.var(-1, keepdim=True) + 1e-6),
        Scaled(lambda x: x.pow(2).mean(-1, keepdim=True) + 1e-3),  # not with the eps that it has
    ]  # fmt: skip
    assert [find_rms_norm(other) for other in others] == [None] * len(others)


class Gated(torch.nn.Module):
    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor] = torch.nn.functional.silu) -> None:
        super().__init__()
        self.w2, self.w1, self.w3 = torch.nn.Linear(96, 64), torch.nn.Linear(64, 96), torch.nn.Linear(64, 96)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(self.w3(x) * self.activation(self.w1(x)))
        return out


def test_an_mlp_is_known_by_its_linears_and_its_activation() -> None:
    assert find_gated_mlp(Gated()) == GatedMlpNames("w1", "w3", "w2")
    assert find_gated_mlp(Gated(torch.nn.functional.gelu)) is None
    assert find_gated_mlp(Gated(lambda x: 2 * torch.nn.functional.silu(x))) is None
    square = LlamaConfig(**SIZES | {"intermediate_size": 64})
    assert find_gated_mlp(LlamaMLP(square)) == GatedMlpNames("gate_proj", "up_proj", "down_proj"), (
        "widths do not tell them apart"
    )
    assert find_rope_function(LlamaAttention) == "apply_rotary_pos_emb"
    assert find_rope_function(LlamaMLP) is None


def lora(dropout: float = 0.0, r: int = 6) -> PeftModel:
    model = model_of(LlamaConfig)
    adapter = add_adapter(model, LoraSection(r=r, lora_alpha=10.0, lora_dropout=dropout))
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter.parameters():
        if parameter.requires_grad:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter.dtype)
    fuse_lora(adapter)
    return adapter.train()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("r", [6, 130], ids=["inside the kernel", "beside it"])
def test_with_lora(dropout: float, checkpointing: bool, r: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lora(dropout, r=r)
    expected = result(model)
    if checkpointing:
        checkpoint_activations(model)
    use_kernels(model)
    ranks = []

    def seen(gate: Any, up: Any, low: Any, *others: Any) -> Any:
        ranks.append(None if low is None else low.shape[1])
        return kernel_ops.swiglu(gate, up, low, *others)

    for module in (kernels, kernels.fused_lora):
        monkeypatch.setattr(module, "swiglu", seen)
    assert_close(result(model), expected)
    inside = 12 if r == 6 and not dropout else None
    assert ranks == [inside] * (4 if checkpointing else 2)


@pytest.mark.slow
def test_compiled() -> None:
    model = lora()
    expected = result(model)
    use_kernels(model)
    compile_layers(model)
    assert_close(result(model), expected)


def test_a_step_keeps_less() -> None:
    """Of each token and layer: gate and up, and no more of silu(gate); norms keep their input as it is."""
    kept = []
    for on in (False, True):
        model = lora().to(torch.bfloat16)
        if on:
            use_kernels(model)
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with gpu_assumed((9, 0)), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        kept.append(sum(storages.values()))
        del loss
    assert kept[1] < kept[0]


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "missing_for_kernels", lambda: "liger-kernel")
    with pytest.raises(MachineError, match="liger-kernel") as caught:
        kernels.require_kernels()
    assert ".[kernels]" in str(caught.value.help)


def normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


ARGUMENTS: list[tuple[Any, tuple[Any, ...]]] = [
    (kernel_ops.rms_norm, (normal(2, 3, 8).requires_grad_(), normal(8).requires_grad_(), 1e-6, 1.0, True)),
    (kernel_ops.rms_norm, (normal(5, 8).requires_grad_(), normal(8), 1e-6, 0.0, False)),
    (
        kernel_ops.rope,
        (
            normal(2, 4, 5, 8).requires_grad_(),
            normal(2, 2, 5, 8).requires_grad_(),
            normal(2, 5, 8),
            normal(2, 5, 8),
            False,
        ),
    ),
    (kernel_ops.swiglu, (normal(5, 8).requires_grad_(), normal(5, 8).requires_grad_(), None, [], [])),
]


@pytest.mark.parametrize(("operator", "arguments"), ARGUMENTS)
def test_torch_may_trace_it(operator: Any, arguments: tuple[Any, ...]) -> None:
    """Its schema, its shapes without data, and its gradients when they are traced, also with symbolic sizes."""
    assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def test_gradients_are_those_of_the_results() -> None:
    x, weight = normal(3, 8).requires_grad_(), normal(8).requires_grad_()
    half = normal(1, 5, 4).repeat(1, 1, 2)
    q, k = normal(1, 4, 5, 8).requires_grad_(), normal(1, 2, 5, 8).requires_grad_()
    assert torch.autograd.gradcheck(lambda *given: kernel_ops.rms_norm(*given, 1e-6, 1.0, True)[0], (x, weight))
    assert torch.autograd.gradcheck(lambda *given: kernel_ops.rope(*given, half.cos(), half.sin(), False), (q, k))
    assert torch.autograd.gradcheck(
        lambda g, u: kernel_ops.swiglu(g, u, None, [], []), (x, normal(3, 8).requires_grad_())
    )
