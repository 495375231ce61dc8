"""The benchmarks of preferences: their parts here, and one small run of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def test_the_polite_rows_are_what_the_script_makes_and_length_explains_nothing() -> None:
    import preference_rows

    file = ROOT / "configs/samples/polite-answers.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert rows == preference_rows.make_polite_rows(320, 0)
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert all(len(row["chosen"].split()) == len(row["rejected"].split()) for row in rows)
    assert all(preference_rows.is_polite(row["chosen"]) for row in rows)
    assert not any(preference_rows.is_polite(row["rejected"]) for row in rows)
    assert not any(preference_rows.is_polite(row["prompt"]) for row in rows)


def test_shuffled_labels_turn_about_half_of_the_pairs_round() -> None:
    import preference_rows

    rows = preference_rows.make_polite_rows(400, 3, shuffle_labels=True)
    assert 160 < sum(preference_rows.is_polite(row["chosen"]) for row in rows) < 240


def test_the_rules_own_measure_reads_generated_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import preference_rule

    folder = tmp_path / "eval" / "eval"
    folder.mkdir(parents=True)
    for variant, answers in {"base": ["On the shelf."] * 4, "merged": ["Gladly: on the shelf.", "No."] * 2}.items():
        lines = "".join(json.dumps({"text": answer}) + "\n" for answer in answers)
        (folder / f"{variant}.predictions.jsonl").write_text(lines, encoding="utf-8")
    base, merged = preference_rule.measure(tmp_path, "polite")
    assert (base["variant"], base["value"], merged["value"]) == ("base", 0.0, 0.5)
    assert merged["low"] < 0.5 < merged["high"] < 1.0
    base, merged = preference_rule.measure(tmp_path, "shorter")
    assert (base["value"], merged["value"]) == (3.0, 2.5)
    assert merged["low"] < 2.5 < merged["high"]


def test_an_epoch_counts_the_reference_of_its_own_pairs() -> None:
    import preference_speed

    run = {
        "seconds": [1.0, 1.0], "cpu_seconds": 4.0, "tokens": 100, "reference_seconds": 4.0,
        "reference_cpu_seconds": 8.0, "peak_bytes": 7,
    }  # fmt: skip
    found = preference_speed.figures(run, 4)  # the reference of four steps, two of which are timed
    assert (found["step_tokens_per_cpu_second"], found["tokens_per_cpu_second"]) == (25.0, 12.5)
    assert found["tokens_per_second"] == 25.0


@pytest.mark.parametrize(
    ("losses", "said"),
    [([0.70, 0.5], "the first loss"), ([0.693147, 0.6], "differ in step 2"), ([0.693147, 0.5], None)],
)
def test_a_stack_that_learns_something_else_is_void(losses: list[float], said: str | None) -> None:
    import preference_speed

    workload = preference_speed.WORKLOADS["short"]
    run = {
        "losses": losses, "seconds": [1.0], "cpu_seconds": 1.0, "tokens": 1, "reference_seconds": 0.0,
        "reference_cpu_seconds": 0.0, "peak_bytes": 1, "how": "",
    }  # fmt: skip
    row: dict[str, Any] = preference_speed.row_of("trl-tuned", [run], workload, [0.693147, 0.5])
    assert row["void"] is None if said is None else said in row["void"]


def succeed(*command: str, seconds: float) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=seconds, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_kill_9_at_ten_moments_of_runs_on_pairs_loses_nothing() -> None:
    said = succeed(str(BENCHMARKS / "kill_resume.py"), "--pairs", "--kills", "10", "--json", seconds=900)
    found = json.loads(said.splitlines()[-1])
    assert found["kills"] == 10
    assert found["phases"].get("reference"), "no kill came while the reference was being stored"


@pytest.mark.slow
def test_both_stacks_learn_the_same() -> None:
    pytest.importorskip("trl", reason="compares with TRL")
    import preference_speed

    workload = preference_speed.GPU_WORKLOADS["mini"]
    found = preference_speed.measured("mini", workload, ["surefit", "trl-tuned"], 1, None)
    assert [row["void"] for row in found["rows"]] == [None, None]
