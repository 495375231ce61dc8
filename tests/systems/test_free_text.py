"""Support answers and word problems, as a user has them: the run says that it fits them better, also where no problem
is solved; with the answers shuffled among the rows it must not say so, although it finds them likelier."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import call

from surefit.core.rundir import RunDir, read_json

pytestmark = pytest.mark.slow

NAMES = ("Ann", "Bob", "Dee", "Eve", "Flo", "Gus", "Hal", "Ida", "Kim", "Lou", "Max", "Ned", "Pam", "Ray", "Sue", "Tom")
THINGS = ("kettle", "toaster", "lamp", "mixer", "fridge", "heater", "iron", "radio", "fan", "clock", "oven", "grill")
FAULTS = {
    "does not turn on": "we will replace the {} within three days, and you need not send the old one back",
    "arrived broken": "we are sorry that the {} was damaged on its way; a new one leaves our store tomorrow",
    "is too loud": "please send the {} back to us within two weeks, and we will refund the full price",
    "was billed twice": "we have found the second payment for the {} and will return it within five days",
}


def support_rows(*, shuffled: bool) -> str:
    rng = random.Random(7)
    asked, answers = [], []
    for _ in range(200):
        name, thing, fault = rng.choice(NAMES), rng.choice(THINGS), rng.choice(list(FAULTS))
        asked.append(f"My name is {name}. The {thing} {fault}.")
        answers.append(f"Hi {name}, {FAULTS[fault].format(thing)}.")
    if shuffled:
        rng.shuffle(answers)
    return "".join(json.dumps({"prompt": q, "completion": a}) + "\n" for q, a in zip(asked, answers, strict=True))


def math_rows(*, shuffled: bool) -> str:
    """Products that the built-in model cannot compute, in solutions whose words follow from the question."""
    rng = random.Random(7)
    asked, answers = [], []
    for _ in range(200):
        name, thing, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(31, 98), rng.randint(31, 98)
        asked.append(f"{name} has {a} boxes of {b} {thing}s. How many {thing}s does {name} have?")
        answers.append(f"{name} has {a} boxes with {b} {thing}s in each.\n{a} * {b} = {a * b} {thing}s\n#### {a * b}")
    if shuffled:
        rng.shuffle(answers)
    return "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in zip(asked, answers, strict=True))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))

    def run_all(rows: str) -> tuple[str, dict[str, Any], str]:
        (tmp_path / "rows.jsonl").write_text(rows)
        for words in (("init", "--data", "rows.jsonl", "--model", "surefit/nano"), ("run", "rows.yaml")):
            answer = call(*words, *(("--set", "evaluate.max_new_tokens=40") if words[0] == "run" else ()))
            assert answer.code == 0, answer.text
        found = RunDir(tmp_path / "runs" / "rows")
        return answer.text, read_json(found.eval_summary), found.report.read_text()

    return run_all


def effect_of(summary: dict[str, Any]) -> dict[str, Any]:
    fit = summary["sets"]["eval"]["fit"]
    return next(effect for effect in fit["effects"] if effect["b"] == "merged")


def test_answers_that_follow_from_their_prompts(run: Any) -> None:
    text, summary, report = run(support_rows(shuffled=False))
    effect = effect_of(summary)
    assert summary["primary_metric"] == "answer_likelihood"
    assert effect["outcome"] == "better"
    assert effect["loss_b"] < 0.5 * effect["loss_a"]
    assert effect["prompt_b"] > effect["prompt_a"] + 0.2
    losses = summary["sets"]["eval"]["fit"]["losses"]
    assert losses["adapter"] == pytest.approx(losses["merged"], abs=1e-4)
    assert "merged fits your answers better" in text
    assert "fits your answers better" in report
    assert "No clear effect" not in text + report


def test_shuffled_answers_are_no_improvement(run: Any) -> None:
    text, summary, report = run(support_rows(shuffled=True))
    effect = effect_of(summary)
    assert effect["outcome"] == "wording"
    assert effect["loss_b"] < 0.5 * effect["loss_a"], "the wording is learned"
    assert abs(effect["prompt_b"]) < 0.1
    assert "not what they say about the prompt" in text
    assert "not what they say about the prompt" in report
    for said in (text, report):
        assert "fits your answers better" not in said
        assert "Training helped" not in said


def test_problems_that_are_not_solved_are_still_fitted_better(run: Any) -> None:
    text, summary, report = run(math_rows(shuffled=False))
    effect = effect_of(summary)
    assert summary["primary_metric"] == "exact_match"
    assert effect["outcome"] == "better"
    assert re.match(r"No clear change of exact match \(0 of \d+ before", effect["metric_text"])
    for said in (text, report):
        assert "fits your answers better" in said
        assert "No clear effect" not in said
        assert "does not differ significantly from base" not in said


def test_shuffled_solutions_are_no_improvement(run: Any) -> None:
    text, summary, report = run(math_rows(shuffled=True))
    effect = effect_of(summary)
    assert effect["outcome"] in ("wording", "unsure")
    assert effect["loss_b"] < 0.5 * effect["loss_a"], "the wording is learned"
    for said in (text, report):
        assert "fits your answers better" not in said
        assert "Training helped" not in said
