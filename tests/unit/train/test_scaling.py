"""The loss scale: when it changes, that scaling costs nothing in float32, and what an overflow does to a step."""

import pytest
import tiny_run
import torch

from surefit.data.tokens.collate import collate
from surefit.train.optim import MasterAdamW
from surefit.train.scaling import GROWTH_INTERVAL, MINIMUM, START, LossScale
from surefit.train.step import StepResult, train_step


def test_it_doubles_after_enough_good_steps_and_halves_at_once() -> None:
    scale = LossScale()
    assert scale.value == START == torch.amp.GradScaler("cpu").get_scale()
    for _ in range(GROWTH_INTERVAL - 1):
        scale.grow()
    assert scale.value == START
    scale.grow()
    assert (scale.value, scale.good_steps) == (2 * START, 0)
    scale.grow()
    scale.shrink()
    assert (scale.value, scale.good_steps) == (START, 0)


def test_it_stops_at_the_minimum() -> None:
    scale = LossScale(2.0)
    assert scale.can_shrink
    scale.shrink()
    assert scale.value == MINIMUM
    assert not scale.can_shrink
    scale.shrink()
    assert scale.value == MINIMUM


def test_its_state_goes_around_through_json_numbers() -> None:
    scale = LossScale(2.0**20, 17)
    restored = LossScale()
    restored.restore(scale.state())
    assert restored == scale


def step(model: torch.nn.Module, scaling: LossScale | None) -> StepResult:
    optimizer = MasterAdamW(model)
    optimizer.learning_rate = 1e-2
    return train_step(model, [collate(tiny_run.rows(4), 0)], optimizer, 0.1, scaling=scaling)


def test_in_float32_scaled_and_unscaled_steps_give_the_same_bits() -> None:
    plain, scaled = tiny_run.llama().train(), tiny_run.llama().train()
    scaling = LossScale()
    assert step(plain, None) == step(scaled, scaling)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), scaled.parameters(), strict=True))
    assert scaling == LossScale(START, 1)


@pytest.mark.parametrize(
    ("value", "overflow", "after"), [(2.0**127, True, 2.0**126), (MINIMUM, False, MINIMUM)], ids=["large", "smallest"]
)
def test_gradients_that_are_not_finite_halve_the_scale_or_are_a_fault_of_the_run(
    value: float, overflow: bool, after: float
) -> None:
    model = tiny_run.llama().train()
    if not overflow:  # no scale can help against this
        model.model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scaling = LossScale(value)
    result = step(model, scaling)
    assert (result.applied, result.overflow) == (False, overflow)
    assert scaling == LossScale(after)
    assert result.loss == pytest.approx(4.16, abs=0.1)  # ln 64: the loss itself is not scaled
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_loss_that_is_not_finite_is_no_overflow() -> None:
    model = tiny_run.llama().train()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    scaling = LossScale()
    result = step(model, scaling)
    assert (result.applied, result.overflow) == (False, False)
    assert scaling == LossScale()
