"""EVL002 to EVL004 through the code that gathers their facts, and EVL007."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surefit.config.schema import SureFitConfig
from surefit.data.read.load import load_rows
from surefit.facts.dataset import dataset_facts
from surefit.lint.engine import find_rule, run_rules
from surefit.lint.rule import Finding, LintContext

RULES = [find_rule(code) for code in ("EVL002", "EVL003", "EVL004")]


def config(
    train: str = "rows.jsonl", held_out: str | float = 0.2, split: str = "train", **evaluate: Any
) -> SureFitConfig:
    return SureFitConfig.model_validate(
        {
            "model": {"name_or_path": "surefit/nano"},
            "data": {"train": train, "eval": held_out, "split": split},
            "evaluate": evaluate,
            "output_dir": "runs/x",
        }
    )


def found(settings: SureFitConfig, rows: list[dict[str, Any]] | None = None) -> list[Finding]:
    dataset = dataset_facts("rows.jsonl", rows) if rows is not None else None
    return run_rules(LintContext(settings, Path("run.yaml"), dataset=dataset), RULES).findings


def answers(*texts: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"question {n}", "completion": text} for n, text in enumerate(texts)]


def unknown(metrics: tuple[str, ...], metric_for_best_model: str | None = None, **evaluate: Any) -> list[Finding]:
    settings = config(**evaluate)
    settings = settings.model_copy(
        update={"checkpoint": settings.checkpoint.model_copy(update={"metric_for_best_model": metric_for_best_model})}
    )
    return run_rules(LintContext(settings, Path("run.yaml"), metrics=metrics), [find_rule("EVL007")]).findings


def test_a_metric_that_the_recipe_does_not_give() -> None:
    metrics = ("exact_match", "valid")
    (one,) = unknown(metrics, gate={"metric": "exact_macht", "min": 0.5})
    assert one.field == "evaluate.gate.metric"
    assert one.message == "the recipe chat has no metric 'exact_macht'; did you mean 'exact_match'?"
    assert one.help == "choose from exact_match, valid"
    assert unknown(metrics, gate={"metric": "valid", "min": 0.5}) == unknown(metrics, gate={"min": 0.5}) == []
    assert unknown((), gate={"metric": "anything", "min": 0.5}) == [], "a recipe that does not say its metrics"
    (best,) = unknown(metrics, metric_for_best_model="eval_los", in_training=True)
    assert best.field == "checkpoint.metric_for_best_model"
    assert unknown(metrics, metric_for_best_model="eval_loss", in_training=True) == []
    assert unknown(metrics, metric_for_best_model="exact_macht") == [], "EVL005 says that nothing is measured"


def test_pass_at_k_takes_as_many_answers() -> None:
    metrics = ("pass@1", "pass@10", "pass@all")
    (one,) = unknown(metrics, gate={"metric": "pass@10", "min": 0.5}, samples=5, temperature=0.8)
    assert one.message == "pass@10 needs 10 answers per prompt, but evaluate.samples is 5"
    assert unknown(metrics, gate={"metric": "pass@10", "min": 0.5}, samples=10, temperature=0.8) == []
    assert unknown(metrics, gate={"metric": "pass@all", "min": 0.5}) == []


def test_lengths_count_runs_of_space_once_and_leave_nulls_out() -> None:
    facts = dataset_facts("rows", answers("a  b\n\n\tc", None, "", {"x": [1, 2]}, "null"))
    assert facts.target_lengths == (5, 0, len('{"x": [1, 2]}'), len("null"))
    assert dataset_facts("rows", [{"unknown": 1}]).target_lengths == ()


def test_answers_that_cannot_fit() -> None:
    long, short = "word " * 100, "short"  # 499 characters: more than 8 × 62, less than 8 × 63
    (one,) = found(config(max_new_tokens=62), answers(*[long] * 5, *[short] * 95))
    assert one.code == "EVL002"
    assert one.message == "5 of 100 sampled answers do not fit into 62 tokens; the longest has 499 characters"
    assert found(config(max_new_tokens=63), answers(*[long] * 100)) == []
    assert found(config(max_new_tokens=62), answers(*[long] * 4, *[short] * 96)) == []


def test_answers_of_other_rows_say_nothing_about_the_held_out_ones() -> None:
    assert found(config(held_out="surefit/function-calling-eval", max_new_tokens=1), answers("long answer " * 9)) == []
    assert found(config(max_new_tokens=1), []) == []
    assert found(config(max_new_tokens=1), answers(None, None)) == []


def test_a_held_out_file_among_the_training_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("all.jsonl", "later.jsonl"):
        (tmp_path / "data" / name).write_text(f'{{"prompt": "{name}", "completion": "x"}}\n' * 2, encoding="utf-8")
    assert {row["prompt"] for row in load_rows("data")} == {"all.jsonl", "later.jsonl"}  # the loader reads both
    (one,) = found(config("data", "data/later.jsonl"))
    assert (one.code, one.field) == ("EVL003", "data.eval")
    assert found(config("data/", str(tmp_path / "data" / "later.jsonl"))) != []
    assert found(config("data/all.jsonl", "data/later.jsonl")) == []
    monkeypatch.chdir(tmp_path / "data")
    assert found(config(".", "later.jsonl")) != []


@pytest.mark.parametrize(
    ("train", "held_out", "split", "same"),
    [
        ("org/set", "org/set", "train", True),
        ("org/set@train", "org/set", "train", True),
        ("org/set", "org/set@test", "train", False),
        ("org/set@test", "org/set", "train", False),
        ("org/set:a", "org/set:b", "train", False),
        ("org/set", "org/other", "train", False),
        ("missing", "missing", "train", False),
        ("surefit/function-calling-eval", "surefit/function-calling-eval", "train", False),
    ],
)
def test_the_same_hub_set(train: str, held_out: str, split: str, same: bool) -> None:
    assert bool(found(config(train, held_out, split))) is same


@pytest.mark.parametrize(("rows", "gate", "flagged"), [(9, True, True), (10, True, False), (5, False, False)])
def test_a_gate_on_a_handful(rows: int, gate: bool, flagged: bool) -> None:
    settings = config(max_examples=rows, **({"gate": {"min": 0.5}} if gate else {}))
    assert [finding.code for finding in found(settings)] == (["EVL004"] if flagged else [])
