"""What a run on labelled answers did to the held-out ones."""

from __future__ import annotations

from typing import Any

import pytest

from surefit.core.rundir import PAIRS_AT_START
from surefit.evaluate.labelled import HeldOutLabels, summarize_held_out_labels

START = {"event": PAIRS_AT_START, "chosen": -75.5, "rejected": -156.0}


def line(step: int, auc: float | None, logps: float = -60.0, good: int = 30, bad: int = 20) -> dict[str, Any]:
    numbers = {"rewards/chosen": 0.5, "rewards/rejected": -0.7, "logps/chosen": logps, "logps/rejected": -160.0}
    numbers |= {"desirable": good, "undesirable": bad, "rewards/auc": auc}
    return {"step": step, "eval_loss": 0.4} | {f"eval_{name}": value for name, value in numbers.items()}


def summary(*lines: dict[str, Any]) -> HeldOutLabels:
    found = summarize_held_out_labels(lines, [START])
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("auc", "logps", "outcome"),
    [
        (0.9, -60.0, "learned"),
        (0.9, -90.0, "both fell"),
        (0.55, -60.0, "unclear"),
        (0.1, -60.0, "reversed"),
    ],
)
def test_the_newest_measurement_decides(auc: float, logps: float, outcome: str) -> None:
    found = summary(line(4, 0.2), line(8, auc, logps))
    assert (found.step, found.outcome) == (8, outcome)
    assert found.low < found.high
    for number in (f"{100 * auc:.1f}", "30", "20", "+0.5", "-0.7", "-75.5", f"{logps:.4g}", "-156"):
        assert number in found.text


def test_with_one_kind_nothing_is_judged() -> None:
    one = line(8, None, bad=0) | {"eval_rewards/rejected": None, "eval_logps/rejected": None}
    del one["eval_rewards/auc"]
    found = summary(one)
    assert (found.auc, found.outcome) == (None, "unclear")
    assert "undesirable ones" not in found.text
    assert "one label" in found.headline


def test_runs_without_labels_have_none() -> None:
    assert summarize_held_out_labels([{"step": 1, "eval_loss": 0.4}], []) is None
    assert summarize_held_out_labels([{"step": 1, "eval_loss": 0.4, "eval_desirable": None}], []) is None
