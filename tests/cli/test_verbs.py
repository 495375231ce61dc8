"""Every verb does its work, says so to a person and to a script, and ends with the documented code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Surefit

from surefit.core.rundir import RunDir, read_json, read_jsonl
from surefit.doctor import probes


def test_a_run_from_start_to_page(surefit: Surefit, config: Path, tmp_path: Path) -> None:
    """One run for many questions, because training costs seconds."""
    answer = surefit("run", config, "--json")
    assert answer.code == 0, answer.text
    run = RunDir(tmp_path / "runs/one")
    for number, stage in enumerate(("check", "plan", "train", "merge", "evaluate", "report"), start=1):
        assert f"{number}/6 {stage}" in answer.stderr
    assert answer.json["scores"]["primary_metric"] == "exact_match"
    assert Path(answer.json["report"]).stat().st_size > 10_000
    assert read_json(run.certificate)["passed"]
    assert [line["step"] for line in read_jsonl(run.metrics) if "loss" in line] == [1, 2, 3]
    finished = [event["stage"] for event in read_jsonl(run.events) if event["event"] == "finished"]
    assert finished == ["train", "merge", "evaluate", "report"]
    assert "  num_train_epochs: 1.0  # default" in run.resolved.read_text()

    again = surefit("train", config)
    assert again.code == 2
    assert "--resume" in again.text
    assert "--overwrite" in again.text

    resumed = surefit("run", config, "--resume", "--json")
    assert resumed.code == 0, resumed.text
    assert resumed.json["scores"]["sets"] == answer.json["scores"]["sets"]

    listed = surefit("runs", "--json").json["runs"]
    assert [(row["run"], row["steps"]) for row in listed] == [("runs/one", 3)]

    asked = surefit("predict", "runs/one", "rows.jsonl", "-o", "answers.jsonl", "--json")
    assert asked.code == 0, asked.text
    assert asked.json["variant"] == "merged"
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert len(answers) == 40
    assert set(answers[0]["scores"]) >= {"exact_match", "json_valid"}

    dry = surefit("evaluate", "runs/one", "--dry-run", "--max-examples", "2", "--constrained", "--json").json
    assert dry["variants"] == [name + way for name in ("base", "adapter", "merged") for way in ("", "+grammar")]
    assert (dry["answers"], dry["sets"]) == (12, {"eval": 2})

    without_gold = tmp_path / "questions.jsonl"
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()[:2]]
    without_gold.write_text("".join(json.dumps({k: r[k] for k in ("query", "tools")}) + "\n" for r in rows))
    asked = surefit("predict", "runs/one", without_gold, "--variant", "adapter", "--json")
    assert asked.code == 0, asked.text
    assert [record["text"] for record in asked.json["answers"]] == [record["text"] for record in answers[:2]]
    assert "scores" not in asked.json["answers"][0]

    (tmp_path / "rows.jsonl").rename(tmp_path / "moved.jsonl")
    assert surefit("report", "runs/one").code == 0, "the run directory is all that its page needs"
    (tmp_path / "moved.jsonl").rename(tmp_path / "rows.jsonl")
    kept = (run.adapter / "adapter_config.json").read_text()
    assert '"base_model_name_or_path": "surefit/nano"' in kept, "no path of this machine"

    gate = surefit("evaluate", config, "--set", "evaluate.gate.min=1.0", "--variant", "merged", "--json")
    assert gate.code == 1, gate.text
    assert not gate.json["gate"]["passed"]


def test_check_says_all_and_exits_with_1_only_for_errors(surefit: Surefit, config: Path) -> None:
    fine = surefit("check", config)
    assert (fine.code, "no problem found" in fine.stdout) == (0, True), fine.text
    bad = surefit("check", config, "--set", "train.warmup_steps=100", "--set", "lora.target_modules=[q_porj]", "--json")
    assert bad.code == 1
    assert {"SCH001", "MOD008"} <= {finding["code"] for finding in bad.json["findings"]}
    stopped = surefit("train", config, "--set", "train.warmup_steps=100")
    assert stopped.code == 1
    assert "SCH001" in stopped.text
    assert not Path("runs").exists()


def test_check_show_marks_what_is_trained(surefit: Surefit, config: Path) -> None:
    shown = surefit("check", config, "--show", "2").stdout
    assert shown.count("⟦[{") == 2
    assert 'arguments": {"who": "person' in shown
    marked = shown.split("⟦")[1].split("⟧")[0]
    assert "Tools" not in marked
    assert len(surefit("check", config, "--show", "2", "--json").stdout.splitlines()) == 1
    assert surefit("check", config, "--show", "-1").code == 2


def test_dry_run_writes_nothing(surefit: Surefit, config: Path) -> None:
    answer = surefit("train", config, "--dry-run", "--json")
    assert answer.code == 0, answer.text
    assert answer.json["total_steps"] == 3
    assert not Path("runs").exists()


def test_init_writes_a_config_that_checks(surefit: Surefit) -> None:
    assert surefit("init", "function_calling", "-o", "start.yaml").code == 0
    assert surefit("check", "start.yaml").code == 0
    assert surefit("init", "function_calling", "-o", "start.yaml").code == 2
    assert "function_calling" in surefit("init", "--list").stdout


def test_explain_and_doctor(surefit: Surefit, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "## Why it is bad" in surefit("explain", "SCH001").stdout
    rules = surefit("explain", "--all", "--json").json["rules"]
    assert all(rule["evidence"] for rule in rules)
    wrong = surefit("explain", "MRG01")
    assert wrong.code == 2
    assert "MRG001" in wrong.text
    monkeypatch.setattr(probes, "GROUPS", (probes.python_probes, probes.clock_probes))  # tests/unit/doctor runs all
    found = surefit("doctor", "--json")
    assert found.code in (0, 3)
    assert {"python", "clock"} <= {probe["name"] for probe in found.json["probes"]}
    assert {probe["verdict"] for probe in found.json["probes"]} <= {"ok", "warn", "fail"}


def test_overwrite_spares_what_is_not_ours(surefit: Surefit, config: Path) -> None:
    Path("runs/one").mkdir(parents=True)
    Path("runs/one/thesis.tex").write_text("ten years")
    answer = surefit("train", config, "--overwrite")
    assert answer.code == 2
    assert "not a run directory" in answer.text
    assert Path("runs/one/thesis.tex").read_text() == "ten years"
