"""`surefit train`: the dry pass, and scores while training."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.cli.conftest import Surefit

from surefit.core.rundir import RunDir, read_json, read_jsonl


def test_a_dry_run_runs_the_worst_case_and_leaves_nothing(surefit: Surefit, config: Path) -> None:
    answer = surefit("train", config, "--dry-run")
    assert answer.code == 0, answer.text
    assert "dry pass OK: the largest batch (" in answer.stderr
    assert "nothing was written" in answer.stdout
    assert not Path("runs").exists()
    assert surefit("train", config, "--dry-run", "--adapt").code == 0


def test_scores_are_measured_beside_the_held_out_loss(surefit: Surefit, config: Path) -> None:
    changes = {
        "evaluate.in_training": "true",
        "evaluate.max_examples": 4,
        "evaluate.max_new_tokens": 8,
        "train.max_steps": 2,
        "checkpoint.save_steps": 2,
        "checkpoint.metric_for_best_model": "exact_match",
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
    [("checkpoint.metric_for_best_model=exact_match", "EVL005"), ("lora.start_from=nowhere", "ADP005")],
)
def test_what_cannot_be_done_is_found_before_anything_starts(
    surefit: Surefit, config: Path, change: str, code: str
) -> None:
    answer = surefit("train", config, "--set", change)
    assert answer.code == 1
    assert code in answer.text
    assert not Path("runs").exists()


def test_the_run_directory_has_what_the_commands_said(
    surefit: Surefit, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "hf_" + "x" * 34
    monkeypatch.setattr(
        "sys.argv", ["surefit", "run", str(config), f"--set=telemetry.mlflow_uri=https://{secret}@host"]
    )
    steps = "--set", "train.max_steps=2"
    first = surefit("train", config, *steps)
    assert first.code == 0, first.text
    log = RunDir(Path("runs/one")).log
    said = log.read_text(encoding="utf-8")
    assert secret not in said
    assert "\x1b" not in said
    for line in [*first.stderr.splitlines(), *first.stdout.splitlines()]:
        # Libraries draw bars of their own where another test has them loaded already.
        assert line in said or "it/s]" in line, "all that the terminal had"
    assert surefit("train", config, *steps).code == 2  # nothing was taken over: the directory is another run's
    assert log.read_text(encoding="utf-8") == said
    assert surefit("train", config, *steps, "--resume", "--json").code == 0
    assert surefit("report", "runs/one").code == 0
    more = log.read_text(encoding="utf-8")
    assert more.startswith(said)
    assert [line[26:33] for line in more.splitlines() if "surefit 0" in line] == ["surefit"] * 3
    assert "report.html" in more
    assert surefit("train", config, *steps, "--overwrite").code == 0
    assert log.read_text(encoding="utf-8").count("Trained 2 steps") == 1


def test_an_error_is_in_the_log_too(surefit: Surefit, config: Path) -> None:
    answer = surefit("train", config, "--set", "train.max_steps=2", "--set", "data.max_length=8")
    assert answer.code != 0
    assert surefit("train", config, "--set", "train.max_steps=2").code == 0
    run = RunDir(Path("runs/one"))
    (run.adapter / "adapter_model.safetensors").write_bytes(b"damaged")
    merged = surefit("merge", "runs/one")
    assert merged.code != 0
    error = next(line for line in merged.stderr.splitlines() if "error[" in line)
    assert error.partition("] ")[2] in run.log.read_text(encoding="utf-8")


def test_resume_does_not_wait_for_a_pipe(surefit: Surefit, config: Path) -> None:
    """A pipe that nobody writes to, in the place of the newest manifest and then of the log."""
    several = ("--set", "checkpoint.save_steps=1", "--set", "checkpoint.save_total_limit=3")
    assert surefit("train", config, *several).code == 0
    run = RunDir(Path("runs/one"))
    manifest = run.checkpoints / "step-3" / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    resumed = surefit("train", config, *several, "--resume")
    assert resumed.code == 0, resumed.text
    assert "step-3 is damaged and was skipped" in resumed.text
    run.metrics.unlink()
    os.mkfifo(run.metrics)
    refused = surefit("train", config, *several, "--resume")
    assert refused.code == 2, refused.text
    assert "metrics.jsonl: error[E1063] cannot be read: not a regular file" in refused.text
