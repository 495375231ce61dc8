"""metrics.jsonl stays valid JSON and forgets what a resumed run will write again."""

import json
from pathlib import Path

from surefit.telemetry.jsonl import MetricsLog


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "rejected": True})
    text = log.path.read_text()
    assert json.loads(text) == {"step": 1, "loss": None, "grad_norm": None, "rejected": True}


def test_rewind_drops_later_lines_and_a_line_cut_short(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        log.append({"step": step, "loss": 1.0})
    log.append({"step": 2, "eval_loss": 0.5})
    with open(log.path, "a") as file:
        file.write('{"step": 4, "lo')
    kept = log.rewind(2)
    assert [record["step"] for record in kept] == [1, 2, 2]
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [1, 2, 2]


def test_rewind_without_a_file_is_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert log.rewind(0) == []
    assert not log.path.exists()
