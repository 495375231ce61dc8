"""LoRA beside stacks of experts: the loss and all gradients are those of every expert computed alone, densely."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import families
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from surefit.config.schema import LoraSection, ParallelSection
from surefit.core.errors import ConfigError
from surefit.model.adapter import add_adapter
from surefit.model.checkpointing import enable_checkpointing
from surefit.model.experts import expert_stacks, find_expert_problems, is_transposed, of_each
from surefit.train.expert_use import ExpertUse
from surefit.train.loss import loss_sum, require_whole_routing
from surefit.train.optim import MasterAdamW
from surefit.train.step import train_step

pytestmark = pytest.mark.usefixtures("one_thread")
SECTION = LoraSection(r=3, lora_alpha=7, experts=True)
Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


def adapted(family: str, dtype: torch.dtype = torch.float64, section: LoraSection = SECTION) -> Any:
    """A model with random factors, so that no gradient is zero. torch's product of groups knows no float64, in which
    transformers' loop over the experts computes."""
    base = families.build(family).to(dtype)
    if dtype == torch.float64:
        base.set_experts_implementation("eager")
    model = add_adapter(base, section)
    noise = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=noise))
    return model.train()


def batch(padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, families.VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 7:] = 0
    rows = mask.flatten().nonzero().flatten()[1::2]
    return {"input_ids": ids, "attention_mask": mask, "loss_rows": rows, "targets": ids.flatten()[rows]}


@contextmanager
def dense(base: torch.nn.Module, factors: Factors) -> Iterator[None]:
    """Let every expert of `base`, which has no adapter, see every token, with its own W + scaling · B A."""
    with pytest.MonkeyPatch.context() as change:
        for name, module in base.named_modules():
            if f"{name}.down_proj" in factors:
                change.setattr(module, "forward", lambda *args, m=module, n=name: _dense(m, n, factors, *args))
        yield


