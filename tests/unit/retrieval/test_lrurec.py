"""The scan against the recurrence written as a loop, the loss against torch's, and what padding must not change."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from surefit.retrieval.lrurec import LRURec, LRURecSize, next_item_loss, scan

pytestmark = pytest.mark.usefixtures("one_thread")


def ring(state, generator):
    """λ of magnitudes up to 0.999, where a long history still counts."""
    magnitude = 0.5 + 0.499 * torch.rand(state, generator=generator, dtype=torch.float64)
    return torch.polar(magnitude, torch.rand(state, generator=generator, dtype=torch.float64) * 2 * math.pi)


def one_by_one(given, decay):
    state, states = torch.zeros_like(given[:, 0]), []
    for step in given.unbind(1):
        state = decay * state + step
        states.append(state)
    return torch.stack(states, 1)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_scan_is_the_recurrence_and_so_are_its_gradients(length, dtype):
    generator = torch.Generator().manual_seed(length)
    decay = ring(6, generator).requires_grad_()
    given = torch.randn(3, length, 6, 2, generator=generator, dtype=torch.float64).requires_grad_()
    asked = torch.randn(3, length, 6, generator=generator, dtype=torch.float64)
    expected = one_by_one(torch.view_as_complex(given), decay)
    loss = (expected.real * asked).sum() + (expected.imag**2).sum()
    wanted = torch.autograd.grad(loss, (given, decay), materialize_grads=True)

    real, imaginary = scan(*(part.to(dtype) for part in (given[..., 0], given[..., 1], decay.real, decay.imag)))
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    scale = expected.abs().max()
    assert torch.allclose(real.double() / scale, expected.real / scale, atol=tolerance)
    assert torch.allclose(imaginary.double() / scale, expected.imag / scale, atol=tolerance)
    loss = (real * asked).sum() + (imaginary**2).sum()
    found = torch.autograd.grad(loss, (given, decay), materialize_grads=True)
    for mine, right in zip(found, wanted, strict=True):
        assert torch.allclose(mine / (right.abs().max() + 1e-9), right / (right.abs().max() + 1e-9), atol=tolerance)


def test_the_loss_and_its_gradients_are_those_of_cross_entropy():
    torch.manual_seed(0)
    model = LRURec(LRURecSize(700, width=16)).eval()
    items = torch.randint(1, 701, (9, 40))
    items[:, 0] = 0
    targets = torch.randint(1, 701, (9, 40))
    for row in range(9):
        items[row, 40 - 3 * row :] = 0
        targets[row, 40 - 3 * row :] = 0
    mine = next_item_loss(model, items, targets)
    found = torch.autograd.grad(3 * mine, list(model.parameters()))
    logits = model.logits(model(items))
    right = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)
    wanted = torch.autograd.grad(3 * right, list(model.parameters()))
    assert mine.item() == pytest.approx(right.item(), abs=1e-6)
    for (name, _), one, other in zip(model.named_parameters(), found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-6), name


def test_neither_padding_nor_the_beginning_reaches_an_item():
    torch.manual_seed(1)
    model = LRURec(LRURecSize(50, width=16)).eval()
    alone = model(torch.tensor([[5, 9, 2]]))
    batched = model(torch.tensor([[5, 9, 2, 0, 0, 0], [1, 2, 3, 4, 5, 6]]))
    assert torch.allclose(alone[0], batched[0, :3], atol=1e-6)
    assert batched[0, 3:].abs().max() == 0
    begun = model(torch.tensor([[0, 5, 9, 2]]))
    assert torch.allclose(alone[0], begun[0, 1:], atol=1e-6), "what comes after the beginning does not remember it"
    assert begun[0, 0].abs().max() > 0, "the first item is predicted from something"


def written_out(model, history):
    """The model for one history as the two papers write it: complex numbers, one step after the other, post-norm."""
    x = functional.layer_norm(model.item.weight[history], (model.shape.width,))
    for unit, position_wise in zip(model.recurrent, model.position_wise, strict=True):
        nu, theta, gamma = torch.exp(unit.ring_log)
        into = torch.complex(*(unit.into(x) * gamma.repeat(2)).chunk(2, dim=-1))
        states = one_by_one(into[None], torch.exp(torch.complex(-nu, theta)))[0]
        real, imaginary = unit.out.weight.chunk(2, dim=-1)
        out = (states @ torch.complex(real, -imaginary).T).real + unit.out.bias
        x = functional.layer_norm(x + out, (model.shape.width,))
        inner = functional.gelu(position_wise.wide(x))
        x = functional.layer_norm(x + position_wise.narrow(inner), (model.shape.width,))
    return x @ model.item.weight.T + model.bias


def test_the_model_is_the_papers_equations():
    torch.manual_seed(4)
    model = LRURec(LRURecSize(80, width=16)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "ring_log" not in name:
                parameter.mul_(10)  # as drawn, the blocks change so little that errors in them would not show
    history = torch.randint(1, 81, (37,))
    with torch.inference_mode():
        assert torch.allclose(model.logits(model(history[None]))[0], written_out(model, history), atol=1e-4)


def test_what_comes_later_is_not_seen():
    torch.manual_seed(2)
    model = LRURec(LRURecSize(50, width=16)).eval()
    one, other = model(torch.tensor([[5, 9, 2, 7], [5, 9, 8, 1]]))
    assert torch.allclose(one[:2], other[:2], atol=1e-6)
    assert not torch.allclose(one[2], other[2], atol=1e-3)


def test_the_ring_is_where_the_paper_puts_it():
    torch.manual_seed(3)
    unit = LRURec(LRURecSize(10, width=512, blocks=1)).recurrent[0]
    nu, theta, gamma = torch.exp(unit.ring_log.detach())
    magnitude = torch.exp(-nu)
    assert 0.8 <= magnitude.min() < 0.81
    assert 0.98 < magnitude.max() <= 0.99
    # Uniform on the ring's area: half of it lies beyond the root of the mean of the squares.
    assert (magnitude > math.sqrt((0.8**2 + 0.99**2) / 2)).float().mean() == pytest.approx(0.5, abs=0.05)
    assert theta.min() >= 0
    assert theta.max() <= 2 * math.pi
    assert torch.allclose(gamma, torch.sqrt(1 - magnitude**2))
    assert unit.into.weight.abs().max() <= 0.04
