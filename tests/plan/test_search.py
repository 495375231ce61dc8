"""The search: what it may change, what it calls the best, and where a setting ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from surefit.core.errors import ConfigError, MachineError
from surefit.core.units import GIB
from surefit.plan.memory_interval import MemoryEstimate, build_memory_estimate, judge_fit
from surefit.plan.planner import ExampleLengths, Planner
from surefit.plan.search import _refine_guess, enumerate_candidates, find_fastest, find_largest, largest_fitting_index


@dataclass
class Simulated(Planner):
    """A planner whose "simulation" is the closed form times a factor, so that no test waits for a real one."""

    factor: float = 1.0
    asked: list[Any] = field(default_factory=list)
    pace: Callable[[Any], float] | None = None
    """A config's seconds per step; unknown if None."""

    def simulated(self, resolved, hardware) -> MemoryEstimate:
        self.asked.append(resolved)
        closed = self.closed_form(resolved, hardware)
        assert closed is not None
        return build_memory_estimate(round(closed.bytes * self.factor), hardware.kind, "simulation")

    def step(self, resolved, hardware, *, near=False) -> Any:
        return SimpleNamespace(seconds=self.pace(resolved.config)) if self.pace else None


def test_every_candidate_is_the_same_optimisation(place) -> None:
    here, model = place()
    found = enumerate_candidates(Simulated(model), [here])
    assert len(found) == 4 * 4 * 2, "micro batches 1, 2, 4, 8 × what is recomputed × tiles"
    assert {one.micro_batch * one.accumulation for one in found} == {8}
    for one in found:
        before, after = here.resolved.config, one.place.resolved.config
        assert (after.adapter, after.data, after.model) == (before.adapter, before.data, before.model)
        assert after.train.learning_rate == before.train.learning_rate


def test_padded_examples_may_be_packed(place) -> None:
    """Never the other way round: padding is not faster."""
    here, model = place("data.packing=false")
    found = enumerate_candidates(Simulated(model), [here])
    assert {one.packed for one in found} == {False, True}
    assert {one.place.resolved.config.speed.attention for one in found if one.packed} == {"torch_varlen"}
    packed, _ = place()
    assert {one.packed for one in enumerate_candidates(Simulated(model), [packed])} == {True}


def test_two_hundred_candidates_over_the_catalogue_are_a_matter_of_a_second(place) -> None:
    here, model = place("train.global_batch_size=64")
    found = enumerate_candidates(Simulated(model), [here] * 20)
    assert len(found) == 20 * 7 * 4 * 2


def test_the_best_fits_and_nothing_faster_did(place) -> None:
    here, model = place(gpu="h100")
    chosen = find_fastest(Simulated(model), [here], here)
    assert chosen.best is not None
    assert chosen.best.verdict == "fits"
    assert not chosen.best.checkpointing, "an 80 GB card needs none for 0.6B"
    assert chosen.best.accumulation == 1
    small, _ = place(memory=6 * GIB)
    tight = find_fastest(Simulated(model), [small], small)
    assert tight.best is not None
    assert tight.best.speed > chosen.best.speed
    assert tight.best.need.high <= 6 * GIB


@pytest.mark.parametrize(("gain", "stays"), [(0.009, True), (0.011, False)])
def test_the_config_stays_unless_something_is_faster_by_more_than_the_estimate_resolves(
    place, gain: float, stays: bool
) -> None:
    here, model = place("train.gradient_checkpointing=false", "train.per_device_train_batch_size=1", gpu="h100")

    def pace(config: Any) -> float:
        return 1.0 - gain * (config.train.per_device_train_batch_size == 2)

    chosen = find_fastest(Simulated(model, pace=pace), [here], here)
    assert chosen.best is not None
    assert (chosen.best is chosen.given) == stays
    assert chosen.best.micro_batch == (1 if stays else 2)


def test_nothing_fits(place) -> None:
    here, model = place(memory=GIB)
    assert find_fastest(Simulated(model), [here], here).best is None


def test_a_simulation_that_says_more_than_the_closed_form_is_believed(place) -> None:
    here, model = place(memory=6 * GIB)
    trusting = find_fastest(Simulated(model), [here], here)
    warned = find_fastest(Simulated(model, factor=1.2), [here], here)
    assert trusting.best is not None
    assert warned.best is None or warned.best.need.high <= 6 * GIB
    assert warned.best is None or warned.best.speed >= trusting.best.speed


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.15])
@pytest.mark.parametrize("field", ["max_length", "rank", "batch"])
def test_the_answer_fits_and_one_step_beyond_does_not(place, field: str, factor: float) -> None:
    here, model = place("train.gradient_checkpointing=true", memory=8 * GIB)
    planner = Simulated(model, factor=factor)
    found = find_largest(field, planner, here)
    assert found.value is not None
    assert found.need is not None
    assert judge_fit(found.need, 8 * GIB) == "fits"
    if found.beyond is not None:
        assert found.beyond_need is not None
        assert judge_fit(found.beyond_need, 8 * GIB) != "fits"
        assert found.beyond_need.bytes > found.need.bytes
    assert found.simulations <= 16


def test_a_length_is_looked_for_whatever_the_rows_are(place) -> None:
    here, model = place()
    known = find_largest("max_length", Simulated(model, ExampleLengths(100, 50.0, "passport")), here)
    assert known.value == find_largest("max_length", Simulated(model), here).value


def test_the_end_of_a_scale_is_said(place) -> None:
    here, model = place("train.gradient_checkpointing=true", gpu="b200")
    found = find_largest("batch", Simulated(model), here)
    assert (found.value, found.beyond) == (8, None)
    assert "global batch" in found.limit


def test_what_cannot_be_solved(place) -> None:
    full, model = place("train.method=full")
    with pytest.raises(ConfigError, match="there is no LoRA rank"):
        find_largest("rank", Simulated(model), full)
    with pytest.raises(ConfigError, match="'colour' is not supported"):
        find_largest("colour", Simulated(model), full)
    empty, _ = place(memory=0)
    with pytest.raises(MachineError, match="0 B of memory"):
        find_largest("batch", Simulated(model), empty)


@pytest.mark.parametrize("answer", [-1, 0, 1, 37, 63, 99])
@pytest.mark.parametrize("guess", [0, 40, 99])
def test_bisection_and_correction_agree(answer: int, guess: int) -> None:
    asked: list[int] = []

    def fits(index: int) -> bool:
        asked.append(index)
        return index <= answer

    assert largest_fitting_index(fits, 100) == answer
    asked.clear()
    assert _refine_guess(fits, guess, 100) == answer
    assert len(asked) <= 16


@pytest.mark.slow
def test_a_real_simulation_confirms_the_answer(place) -> None:
    """The built-in model on a card of 1.5 GiB, lengths up to its context."""
    here, model = place(model="surefit/nano", memory=int(1.5 * GIB))
    found = find_largest("max_length", Planner(model), here)
    assert isinstance(found.value, int)
    assert found.need is not None
    assert found.need.high <= 1.5 * GIB
    assert found.beyond_need is None or found.beyond_need.high > 1.5 * GIB
