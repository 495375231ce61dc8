"""What the held-out pairs say of a run on preferences."""

from __future__ import annotations

import pytest

from surefit.core.rundir import PAIRS_AT_START
from surefit.evaluate.pairs import HeldOutPairs, summarize_held_out_pairs


def line(accuracy: float, pairs: int = 90, chosen: float = -47.25, step: int = 80) -> dict[str, float]:
    return {
        "step": step, "eval_loss": 0.4, "eval_pairs": pairs, "eval_rewards/accuracies": accuracy,
        "eval_logps/chosen": chosen, "eval_logps/rejected": -186.0,
    }  # fmt: skip


BEFORE = {"event": PAIRS_AT_START, "chosen": -75.5, "rejected": -156.0}


def summary(*lines: dict[str, float], events: tuple[dict, ...] = (BEFORE,)) -> HeldOutPairs:
    found = summarize_held_out_pairs(lines, events)
    assert found is not None
    return found


def test_the_newest_measurement_has_wilsons_interval() -> None:
    found = summary(line(0.5, step=40), {"step": 50, "loss": 1.0}, line(86 / 90))
    assert (found.step, found.pairs, found.outcome) == (80, 90, "learned")
    # Wilson 1927 for 86 of 90: (0.9556 + 0.0213 ± 0.0470) / 1.0427
    assert (found.low, found.high) == (pytest.approx(0.891, abs=0.001), pytest.approx(0.983, abs=0.001))
    assert "In 95.6 % of 90 held-out pairs" in found.text
    assert "of the chosen answers -75.5 → -47.25, of the rejected answers -156 → -186" in found.text


@pytest.mark.parametrize(
    ("accuracy", "chosen", "outcome"),
    [(0.95, -40.0, "learned"), (0.95, -229.0, "both fell"), (0.55, -229.0, "unclear"), (0.2, -40.0, "reversed")],
)
def test_each_outcome(accuracy: float, chosen: float, outcome: str) -> None:
    assert summary(line(accuracy, chosen=chosen)).outcome == outcome


def test_without_a_reference_there_is_no_before() -> None:
    found = summary(line(0.95, chosen=-229.0), events=())
    assert found.outcome == "learned"
    assert "before training" not in found.text


def test_a_tie_counts_half_and_a_run_without_pairs_has_none() -> None:
    assert summary(line(0.5, pairs=1)).outcome == "unclear"
    assert summarize_held_out_pairs([{"step": 1, "eval_loss": 0.4}], []) is None
    assert summarize_held_out_pairs([], []) is None
