"""Pairs in two real processes, in every parallel mode, against one: the reference pass, the first batch, the steps."""

from __future__ import annotations

from typing import Any

import engine_steps
import numpy as np
import pairs_run
import pytest

pytestmark = pytest.mark.distributed
BOUND = 1e-5
"""Relative, of losses and gradient norms in float32."""
COMPARED = {"loss", "grad_norm", "nll", "tokens", "supervised_tokens", "eval_loss", "eval_tokens", "eval_pairs"}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result: dict[str, Any] = engine_steps.start(pairs_run.__file__)
    return result


@pytest.mark.parametrize(("mode", "case"), list(pairs_run.scenarios(pairs_run.available())))
def test_two_processes_train_pairs_as_one(found: dict[str, Any], mode: str, case: str) -> None:
    two, one = found[f"{mode}: {case}"], found[f"alone: {case}"]
    assert len([line for line in two["lines"] if "loss" in line]) == pairs_run.STEPS
    for shared, alone in zip(two["lines"], one["lines"], strict=True):
        assert shared.keys() == alone.keys()
        for key in alone.keys() & COMPARED:
            assert shared[key] == pytest.approx(alone[key], rel=BOUND), key
        # A reward is a small difference of two sums.
        for key in (key for key in alone if "rewards/" in key or "logps/" in key or key.endswith("kl")):
            assert shared[key] == pytest.approx(alone[key], rel=BOUND, abs=1e-5), key
    for name, weight in one["weights"].items():
        assert np.abs(np.array(two["weights"][name]) - np.array(weight)).max() < 2e-5, name


@pytest.mark.parametrize(("mode", "case"), list(pairs_run.scenarios(pairs_run.available())))
def test_the_reference_and_the_first_batch_are_those_of_one_process(
    found: dict[str, Any], mode: str, case: str
) -> None:
    two, one = found[f"{mode}: {case}"], found[f"alone: {case}"]
    assert two["first"]["passed"]
    if one["reference"] is None:
        assert two["reference"] is None
        return
    assert two["first"]["offset"] < 1e-6
    assert two["first"]["loss"] == pytest.approx(one["first"]["loss"], rel=BOUND)
    for name, values in one["reference"].items():
        assert np.allclose(np.array(two["reference"][name], float), np.array(values, float), 0, 1e-4, equal_nan=True)


def test_a_run_in_shards_that_ended_goes_on_bit_for_bit(found: dict[str, Any]) -> None:
    resumed = found["resumed"]
    assert resumed["from"] == 2
    assert resumed["same"]
    assert resumed["losses"][0] == resumed["losses"][1]
    assert not any("reference:" in note for note in resumed["notes"]), "it is read, not computed again"
