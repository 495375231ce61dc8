"""The progress line and its arithmetic: pace, tokens per second, MFU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from surefit.core.rundir import read_jsonl
from surefit.facts.flops import TrainingFlops
from surefit.telemetry.jsonl import MetricsLog
from surefit.train.progress import Counters, TrainingProgress
from surefit.train.reporting import SHOWN_OVER, EtaEstimator, MfuMeter, StepReporter
from surefit.train.step import StepResult

WORK = TrainingFlops(token=10, supervised=5, pair=1, windows=(None,))


def test_pace_of_steps_and_pauses() -> None:
    """Steps of 2 s, a pause of 10 s after every fourth, 12 steps: what is left is right from the second step on."""
    pace, now = EtaEstimator(4, pause=7.0), 100.0
    left = {}
    for step in range(1, 13):
        seconds = 30.0 if step == 1 else 2.0
        now += seconds
        pace.step(step, seconds, now)
        left[step] = pace.left(step, 12)
        now += 10.0 if step % 4 == 0 else 0.0
    assert left[1] == 11 * 30 + 3 * 7  # all that is known
    assert left[2] == 10 * 2 + 3 * 7
    assert left[4] == 8 * 2 + 3 * 7
    assert left[5] == pytest.approx(7 * 2 + 2 * 10)
    assert left[11] == pytest.approx(1 * 2 + 1 * 10)
    assert left[12] == pytest.approx(10)


def test_measurements_between_checkpoints_are_pauses_too() -> None:
    """Every 4 and every 6 of 13 steps: after 4, 6, 8 and 12, and after the last."""
    pace = EtaEstimator(4, 6, pause=7.0)
    pace.step(1, 2.0, 0.0)
    assert pace.left(1, 13) == 12 * 2 + 5 * 7
    assert pace.left(7, 13) == 6 * 2 + 3 * 7
    assert EtaEstimator(4, None, pause=7.0).left(7, 13) == 3 * 7


def test_a_last_step_that_is_no_multiple_has_its_pause_too() -> None:
    pace = EtaEstimator(4, pause=7.0)
    pace.step(9, 2.0, 0.0)
    assert pace.left(9, 10) == 2 + 7


def test_what_came_before_a_resume_does_not_count() -> None:
    pace = EtaEstimator(4)
    for step in (100, 101, 102):
        pace.step(step, 3.0, 3.0 * step)
    assert pace.left(102, 104) == pytest.approx(6)


def reported(tmp_path: Path, meter: MfuMeter) -> tuple[list[TrainingProgress], list[dict[str, float]]]:
    seen: list[TrainingProgress] = []
    log = MetricsLog(tmp_path / "metrics.jsonl")
    reporting = StepReporter(log, seen.append, 40, 0.1, EtaEstimator(10), meter)
    counters = Counters()
    for step in range(1, 41):
        counters.step = step
        applied = step != 3
        counters.rejected += not applied
        result = StepResult(1.0, 2.0, tokens=100 * step, supervised_tokens=10, applied=applied)
        reporting.step(counters, result, 1e-4, 2.0, [50 * step, 50 * step], 0.5, {})
    return seen, read_jsonl(log.path)


def test_the_line_is_smoothed_and_the_log_is_exact(tmp_path: Path) -> None:
    seen, lines = reported(tmp_path, MfuMeter(WORK, peak=1000.0))
    assert [line["tokens_per_second"] for line in lines] == [50.0 * step for step in range(1, 41)]
    last = range(41 - SHOWN_OVER, 41)
    assert seen[-1].tokens_per_second == pytest.approx(sum(100 * step for step in last) / (2.0 * SHOWN_OVER))
    flops = [10 * 100 * step + 5 * 10 + 2 * (50 * step * (50 * step + 1) // 2) for step in range(1, 41)]
    assert [line["flops"] for line in lines] == flops
    assert lines[4]["mfu"] == pytest.approx(flops[4] / 2.0 / 1000.0)
    assert seen[-1].mfu == pytest.approx(sum(flops[-SHOWN_OVER:]) / (2.0 * SHOWN_OVER) / 1000.0)


@pytest.mark.parametrize(
    "meter", [MfuMeter(), MfuMeter(WORK, None), MfuMeter(None, 1e12)], ids=["neither", "cpu", "unknown"]
)
def test_an_mfu_is_not_guessed(tmp_path: Path, meter: MfuMeter) -> None:
    seen, lines = reported(tmp_path, meter)
    assert {line["mfu"] for line in lines} == {None}
    assert "MFU" not in seen[-1].text


def test_the_line_names_every_number_that_is_known() -> None:
    progress = TrainingProgress(
        7, 10, 0.5, 1.25, 0.5, 2e-4, 12_500.0, 60.0, True, 2, 1.5, mfu=0.421, memory_bytes=3 * 1024**3, eval_step=5
    )
    assert progress.text == (
        "loss 1.2500 · held-out 1.5000 (step 5) · 2 rejected · epoch 0.50 · 12.50k tok/s · lr 2.00e-04 · grad 0.50"
        " · MFU 42% · 3.00 GiB"
    )
    bare = TrainingProgress(7, 10, 0.5, 1.25, 0.5, 2e-4, 500.0, 60.0, False, 0, None)
    assert bare.text == "REJECTED · loss 1.2500 · epoch 0.50 · 500 tok/s · lr 2.00e-04 · grad 0.50"
    assert (bare.eta_text, replace(bare, step=10).eta_text) == ("ETA 1 min 00 s", "ETA 0 s")
