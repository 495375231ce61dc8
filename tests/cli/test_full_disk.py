"""A disk that is really full: `merge`, `evaluate` and `report` say so, leave nothing half-made, and go on with room."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_disk import room
from tests.cli.conftest import Surefit

from surefit.core.rundir import RunDir, read_json

KIB = 1024


def left_over(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.path.iterdir() if ".tmp" in path.name or path.name.startswith(".merged"))


@pytest.mark.slow
def test_merge_evaluate_and_report_on_a_full_disk(surefit: Surefit, config: Path, small_disk: Path) -> None:
    run = RunDir(small_disk / "run")
    assert surefit("train", config, "--set", f"output_dir={run.path}").code == 0
    shutil.rmtree(run.checkpoints)

    def refused(verb: str, free: int) -> None:
        room(small_disk, free)
        answer = surefit(verb, run.path)
        assert answer.code == 3, (free, answer.text)
        assert "No space left on device" in answer.stderr or "free" in answer.stderr, answer.text
        assert "help:" in answer.stderr
        assert left_over(run) == [], free

    for free in (0, 64 * KIB, 2_000 * KIB, 5_500 * KIB):  # the merged model takes 5.6 MiB
        refused("merge", free)
        assert not run.merged.exists()
        assert not run.certificate.exists() or not read_json(run.certificate)["passed"]
    room(small_disk, 32 * KIB * KIB)
    assert surefit("merge", run.path).code == 0
    assert read_json(run.certificate)["passed"]

    refused("evaluate", 8 * KIB)
    assert not run.eval_summary.exists()
    refused("report", 16 * KIB)
    assert not run.report.exists()
    room(small_disk, 32 * KIB * KIB)
    assert surefit("report", run.path).code == 0
