"""The use of experts in the report: what is drawn, and what is said."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from surefit.core.rundir import RunDir, write_atomic
from surefit.report.build import build_report
from surefit.report.expert_use import LAST, MAX_COLUMNS, measure_expert_load
from surefit.report.shapes import Metrics

write_run = runpy.run_path(str(Path(__file__).with_name("make_run.py")))["write_run"]


def line(step: int, dead: list[int | None], share: float = 0.5) -> Metrics:
    use = [[1, 8, share, dead[0]], [2, 8, 0.25, dead[1]]]
    return Metrics.model_validate({"step": step, "loss": 1.0, "expert_use": use})


def test_nothing_is_drawn_without_experts() -> None:
    assert measure_expert_load([Metrics(step=1, loss=1.0)]) is None


def test_stretches_are_means_and_every_step_is_in_one() -> None:
    found = measure_expert_load([line(step, [0, 0], share=step / 1000) for step in range(1, 2 * MAX_COLUMNS + 1)])
    assert found is not None
    assert (found.first, found.last) == (1, 2 * MAX_COLUMNS)
    assert [row.layer for row in found.rows] == [1, 2]
    assert found.rows[0].shares[:2] == [0.0015, 0.0035]
    assert len(found.rows[0].shares) == MAX_COLUMNS
    assert "25.0%, in layer 2" in found.sentences[0]
    assert "is 12.5% each" in found.sentences[0]


def test_dead_experts_are_those_of_all_the_last_steps() -> None:
    start = [line(step, [8, 8]) for step in range(1, 4)]
    end = [line(step, [3 + step % 2, 0]) for step in range(4, 4 + LAST)]
    found = measure_expert_load([*start, *end])
    assert found is not None
    assert f"in each of the last {LAST} steps: at least 3 in layer 1." in found.sentences[1]
    none = measure_expert_load([line(1, [0, 0])])
    assert none is not None
    assert none.sentences[1].startswith("No layer had dead experts")
    unknown = measure_expert_load([line(1, [None, None])])
    assert unknown is not None
    assert unknown.sentences[1] == "A step has too few tokens to detect dead experts."


def test_the_page_draws_a_square_for_each_layer_and_stretch(tmp_path: Path) -> None:
    run: RunDir = write_run(tmp_path, steps=8)
    before = build_report(run).read_text()
    assert "Expert load" not in before
    lines = [json.loads(each) for each in run.metrics.read_text().splitlines()]
    use = [[0, 4, 0.3, 0], [1, 4, 0.4, 0], [2, 4, 0.8, 2]]
    lines = [each | {"expert_use": use} if "loss" in each else each for each in lines]
    write_atomic(run.metrics, "".join(json.dumps(each) + "\n" for each in lines))
    page = build_report(run).read_text()
    assert page.count('height="10" fill-opacity') == 3 * 8
    assert page.count('fill-opacity="0.50"') == 8
    assert "at least 2 in layer 2" in page
