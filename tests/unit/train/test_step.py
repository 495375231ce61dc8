"""The step: rejects what is not finite before the optimizer, counts tokens, clips."""

import math

import pytest
import tiny_run
import torch

from surefit.data.tokens.collate import collate
from surefit.train.optim import MasterAdamW
from surefit.train.step import mean_loss, train_step


def snapshot(model: torch.nn.Module, optimizer: MasterAdamW) -> dict[str, torch.Tensor]:
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    return state | {name: tensor.clone() for name, tensor in optimizer.tensors().items()}


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture
def trained():
    """A model and optimizer that have done one good step."""
    model = tiny_run.llama().train()
    optimizer = MasterAdamW(model)
    optimizer.learning_rate = 1e-2
    batch = collate(tiny_run.rows(4), 0)
    assert train_step(model, [batch], optimizer, 1.0).applied
    return model, optimizer, batch


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_leaves_everything_untouched(trained, poison: float) -> None:
    model, optimizer, batch = trained
    before = snapshot(model, optimizer)
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: output * poison)
    result = train_step(model, [batch], optimizer, 1.0)
    hook.remove()
    assert not result.applied
    assert not math.isfinite(result.loss)
    assert equal(before, snapshot(model, optimizer))
    assert all(p.grad is None for p in model.parameters())
    assert train_step(model, [batch], optimizer, 1.0).applied


def test_a_finite_loss_with_a_bad_gradient_is_rejected_too(trained) -> None:
    model, optimizer, batch = trained
    before = snapshot(model, optimizer)
    hook = model.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    result = train_step(model, [batch, batch], optimizer, 1.0)
    hook.remove()
    assert math.isfinite(result.loss)
    assert not result.applied
    assert equal(before, snapshot(model, optimizer))


def test_counts(trained) -> None:
    model, optimizer, _ = trained
    rows = tiny_run.rows(6)
    result = train_step(model, [collate(rows[:4], 0), collate(rows[4:], 0)], optimizer, 1.0)
    assert result.tokens == sum(len(ids) for ids, _ in rows)
    assert result.supervised_tokens == sum(int((labels[1:] != -100).sum()) for _, labels in rows)


def test_the_reported_norm_is_before_clipping_and_the_applied_one_after() -> None:
    model = tiny_run.llama().train()
    batch = collate(tiny_run.rows(4), 0)

    class Recorder:
        norm = 0.0

        def step(self, factor: float = 1.0) -> None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            self.norm = factor * float(torch.stack([gradient.norm() for gradient in gradients]).norm())

        def zero_grad(self) -> None:
            model.zero_grad()

    recorder = Recorder()
    result = train_step(model, [batch], recorder, 0.01)
    assert result.grad_norm > 0.1
    assert recorder.norm == pytest.approx(0.01, rel=1e-3)


def test_mean_loss_has_no_dropout_leaves_the_mode_alone_and_can_be_given_up() -> None:
    model = tiny_run.llama(attention_dropout=0.5).train()
    batches = [collate(tiny_run.rows(3), 0), collate(tiny_run.rows(5, seed=2), 0)]
    first = mean_loss(model, batches)
    assert first == mean_loss(model, batches)
    assert model.training
    assert mean_loss(model, batches, stop=lambda: True) is None
    assert mean_loss(model, []) is None
    assert all(p.grad is None for p in model.parameters())
    whole = tiny_run.rows(3) + tiny_run.rows(5, seed=2)
    assert first is not None
    together = mean_loss(model, [collate(whole, 0)])
    assert together is not None
    assert first[0] == pytest.approx(together[0], rel=1e-5)
    assert first[1] == together[1]
