"""What one card can show of the engines for several: real collectives, over NCCL where there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import one_card
import pytest

from surefit.core.units import GIB


@pytest.fixture(
    scope="module",
    params=[pytest.param("cpu", marks=pytest.mark.distributed), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def found(kind: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one-card")
    done = subprocess.run(
        [sys.executable, one_card.__file__, kind, folder, folder / "result.json"],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result


def test_the_process_is_connected(kind: str, found: dict[str, Any]) -> None:
    assert found["backend"] == {"cuda": "nccl", "cpu": "gloo"}[kind]


@pytest.mark.parametrize("scenario", one_card.SCENARIOS)
def test_twenty_steps_are_those_of_a_process_that_is_not(found: dict[str, Any], scenario: str) -> None:
    shared, alone = (found[scenario][way] for way in ("shared", "alone"))
    assert len(shared) == 20
    assert shared == pytest.approx(alone, rel=1e-5)


def test_a_whole_model_in_shards_takes_a_step(kind: str, found: dict[str, Any]) -> None:
    sharded = found["sharded"]
    assert (sharded["root"], sharded["kinds"], sharded["devices"]) == ("FSDPLossModule", ["DTensor"], [kind])
    assert sharded["applied"]
    assert sharded["loss"] == pytest.approx(sharded["untrained"], rel=0.05), "an untrained model guesses"
    if kind == "cuda":
        assert 8.0e9 < sharded["numbers"] < 8.2e9
        assert 14 * GIB < sharded["peak"] < 24 * GIB, "the weights once, and one layer gathered"
