"""The optimizers, with float32 masters: AdamW's numbers, what weight decay leaves alone, norm, clipping, and state."""

import copy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import clip_grad_norm_

from surefit.config.optimizers import OPTIMIZERS
from surefit.config.schema import TrainSection
from surefit.core.errors import ConfigError
from surefit.train.optim import (
    BitsAndBytesAdamW,
    MasterAdamW,
    MasterOptimizer,
    clip_factor,
    gradient_norm,
    is_decayed,
    make_optimizer,
)

KINDS = tuple(OPTIMIZERS)
WIDTH = 128
"""So that the matrices have the 4,096 numbers from which on bitsandbytes keeps 8 bits."""


@pytest.fixture(autouse=True)
def one_thread_and_paging_unwarned() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        yield
    torch.set_num_threads(before)


def made(model: torch.nn.Module, kind: str, weight_decay: float = 0.0) -> MasterOptimizer:
    if kind in BitsAndBytesAdamW.CLASSES:
        pytest.importorskip("bitsandbytes")
    train = TrainSection.model_validate({"optim": kind, "weight_decay": weight_decay})
    optimizer = make_optimizer(model, train)
    optimizer.learning_rate = 1e-3
    return optimizer


def fill_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_float32_equals_torch_adamw_bit_for_bit() -> None:
    ours, theirs = tiny_run.llama(), tiny_run.llama()
    optimizer = MasterAdamW(ours)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    optimizer.learning_rate = 1e-3
    for seed in range(3):
        fill_gradients(ours, seed)
        fill_gradients(theirs, seed)
        optimizer.step()
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_weight_decay_spares_norms_and_biases(kind: str) -> None:
    model = tiny_run.llama(attention_bias=True)
    optimizer = made(model, kind, weight_decay=0.1)
    optimizer.learning_rate = 0.5
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # the update is then the decay alone
    optimizer.step()
    for name, parameter in model.named_parameters():
        kept = 0.95 if is_decayed(name, parameter) else 1.0
        torch.testing.assert_close(parameter, before[name] * kept)
        assert is_decayed(name, parameter) == ("norm" not in name and "bias" not in name)


def test_updates_too_small_for_bfloat16_add_up() -> None:
    plain, ours = (torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16) for _ in range(2))
    for layer in (plain, ours):
        torch.nn.init.constant_(layer.weight, 1.0)
    reference, optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0), MasterAdamW(ours)
    optimizer.learning_rate = 1e-3
    for _ in range(20):
        plain.weight.grad, ours.weight.grad = (torch.ones_like(layer.weight) for layer in (plain, ours))
        reference.step()
        optimizer.step()
    assert torch.equal(plain.weight, torch.ones_like(plain.weight))  # what we avoid: 1 - 0.001 rounds to 1
    torch.testing.assert_close(ours.weight.float(), torch.full((4, 4), 0.98), atol=2e-3, rtol=0)
    assert ours.weight.grad is not None
    optimizer.zero_grad()
    assert ours.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_around_through_a_file(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    first, second = (tiny_run.llama(hidden_size=WIDTH).to(dtype) for _ in range(2))
    one, two = made(first, kind, 0.01), made(second, kind, 0.01)
    for seed in range(3):
        fill_gradients(first, seed)
        one.step()
    save_file(one.tensors(), tmp_path / "state.safetensors")  # refuses two names for one memory
    two.load_tensors(load_file(tmp_path / "state.safetensors"))
    with torch.no_grad():
        for source, target in zip(first.parameters(), second.parameters(), strict=True):
            target.copy_(source)
    for seed in range(3, 6):
        for model, optimizer in ((first, one), (second, two)):
            fill_gradients(model, seed)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))
    assert one.tensors().keys() == two.tensors().keys()
    assert all(torch.equal(value, two.tensors()[name]) for name, value in one.tensors().items())
    assert any(name.startswith("master.") for name in one.tensors()) == (dtype != torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_optimizer_has_no_moments_to_save(kind: str) -> None:
    optimizer = made(tiny_run.llama(), kind)
    assert optimizer.tensors() == {}
    optimizer.load_tensors({})


def test_the_names_in_a_checkpoint() -> None:
    model = torch.nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    optimizer = made(model, "adamw_torch")
    fill_gradients(model, 0)
    optimizer.step()
    assert set(optimizer.tensors()) == {"master.weight", "step.weight", "exp_avg.weight", "exp_avg_sq.weight"}


@pytest.mark.parametrize(("kind", "bits"), [("adamw_8bit", 8), ("paged_adamw_32bit", 32), ("paged_adamw_8bit", 8)])
def test_what_bitsandbytes_keeps_in_8_bits(kind: str, bits: int) -> None:
    model = tiny_run.llama(hidden_size=WIDTH)
    optimizer = made(model, kind)
    fill_gradients(model, 0)
    optimizer.step()
    tensors = optimizer.tensors()
    for name, parameter in model.named_parameters():
        small = parameter.numel() < 4096 or "embed_tokens" in name
        stored = 8 if bits == 8 and not small else 32
        assert tensors[f"state1.{name}"].dtype == (torch.uint8 if stored == 8 else torch.float32)
        assert (f"absmax1.{name}" in tensors) == (f"absmax2.{name}" in tensors) == (stored == 8)
    assert model.model.embed_tokens.weight.numel() > 4096
    assert {name for name in tensors if name.startswith("qmap")} == (
        {"qmap.dynamic", "qmap.udynamic"} if bits == 8 else set()
    )


@pytest.mark.parametrize(
    ("kind", "apart"), [("paged_adamw_32bit", 1e-6), ("adamw_8bit", 4e-4), ("paged_adamw_8bit", 4e-4)]
)
def test_bitsandbytes_follows_adamw(kind: str, apart: float) -> None:
    """Twenty steps of 0.001: a weight moves by up to 0.02, and 8-bit moments err by a fiftieth of that."""
    ours, theirs = (tiny_run.llama(hidden_size=WIDTH) for _ in range(2))
    optimizer, reference = made(ours, kind, 0.1), made(theirs, "adamw_torch", 0.1)
    for seed in range(20):
        for model in (ours, theirs):
            fill_gradients(model, seed)
        optimizer.step()
        reference.step()
    differences = torch.cat([(a - b).flatten() for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)])
    assert differences.square().mean().sqrt() < apart
    assert (differences.abs().max() > 1e-6) == ("8bit" in kind)


