"""The learning rate: its worked numbers, and transformers' own schedules as the reference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.optimization import (
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from surefit.train.schedule import learning_rate

STEPS = 50


def of_transformers(make: Callable[..., Any], **settings: Any) -> list[float]:
    """The rates from transformers' second step on: the first has a rate of 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer, num_training_steps=STEPS + 1, **settings)
    rates = []
    for _ in range(STEPS):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("schedule", "make"), [("cosine", get_cosine_schedule_with_warmup), ("linear", get_linear_schedule_with_warmup)]
)
def test_cosine_and_linear_are_those_of_transformers_one_step_on(schedule: str, make: Any, warmup: int) -> None:
    theirs = of_transformers(make, num_warmup_steps=warmup + 1)
    ours = [learning_rate(step, STEPS, 1.0, schedule, warmup) for step in range(STEPS)]
    assert ours == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize(("warmup", "decay", "decay_steps"), [(5, 0.2, 10), (5, 12, 12), (0, 0.5, 25), (9, 41, 41)])
def test_wsd_is_that_of_transformers_one_step_on(warmup: int, decay: float, decay_steps: int) -> None:
    theirs = of_transformers(
        get_wsd_schedule, num_warmup_steps=warmup + 1, num_decay_steps=decay_steps, decay_type="linear"
    )
    ours = [learning_rate(step, STEPS, 1.0, "warmup_stable_decay", warmup, decay) for step in range(STEPS)]
    assert ours == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_rate_never_is_zero_and_peaks_once(schedule: str) -> None:
    rates = [learning_rate(step, 50, 2e-4, schedule, 0.1) for step in range(50)]
    assert min(rates) > 0
    assert rates.index(max(rates)) == 5
    assert max(rates) == 2e-4
    assert rates.count(2e-4) == 1
    assert rates[:6] == sorted(rates[:6])
    assert rates[5:] == sorted(rates[5:], reverse=True)


def test_warmup_longer_than_the_run_and_a_constant_rate() -> None:
    assert [learning_rate(step, 3, 1.0, "cosine", 9) for step in range(3)] == [0.1, 0.2, 0.3]
    assert [learning_rate(step, 4, 1.0, "constant_with_warmup", 1) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert [learning_rate(step, 4, 1.0, "constant", 1) for step in range(4)] == [1.0] * 4
    assert learning_rate(0, 1, 1.0, "cosine", 0.0) == 1.0


def test_a_decay_longer_than_what_warmup_leaves_starts_after_warmup() -> None:
    assert [learning_rate(step, 5, 1.0, "warmup_stable_decay", 1, 100) for step in range(5)] == [
        0.5,
        1.0,
        0.75,
        0.5,
        0.25,
    ]
    assert [learning_rate(step, 3, 1.0, "warmup_stable_decay", 3, 1) for step in range(3)] == [0.25, 0.5, 0.75]
    assert learning_rate(0, 1, 1.0, "warmup_stable_decay", 0, 0.2) == 1.0
