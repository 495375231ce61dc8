"""Fused LoRA layers: which they are, how a group behaves, and that everything else stays PEFT's."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from surefit.config.schema import LoraSection
from surefit.model import fused_lora
from surefit.model.adapter import add_adapter
from surefit.model.fused_lora import FusedLinear, fuse_lora, unfused_layers

X = torch.linspace(-1, 1, 5 * 16).view(5, 16)


class Attention(torch.nn.Module):
    """Three projections of what may be one input; `o_proj` is on its own."""

    def __init__(self) -> None:
        super().__init__()
        for name, outputs in (("q_proj", 24), ("k_proj", 8), ("v_proj", 8), ("o_proj", 16)):
            self.add_module(name, torch.nn.Linear(16, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x), self.o_proj(x)], dim=-1)


def adapted(names: str = "qkvo", **settings: Any) -> PeftModel:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=[f"{name}_proj" for name in names], **settings)
    model = get_peft_model(Attention(), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return model  # type: ignore[return-value]


def inner(model: PeftModel) -> Any:
    return model.get_base_model()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many projections each fused computation made, in order."""
    seen: list[int] = []
    original: Callable[..., Any] = fused_lora._run
    monkeypatch.setattr(fused_lora, "_run", lambda layers, x: seen.append(len(layers)) or original(layers, x))
    return seen


def gradients(model: PeftModel, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def close(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-5) for x, y in zip(a, b, strict=True))


def test_projections_of_one_input_are_computed_together(runs: list[int]) -> None:
    model = adapted()
    expected, grads = model(X), gradients(model, X)
    assert fuse_lora(model) == 4
    assert torch.allclose(model(X), expected, atol=1e-6)
    assert runs == [3, 1]  # q, k, v, and o, which no group has
    assert close(gradients(model, X), grads)
    assert fuse_lora(model) == 4  # again: nothing changes


def test_a_group_of_those_that_have_factors(runs: list[int]) -> None:
    model = adapted("qv")
    expected = model(X)
    assert fuse_lora(model) == 2
    assert torch.allclose(model(X), expected, atol=1e-6)
    assert runs == [2]


def test_results_are_not_kept() -> None:
    model = adapted()
    fuse_lora(model)
    model(X)
    group = inner(model).q_proj.fused_group
    assert group._x is None
    assert not group._ready


def test_nothing_of_the_output_s_size_is_kept_for_the_backward_pass() -> None:
    model = adapted()
    fuse_lora(model)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        inner(model).q_proj(X.clone().requires_grad_())
    parameters = {p.data_ptr() for p in model.parameters()}
    sizes = sorted(t.numel() for t in kept if t.data_ptr() not in parameters)
    assert sizes == [5 * 3 * 4, 5 * 16]  # A x of three projections, and x


def test_another_input_parts_the_group_for_good(runs: list[int]) -> None:
    model = adapted()
    attention = inner(model)
    other = X.flip(0)
    expected = [attention.q_proj(X), attention.k_proj(other), attention.v_proj(other)]
    fuse_lora(model)
    for _ in range(2):
        got = [attention.q_proj(X), attention.k_proj(other), attention.v_proj(other)]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, expected, strict=True))
    assert runs == [3, 1, 1, 1, 1, 1]
    assert attention.q_proj.fused_group.apart


def test_one_that_is_never_called_parts_the_group(runs: list[int]) -> None:
    model = adapted()
    fuse_lora(model)
    for _ in range(3):
        inner(model).q_proj(X)
    assert runs == [3, 3, 1]  # once can be an exception in between


def test_an_exception_midway_costs_nothing_but_a_computation(runs: list[int]) -> None:
    model = adapted()
    expected = model(X)
    fuse_lora(model)
    handle = inner(model).k_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(X)
    handle.remove()
    assert torch.allclose(model(X), expected, atol=1e-6)
    assert runs == [3, 3, 1]
    assert not inner(model).q_proj.fused_group.apart


@pytest.mark.parametrize("what", ["x", "factor", "scaling", "grad mode"])
def test_a_result_is_not_given_out_after_a_change(what: str) -> None:
    model = adapted()
    fuse_lora(model)
    attention, x = inner(model), X.clone()
    attention.q_proj(x)
    with torch.no_grad():
        if what == "x":
            x.add_(1)
        elif what == "factor":
            attention.k_proj.lora_B["default"].weight.add_(1)
        elif what == "scaling":
            attention.k_proj.set_scale("default", 3.0)
        got = attention.k_proj(x)
    # PEFT's own layer, with the same factors
    attention.k_proj.__class__ = type(attention.k_proj).__mro__[1]
    assert torch.allclose(got, attention.k_proj(x), atol=1e-5)
    assert not got.requires_grad


def test_dropout_draws_what_peft_draws_and_where_it_does(runs: list[int]) -> None:
    model = adapted(lora_dropout=0.5).train()
    torch.manual_seed(7)
    expected = model(X)
    fuse_lora(model)
    torch.manual_seed(7)
    assert torch.allclose(model(X), expected, atol=1e-6)
    assert runs == [1, 1, 1, 1]
    model.eval()
    assert torch.allclose(model(X), adapted().eval()(X), atol=1e-6)
    assert runs[4:] == [3, 1]


