"""The demo is the shipped config on a stricter held-out set, and its summary says what the run's files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefit import samples
from surefit.cli.demo import BUILT_IN, CONFIG, NO_TOOL, REAL, score_leaderboard, summarize_demo, write_leaderboard
from surefit.config.load import load_config
from surefit.config.resolve import iter_config_values
from surefit.core.errors import DataError
from surefit.core.rundir import RunDir, append_jsonl, read_jsonl, write_json

SHIPPED = Path(__file__).parents[2] / "configs/function-calling-nano.yaml"


def test_the_demo_differs_from_the_shipped_config_in_nothing_else() -> None:
    demo, shipped = (
        dict(iter_config_values(load_config(CONFIG).config)),
        dict(iter_config_values(load_config(SHIPPED).config)),
    )
    shorter = {"checkpoint.save_steps", "evaluate.max_examples"}
    assert {key for key in demo | shipped if demo.get(key) != shipped.get(key)} == {"data.eval", "output_dir"} | shorter
    assert demo["train.max_steps"] <= 500


def summary_of(run: RunDir, sets: dict[str, Any]) -> None:
    write_json(run.eval_summary, {"primary_metric": "exact_match", "sets": sets})
    write_json(run.certificate, {"passed": True})
    for step in (1, 2, 3):
        append_jsonl(run.metrics, {"step": step, "loss": 1.0})
    append_jsonl(run.metrics, {"step": 3, "eval_loss": 1.0})


def scored_set(metric: str, base: float, tuned: float, n: int) -> dict[str, Any]:
    pair = {"a": "base", "b": "merged", "metric": metric, "difference": tuned - base, "ci95": [-1.0, 1.0]}
    return {
        "n": n,
        "variants": {"base": {metric: {"mean": base}}, "merged": {metric: {"mean": tuned}}},
        "comparisons": [{**pair, "metric": "json_valid", "difference": 0.1}, pair],
    }


def test_summary(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    scored = scored_set("exact_match", 0.0, 0.75, 300)
    summary_of(run, {"eval": scored, "old_tools": scored})
    result = summarize_demo(run, BUILT_IN, 12.34)
    expected = {"base": 0.0, "tuned": 0.75, "gain": 0.75, "ci95": [-1.0, 1.0], "n": 300, "steps": 3, "seconds": 12.3}
    assert {key: result[key] for key in expected} == expected
    assert result["certificate"] is True


def test_summary_of_the_real_demo_counts_refusals_apart(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    sets = {"eval": scored_set("exact_match", 0.0, 0.5, 87), NO_TOOL: scored_set("irrelevance", 1.0, 0.875, 32)}
    summary_of(run, sets)
    result = summarize_demo(run, REAL, 1.0)
    assert (result["metric"], result["gain"], result["n"]) == ("exact_match", 0.5, 87)
    kept = result["sets"][NO_TOOL]
    assert (kept["metric"], kept["base"], kept["tuned"], kept["gain"], kept["n"]) == (
        "irrelevance",
        1,
        0.875,
        -0.125,
        32,
    )


def test_the_real_demo_has_its_rows_with_the_package() -> None:
    config = load_config(REAL.config).config
    assert config.model.name_or_path == "surefit/smollm2-135m-instruct"
    assert {config.data.train, config.data.eval, *config.evaluate.extra_sets.values()} <= set(samples.list_samples())
    assert {"eval", *config.evaluate.extra_sets} <= REAL.sets.keys()
    assert config.evaluate.gate is not None
    assert config.evaluate.gate.not_worse_than == "base"


def leaderboard(data: Path, count: int) -> None:
    folder = data / "function_calling/bfcl"
    (folder / "possible_answer").mkdir(parents=True)
    tool = {"name": "f", "description": "", "parameters": {"type": "dict", "required": ["x"], "properties": {
        "x": {"type": "string", "description": ""}}}}  # fmt: skip
    questions, answers = [], []
    for number in range(count):
        turn = [{"role": "user", "content": f"Call f with x {number}" + " please" * (200 if number % 2 else 0)}]
        questions.append({"id": f"live_simple_{number}", "question": [turn], "function": [tool]})
        answers.append(
            {"id": f"live_simple_{number}", "ground_truth": [{"f": {"x": [str(number), f"number {number}"]}}]}
        )
    for place, lines in ((folder, questions), (folder / "possible_answer", answers)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (place / "BFCL_v4_live_simple.json").write_text(text, encoding="utf-8")


def test_the_leaderboards_short_requests_are_asked_and_judged_by_its_checker(tmp_path: Path) -> None:
    leaderboard(tmp_path, 10)
    rows, run = tmp_path / "rows.jsonl", RunDir(tmp_path / "run")
    write_leaderboard(tmp_path, rows)
    assert [row["id"] for row in read_jsonl(rows)] == [f"live_simple_{number}" for number in (0, 2, 4, 6, 8)]
    for variant, value in (("base", "0"), ("merged", "number 2")):
        for index in range(5):
            text = json.dumps([{"name": "f", "arguments": {"x": value}}])
            append_jsonl(run.eval / f"leaderboard/{variant}.predictions.jsonl", {"index": index, "text": text})
    found = score_leaderboard(tmp_path, rows, run)
    assert (found["base"], found["tuned"], found["gain"], found["n"]) == (0.2, 0.2, 0.0, 5)
    with pytest.raises(DataError, match="does not exist"):
        write_leaderboard(tmp_path / "nowhere", rows)


def test_the_real_demo_checks_clean(surefit: Any, tmp_path: Path) -> None:
    """With the built-in model in place of the real one, which need not be here: rows, schedule, lengths."""
    changes = ["model.name_or_path=surefit/nano", f"output_dir={tmp_path / 'run'}"]
    done = surefit("check", str(REAL.config), *(part for change in changes for part in ("--set", change)), "--json")
    assert (done.code, done.json["findings"]) == (0, [])
