"""The page's part about checkpoints: the picture, the sentence, and nothing of a damaged or hostile file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surefit.core.rundir import RunDir, write_json
from surefit.report.artefacts import read_artefacts
from surefit.report.build import build_page, render_page


def page_of(folder: Path, **changes: Any) -> str:
    points = [
        {"step": 10 * n, "variant": f"step-{10 * n}", "mean": n / 10, "ci95": [n / 10 - 0.05, n / 10 + 0.05],
         "truncated": n, "unparsed": 0, "there": n > 1}
        for n in (1, 2, 3)
    ]  # fmt: skip
    over = [{"variant": "step-10", "more_than_chance": True}, {"variant": "step-20", "more_than_chance": False}]
    best = {"variant": "step-30", "confidence": 0.975, "over": over, "more_than_chance": False}
    found = {"metric": "exact_match", "n": 200, "checkpoints": points, "best": best, "base": None} | changes
    write_json(RunDir(folder).eval / "checkpoints.json", found)
    return render_page(build_page(read_artefacts(RunDir(folder))))


def test_it_is_drawn_and_said(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert "<h3>Checkpoints</h3>" in page
    assert (
        "step-30 has the best score of 3, but no clear lead over step-20 (2 comparisons, intervals of 97.5 %)." in page
    )
    assert page.count("<title>step-") == 3
    assert "its lead may be due to chance" in page


def test_nothing_of_a_file_is_taken_for_markup(tmp_path: Path) -> None:
    page = page_of(tmp_path, metric="<script>alert(1)</script>")
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


@pytest.mark.parametrize("changes", [{"checkpoints": []}, {"best": None}, {"checkpoints": "x"}], ids=str)
def test_without_scores_there_is_no_such_part(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert "<h3>Checkpoints</h3>" not in page_of(tmp_path, **changes)