def test_the_input_may_need_no_gradient() -> None:
    model = adapted()
    fuse_lora(model)
    products: list[tuple[int, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.addmm_.default:
                products.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    for needed in (False, True):
        out = model(X.clone().requires_grad_(needed))
        with Watch():
            out.sum().backward()
        assert products == ([(5, 16)] * 4 if needed else [])
    assert all(p.grad is None for n, p in model.named_parameters() if "lora_" not in n)


def test_switching_off_merging_and_adapter_names_stay_pefts() -> None:
    model = adapted().eval()
    plain = Attention()
    plain.load_state_dict({n.replace(".base_layer", ""): p for n, p in inner(model).state_dict().items()}, strict=False)
    with_adapter = model(X)
    fuse_lora(model)
    with model.disable_adapter():
        assert torch.equal(model(X), plain(X))
    assert torch.allclose(model(X), with_adapter, atol=1e-6)
    model.merge_adapter()
    assert torch.allclose(model(X), with_adapter, atol=1e-5)
    model.unmerge_adapter()
    assert torch.allclose(model(X), with_adapter, atol=1e-5)
    assert torch.equal(model(X, adapter_names=["__base__"] * 5), model(X, adapter_names=["__base__"] * 5))
    merged = model.merge_and_unload()
    assert torch.allclose(merged(X), with_adapter, atol=1e-5)


def test_copies_and_pickles(tmp_path: Path) -> None:
    model = adapted()
    fuse_lora(model)
    expected = model(X)
    inner(model).q_proj(X)  # results lie ready
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        group = inner(made).q_proj.fused_group
        assert group.members == [inner(made).q_proj, inner(made).k_proj, inner(made).v_proj]
        assert not group._ready
        with torch.no_grad():
            inner(made).q_proj.lora_B["default"].weight.zero_()
        assert torch.equal(model(X), expected)
        assert not torch.equal(made(X), expected)
    names = set(adapted().state_dict())
    assert set(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(adapted().unload(), str(tmp_path))
    assert torch.allclose(again(X), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"use_dora": True}, "variant"), ({"lora_bias": True}, "variant"), ({"bias": "all"}, "is trained")],
)
def test_what_is_left_to_peft_is_named(settings: dict[str, Any], why: str) -> None:
    model = adapted(**settings)
    expected = model(X)
    assert fuse_lora(model) == 0
    left = unfused_layers(model)
    assert sorted(name.rpartition(".")[2] for name in left) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert all(why in reason for reason in left.values())
    assert torch.equal(model(X), expected)


def test_other_types_of_layers_and_of_inputs() -> None:
    model = adapted()
    fuse_lora(model)
    assert unfused_layers(model) == {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert inner(model).q_proj(X).dtype == torch.bfloat16  # PEFT's way
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    model.set_adapter("second")
    assert "variant" in str(fused_lora._obstacle(inner(model).q_proj))
    assert inner(model).q_proj(X).shape == (5, 24)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_under_fake_tensors(dropout: float) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    with torch.device("meta"):
        model = add_adapter(LlamaForCausalLM(config), LoraSection(r=4, lora_dropout=dropout)).train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():  # as the plan does
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    if tensor is not None:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                        trained = isinstance(tensor, torch.nn.Parameter)
                        store[name] = torch.nn.Parameter(fake, tensor.requires_grad) if trained else fake
        assert fuse_lora(model) == 14
        model(input_ids=torch.ones(2, 8, dtype=torch.long), use_cache=False).logits.sum().backward()
        factors = [p for p in model.parameters() if p.requires_grad]
        assert all(p.grad is not None and p.grad.shape == p.shape for p in factors)


def test_a_traced_layer_has_gradients() -> None:
    """torch 2.11 gives zeros for a traced autograd.Function of this kind, so what is traced is another form."""
    model = adapted()
    expected = gradients(model, X)
    fuse_lora(model)
    compiled = torch.compile(inner(model), backend="aot_eager", fullgraph=True)
    model.zero_grad()
    compiled(X).square().sum().backward()
    assert close([p.grad for p in model.parameters() if p.grad is not None], expected)
    assert isinstance(inner(model).q_proj, FusedLinear)


class Parted(Attention):
    """k and v read another tensor than q."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.flip(0)
        return torch.cat([self.q_proj(x), self.k_proj(y), self.v_proj(y), self.o_proj(x)], dim=-1)


class Broken(Attention):
    """Its compiled code ends between siblings."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(x)
        torch._dynamo.graph_break()
        return torch.cat([q, self.k_proj(x), self.v_proj(x), self.o_proj(x)], dim=-1)


@pytest.mark.parametrize(("kind", "graphs"), [(Attention, 1), (Parted, 2), (Broken, 2)])
def test_groups_are_traced(kind: type[Attention], graphs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many graphs, for all lengths, and nothing of the trace is left in the group."""
    monkeypatch.setitem(globals(), "Attention", kind)
    model = adapted()
    expected = [gradients(model, X[:rows]) for rows in (5, 4, 3)]
    fuse_lora(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled: Any = torch.compile(model, backend="aot_eager", dynamic=True)
    for rows, grads in zip((5, 4, 3), expected, strict=True):
        model.zero_grad()
        compiled(X[:rows].clone()).square().sum().backward()
        assert close([p.grad for p in model.parameters() if p.grad is not None], grads)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    group = inner(model).q_proj.fused_group
    assert group.apart == (kind is Parted)
    assert not group._ready
    torch._dynamo.reset()
