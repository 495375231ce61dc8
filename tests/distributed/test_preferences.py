"""Pairs in two real processes under ddp, against one process: the reference pass, the first batch, the steps."""

from __future__ import annotations

from typing import Any

import engine_steps
import numpy as np
import pairs_run
import pytest

pytestmark = pytest.mark.distributed
BOUND = 1e-4


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result: dict[str, Any] = engine_steps.start(pairs_run.__file__)
    return result


@pytest.mark.parametrize("case", pairs_run.CASES)
def test_two_processes_train_pairs_as_one(found: dict[str, Any], case: str) -> None:
    two, one = found[case], found[case]["alone"]
    assert len(two["lines"]) == len(one["lines"])
    for shared, alone in zip(two["lines"], one["lines"], strict=True):
        assert shared.keys() == alone.keys()
        for key in alone.keys() & {"loss", "grad_norm", "tokens", "supervised_tokens", "eval_loss", "eval_tokens"}:
            assert shared[key] == pytest.approx(alone[key], rel=BOUND), key
        for key in (key for key in alone if "rewards/" in key or "logps/" in key or key.endswith("kl")):
            assert shared[key] == pytest.approx(alone[key], rel=BOUND, abs=1e-4), key
    assert two["first"]["passed"]
    assert two["first"]["loss"] == pytest.approx(one["first"]["loss"], rel=BOUND)
    assert (two["reference"] is None) == (one["reference"] is None)
    if one["reference"] is not None:
        assert np.allclose(two["reference"], one["reference"], atol=1e-4, equal_nan=True)
