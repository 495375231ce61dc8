"""`surefit train`: the dry pass, and scores while training."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Surefit

from surefit.core.rundir import RunDir, read_json, read_jsonl


def test_a_dry_run_runs_the_worst_case_and_leaves_nothing(surefit: Surefit, config: Path) -> None:
    answer = surefit("train", config, "--dry-run")
    assert answer.code == 0, answer.text
    assert "dry pass: worst batch " in answer.stderr
    assert "nothing was written" in answer.stdout
    assert not Path("runs").exists()
    assert surefit("train", config, "--dry-run", "--adapt").code == 0


def test_scores_are_measured_beside_the_held_out_loss(surefit: Surefit, config: Path) -> None:
    changes = {
        "evaluate.in_training": "true",
        "evaluate.max_examples": 4,
        "evaluate.max_new_tokens": 8,
        "train.max_steps": 2,
        "checkpoint.every": 2,
        "checkpoint.keep_best": "exact_match",
    }
    arguments = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    answer = surefit("train", config, *arguments, "--json")
    assert answer.code == 0, answer.text
    run = RunDir(Path("runs/one"))
    (line,) = [line for line in read_jsonl(run.metrics) if "eval_loss" in line]
    assert 0 <= line["exact_match"] <= 1
    assert answer.json["best_step"] == 2
    steps = [line for line in read_jsonl(run.metrics) if "loss" in line]
    assert all(line["flops"] > 0 for line in steps)
    assert {line["mfu"] for line in steps} == {None}
    assert read_json(run.dry_pass)["step_seconds"] > 0
    assert answer.json["adapted"] == {}


@pytest.mark.parametrize(
    ("change", "code"),
    [("checkpoint.keep_best=exact_match", "EVL005"), ("adapter.start_from=nowhere", "ADP005")],
)
def test_what_cannot_be_done_is_found_before_anything_starts(
    surefit: Surefit, config: Path, change: str, code: str
) -> None:
    answer = surefit("train", config, "--set", change)
    assert answer.code == 1
    assert code in answer.text
    assert not Path("runs").exists()