@pytest.mark.parametrize("kind", BitsAndBytesAdamW.CLASSES)
def test_a_plan_can_run_bitsandbytes_without_data(kind: str) -> None:
    pytest.importorskip("bitsandbytes")
    with FakeTensorMode():
        model = torch.nn.Linear(128, 64, dtype=torch.bfloat16)
        optimizer = made(model, kind)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        assert gradient_norm(model.parameters()).shape == ()
        optimizer.step(0.5)
        kept = optimizer.tensors()["state1.weight"]
    assert kept.nbytes == 128 * 64 * (1 if "8bit" in kind else 4)


def test_bitsandbytes_missing_is_said_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    train = TrainSection.model_validate({"optim": "adamw_8bit"})
    with pytest.raises(ConfigError, match="adamw_8bit") as caught:
        make_optimizer(tiny_run.llama(), train)
    assert caught.value.field == "train.optim"
    assert caught.value.help is not None
    assert "'.[quant]'" in caught.value.help


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_that_of_float64(dtype: torch.dtype) -> None:
    model = tiny_run.llama(hidden_size=WIDTH).to(dtype)
    fill_gradients(model, 0)
    parameters = list(model.parameters())
    exact = torch.cat([p.grad.double().flatten() for p in parameters if p.grad is not None]).norm()
    norm = gradient_norm(parameters)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(float(exact), rel=1e-6)


def test_the_norm_of_many_numbers_is_exact_enough() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4_000_000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.01)
    exact = float(parameter.grad[0]) * 2000
    assert float(gradient_norm([parameter])) == pytest.approx(exact, rel=1e-6)


def test_the_norm_of_large_float16_gradients_is_finite() -> None:
    layer = torch.nn.Linear(4, 4, bias=False, dtype=torch.float16)
    layer.weight.grad = torch.full((4, 4), 60_000.0, dtype=torch.float16)
    assert not torch.isfinite(copy.deepcopy(layer.weight.grad).norm())
    assert float(gradient_norm(layer.parameters())) == pytest.approx(240_000, rel=1e-3)
    layer.weight.grad[0, 0] = torch.inf
    assert float(gradient_norm(layer.parameters())) == torch.inf


def test_without_gradients_the_norm_is_zero() -> None:
    assert float(gradient_norm(tiny_run.llama().parameters())) == 0.0


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e9])
def test_in_float32_norm_and_clipping_have_the_bits_of_torch(max_norm: float) -> None:
    ours, theirs = tiny_run.llama(), tiny_run.llama()
    optimizer, reference = made(ours, "adamw_torch"), made(theirs, "adamw_torch")
    for model in (ours, theirs):
        fill_gradients(model, 0)
    norm = float(gradient_norm(ours.parameters()))
    assert norm == float(clip_grad_norm_(theirs.parameters(), max_norm))
    optimizer.step(clip_factor(norm, max_norm))
    reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)
        assert torch.equal(a, b)


def test_the_factor_has_the_bits_of_torch() -> None:
    rng = np.random.default_rng(0)
    for norm in np.exp(rng.normal(0, 5, 2000)).astype(np.float32):
        expected = torch.clamp(0.3 / (torch.tensor(norm) + 1e-6), max=1.0)
        assert clip_factor(float(norm), 0.3) == float(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_16_bits_are_multiplied_in_float32(kind: str, dtype: torch.dtype) -> None:
    """The masters move as they would with float32 gradients, and what the model holds is left as it was."""
    ours, theirs = (tiny_run.llama(hidden_size=WIDTH).to(dtype) for _ in range(2))
    theirs = theirs.float()
    optimizer, reference = made(ours, kind), made(theirs, kind)
    fill_gradients(ours, 0)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None
        b.grad = a.grad.float() * 0.3
    before: list[Any] = [p.grad.clone() for p in ours.parameters() if p.grad is not None]
    optimizer.step(0.3)
    reference.step()
    tensors = optimizer.tensors()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(tensors[f"master.{name}"], parameter)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, ours.parameters(), strict=True))