def _dense(
    module: torch.nn.Module, name: str, factors: Factors, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    def product(expert: int, which: str, x: torch.Tensor) -> torch.Tensor:
        a, b = (half[expert] for half in factors[f"{name}.{which}"])
        stored = getattr(module, which)[expert]
        bias = getattr(module, f"{which}_bias", None)
        weight = (stored.T if is_transposed(module) else stored) + SECTION.lora_alpha / SECTION.r * b @ a
        return x @ weight.T + (0 if bias is None else bias[expert])

    total = torch.zeros_like(x)
    for expert in range(module.num_experts):
        share = (weights * (chosen == expert)).sum(-1, keepdim=True)
        total = total + share * product(expert, "down_proj", module._apply_gate(product(expert, "gate_up_proj", x)))
    return total


def reference(family: str, model: torch.nn.Module) -> tuple[torch.nn.Module, Factors]:
    """The family's model without experts' factors in it, and these one by one, as leaves."""
    base = families.build(family).double()
    stacks = expert_stacks(base)
    plain = add_adapter(base, SECTION.model_copy(update={"experts": False})).train()
    found = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        if ".lora_" in name:
            parameter.data.copy_(found[name])
    factors = {}
    for name, (experts, *_) in stacks.items():
        a, b = (found[f"{wrapper(name)}.lora_{half}.default.weight"].detach() for half in "AB")
        factors[f"base_model.model.{name}"] = tuple(
            each.clone().requires_grad_() for each in of_each(a.double(), b.double(), experts)
        )
    return plain, factors


def wrapper(stack: str) -> str:
    """Where PEFT keeps a stack's factors: gate and up are wrapped first."""
    owner, _, which = stack.rpartition(".")
    return f"base_model.model.{owner}{'.base_layer' * (which == 'gate_up_proj')}"


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-6), (torch.float32, 2e-3)])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_loss_and_gradients_are_those_of_a_dense_computation(
    family: str, padded: bool, dtype: torch.dtype, rtol: float
) -> None:
    with patch.dict(families.FAMILIES, {"gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2}}):
        model = adapted(family, dtype)
        plain, factors = reference(family, model)
    given = batch(padded)
    loss = loss_sum(model, given, chunked=True)
    loss.backward()
    with dense(plain, factors):
        expected = loss_sum(plain, given, chunked=True)
        expected.backward()
    torch.testing.assert_close(loss.double(), expected.double(), rtol=rtol / 10, atol=0)
    got = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(got[name].grad.double(), parameter.grad, rtol=rtol, atol=rtol / 10, msg=name)
    for name, (a, b) in factors.items():
        own = (
            got[f"{wrapper(name.removeprefix('base_model.model.'))}.lora_{half}.default.weight"].grad for half in "AB"
        )
        for found, leaf in zip(of_each(*own, len(a)), (a, b), strict=True):
            assert leaf.grad.any()
            torch.testing.assert_close(found.double(), leaf.grad, rtol=rtol, atol=rtol / 10, msg=name)


@pytest.mark.parametrize("how", [True, "selective"])
def test_recomputing_changes_no_gradient(how: bool | str) -> None:
    kept, recomputed = (adapted("qwen3_moe", torch.float32) for _ in range(2))
    enable_checkpointing(recomputed, how)
    for model in (kept, recomputed):
        loss_sum(model, batch(True), chunked=True).backward()
    for (name, one), other in zip(kept.named_parameters(), recomputed.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0, msg=name)


def test_the_router_and_the_experts_themselves_are_not_trained() -> None:
    trained = [name for name, parameter in adapted("qwen3_moe").named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".lora_" in name and ".gate." not in name for name in trained)
    assert sum(".experts." in name for name in trained) == 2 * 2 * 2  # A and B of two stacks in two layers


@pytest.mark.parametrize(("family", "name"), [("qwen3_moe", "mlp.gate"), ("gpt_oss", "mlp.router")])
def test_a_routers_gradients_are_those_of_its_whole_matrix(family: str, name: str) -> None:
    """With W' = W + s B A the gradient of B is s G Aᵀ, and that of A s Bᵀ G, where G is that of W' itself."""
    section = SECTION.model_copy(update={"experts": "with_router"})
    with patch.dict(families.FAMILIES, {"gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2}}):
        model = adapted(family, section=section)
        merged = adapted(family, section=section).merge_and_unload().train()
    given = batch(True)
    losses = [loss_sum(each, given, chunked=True) for each in (model, merged)]
    torch.testing.assert_close(*losses, rtol=1e-7, atol=0)
    for parameter in merged.parameters():
        parameter.requires_grad_()
    for each in (losses[0], loss_sum(merged, given, chunked=True)):
        each.backward()
    scale, got = section.lora_alpha / section.r, dict(model.named_parameters())
    for layer in range(2):
        matrix = merged.get_submodule(f"model.layers.{layer}.{name}").weight.grad
        a, b = (got[f"base_model.model.model.layers.{layer}.{name}.lora_{half}.default.weight"] for half in "AB")
        assert matrix.any()
        torch.testing.assert_close(b.grad, scale * matrix @ a.T, rtol=1e-6, atol=1e-10)
        torch.testing.assert_close(a.grad, scale * b.T @ matrix, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_trains_and_reports_the_routers_loss(checkpointing: bool) -> None:
    """The gradient is that of both losses; what is reported as the loss is the cross-entropy."""
    results, updates = [], []
    for coefficient in (0.0, 5.0):
        base = families.build("qwen3_moe", output_router_logits=True, router_aux_loss_coef=coefficient)
        model = add_adapter(base, SECTION).train()
        enable_checkpointing(model, checkpointing)
        optimizer = MasterAdamW(model)
        optimizer.learning_rate = 1e-2
        results.append([train_step(model, [batch(True), batch(False)], optimizer, 1e9) for _ in range(3)])
        updates.append({name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad})
    plain, balanced = results
    assert [each.router_loss for each in plain] == [0.0] * 3
    assert plain[0].loss == pytest.approx(balanced[0].loss, rel=1e-6)
    assert balanced[-1].router_loss is not None
    assert balanced[-1].router_loss < balanced[0].router_loss  # it was trained
    assert plain[-1].loss < balanced[-1].loss
    assert any(not torch.equal(updates[0][name], tensor) for name, tensor in updates[1].items())


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("frozen", [True, False])
def test_the_routers_loss_is_transformers_own(family: str, frozen: bool) -> None:
    """That of `load_balancing_loss_func` over every router's logits, with the coefficient of config.json; padding is no
    token. Beside factors the routers stay frozen; in a full fine-tune they are trained by it."""
    base = families.build(family, output_router_logits=True, router_aux_loss_coef=0.37).eval()
    logits: list[torch.Tensor] = []
    for name, module in base.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda module, args, output: logits.append(output[0].detach()))
    model = add_adapter(base, SECTION) if frozen else base
    micro, added = batch(True), []
    loss_sum(model, micro, chunked=True, balance=added).backward()
    settings = base.config
    expected = load_balancing_loss_func(
        tuple(logits[: settings.num_hidden_layers]), settings.num_local_experts, settings.num_experts_per_tok,
        micro["attention_mask"],
    )  # fmt: skip
    assert float(added[0]) / len(micro["targets"]) == pytest.approx(0.37 * float(expected), rel=1e-6)
    routers = [module.weight for name, module in base.named_modules() if name.endswith("mlp.gate")]
    assert [router.grad is None for router in routers] == [frozen] * len(routers)


@pytest.mark.parametrize("parallel", [ParallelSection(mode="pp", pp=2), ParallelSection(mode="cp", cp=2)])
def test_a_routers_loss_is_refused_where_layers_or_tokens_are_shared(parallel: ParallelSection) -> None:
    require_whole_routing(families.build("qwen3_moe"), parallel)
    asked = families.build("qwen3_moe", output_router_logits=True)
    require_whole_routing(asked, ParallelSection(mode="ddp"))
    with pytest.raises(ConfigError, match="all layers and tokens"):
        require_whole_routing(asked, parallel)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_use_of_experts_is_counted(checkpointing: bool) -> None:
    """By the routers' own answers, also where layers are recomputed; what is measured without training is not."""
    model = adapted("mixtral", torch.float32)
    enable_checkpointing(model, checkpointing)
    use, seen = ExpertUse(model), []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda module, args, output: seen.append(output[2].flatten()))
    assert use.taken() == {}
    loss_sum(model, batch(True), chunked=True).backward()
    shares = [torch.bincount(chosen, minlength=4) / len(chosen) for chosen in seen[:2]]
    entropies = [-sum(p * math.log(p) for p in share.tolist() if p) / math.log(4) for share in shares]
    found = use.taken()
    assert found["expert_max_share"] == pytest.approx(max(float(share.max()) for share in shares))
    assert found["expert_entropy"] == pytest.approx(min(entropies), rel=1e-5)
    most = [pytest.approx(float(share.max()), abs=1e-4) for share in shares]
    assert found["expert_use"] == [[0, 4, most[0], None], [1, 4, most[1], None]]  # 22 tokens are too few for `dead`
    model.eval()
    loss_sum(model, batch(True), chunked=True)
    assert use.taken() == {}
    assert ExpertUse(families.build("llama")).taken() == {}


def test_dead_experts_are_counted_by_layer() -> None:
    """Layers with different numbers of experts, over two micro batches; the router's answer is given."""
    model = families.build("qwen3_moe").train()
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.gate_up_proj, second.down_proj = (
        torch.nn.Parameter(each[:3]) for each in (second.gate_up_proj, second.down_proj)
    )
    use = ExpertUse(model)
    hooks = [next(iter(module._forward_pre_hooks.values())) for module in (first, second)]
    for _ in range(2):
        hooks[0](first, (torch.zeros(1), torch.tensor([0] * 97 + [1] * 2 + [2] * 1)))  # the fourth has none
        hooks[1](second, (torch.zeros(1), torch.tensor([0] * 40 + [1] * 30 + [2] * 30)))
    found = use.taken()
    assert found["expert_use"] == [[0, 4, 0.97, 3], [1, 3, 0.4, 0]]
    assert found["expert_max_share"] == pytest.approx(0.97)
    even = -sum(p * math.log(p) for p in (0.97, 0.02, 0.01)) / math.log(4)
    assert found["expert_entropy"] == pytest.approx(even, rel=1e-5)


def test_experts_that_compute_nothing_have_not_lost_their_factors() -> None:
    """A LongCat's first stack has more experts than its second; those that both have are compared."""
    a, b = torch.ones(4, 2, 3), torch.ones(4, 5, 2)
    b[2:] = 0
    assert find_expert_problems({"experts.gate_up_proj": (a, b), "experts.down_proj": (a[:2], b[:2])}) == []
    b[1] = 0
    found = find_expert_problems({"experts.gate_up_proj": (a, b), "experts.down_proj": (a[:2], torch.ones(2, 5, 2))})
    assert found == ["expert 1 of experts.gate_up_proj has a lora_B of zeros, although it was trained"]
