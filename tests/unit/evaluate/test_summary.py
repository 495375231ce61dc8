"""From scored rows to a verdict, without a model."""

from __future__ import annotations

import pytest

from surefit.config.schema import GateSection
from surefit.core.errors import ConfigError, DataError
from surefit.evaluate.estimates import compute_estimates
from surefit.evaluate.gate import evaluate_gate
from surefit.evaluate.paired import paired_comparisons
from surefit.evaluate.summary import summarize_evaluation
from surefit.task import TaskRecipe

RECIPE = TaskRecipe(
    name="toy", version=1, citation="this test", columns=(), to_example=None, parse=None, score=None,
    primary_metric="right",
)  # fmt: skip


def micro(rows):
    return {"right": sum(row["right"] for row in rows) / sum(row["size"] for row in rows)}


CORPUS = TaskRecipe(
    name="corpus", version=1, citation="this test", columns=(), to_example=None, parse=None, score=None,
    primary_metric="right", aggregate=micro,
)  # fmt: skip


def rows_of(*values):
    return [{"right": float(value)} for value in values]


def verdict(gate, base, tuned, **kwargs):
    variants = {"base": rows_of(*base), "merged": rows_of(*tuned)}
    return summarize_evaluation(RECIPE, GateSection(**gate), {"eval": variants}, [], **kwargs)["gate"]


def test_a_row_without_a_metric_does_not_enter_its_denominator():
    found = compute_estimates([{"right": 1.0, "rare": 0.0}, {"right": 0.0}, {"right": 0.0}], RECIPE)
    assert found["right"].mean == pytest.approx(1 / 3)
    assert (found["rare"].mean, found["rare"].n, found["right"].n) == (0.0, 1, 3)


def test_a_recipe_must_give_its_primary_metric():
    with pytest.raises(DataError, match="returned wrong, but not its primary right"):
        compute_estimates([{"wrong": 1.0}], RECIPE)


def test_wins_losses_ties_and_the_difference():
    rows = {"base": rows_of(0, 0, 1, 1, 0.5), "merged": rows_of(1, 1, 0, 1, 0.5)}
    (line,) = paired_comparisons("base", "merged", rows, RECIPE)
    assert (line["wins"], line["losses"], line["ties"]) == (2, 1, 2)
    assert line["difference"] == pytest.approx(0.2)
    assert line["ci95"][0] <= 0.2 <= line["ci95"][1]


def test_corpus_scores_use_the_recipes_aggregate_for_means_and_differences():
    base = [{"right": float(i % 3 == 0), "size": float(1 + i % 2)} for i in range(60)]
    tuned = [{"right": float(i % 3 != 1), "size": float(1 + i % 2)} for i in range(60)]
    found = compute_estimates(base, CORPUS)
    assert set(found) == {"right"}
    assert found["right"].mean == pytest.approx(20 / 90)
    assert found["right"].low < 20 / 90 < found["right"].high
    line = next(
        c
        for c in paired_comparisons("base", "merged", {"base": base, "merged": tuned}, CORPUS)
        if c["metric"] == "right"
    )
    assert line["difference"] == pytest.approx(20 / 90)
    assert 0 < line["ci95"][0] < 20 / 90 < line["ci95"][1]
    assert (line["wins"], line["losses"], line["ties"]) == (20, 0, 40)


@pytest.mark.parametrize(
    ("gate", "base", "tuned", "outcome", "reason"),
    [
        ({"min": 0.7}, [0] * 400, [1] * 300 + [0] * 100, "passed", "0.750; at least 0.7 is required"),
        ({"min": 0.7}, [0] * 4, [1, 1, 1, 0], "cannot tell", "right of merged is 0.750; at least 0.7 is required"),
        ({"min": 0.7, "margin": 0.5}, [0] * 4, [1, 1, 1, 0], "passed", "at least 0.7"),
        ({"min": 0.8}, [0] * 4, [1, 1, 1, 0], "cannot tell", "right of merged is 0.750; at least 0.8 is required"),
        ({"min": 0.8}, [0] * 40, [1] * 20 + [0] * 20, "failed", "right of merged is 0.500; at least 0.8 is required"),
        ({"not_worse_than": "base"}, [1] * 30 + [0] * 70, [1] * 28 + [0] * 72, "cannot tell", "-0.020 [-0.058"),
        ({"not_worse_than": "base"}, [1] * 90 + [0] * 210, [1] * 88 + [0] * 212, "passed", "-0.007 [-0.020, +0.006]"),
        (
            {"not_worse_than": "base", "margin": 0.01}, [1] * 90 + [0] * 210, [1] * 88 + [0] * 212, "cannot tell",
            "-0.007 [-0.020, +0.006]",
        ),
        ({"not_worse_than": "base"}, [1] * 60 + [0] * 40, [1] * 30 + [0] * 70, "failed", "-0.300 [-0.387, -0.202]"),
        ({"not_worse_than": "base", "min": 0.5}, [0] * 9 + [1], [1] * 8 + [0, 1], "passed", "against the base"),
        ({"not_worse_than": "base", "min": 0.9}, [0] * 9 + [1], [1] * 8 + [0, 1], "cannot tell", "at least 0.9"),
        ({"not_worse_than": "base", "min": 1}, [0] * 9 + [1], [1] * 8 + [0, 1], "failed", "at least 1 is required"),
        ({}, [1], [0], "passed", "right of merged is 0.000"),
    ],
)  # fmt: skip
def test_the_gate(gate, base, tuned, outcome, reason):
    found = verdict(gate, base, tuned)
    assert (found["outcome"], found["passed"]) == (outcome, outcome == "passed")
    assert reason in found["reason"]


def test_a_gate_that_cannot_be_judged_does_not_pass():
    gate = GateSection(min=0.5, not_worse_than="base")
    only_base = summarize_evaluation(RECIPE, gate, {"eval": {"base": rows_of(1)}}, [])
    assert only_base["gate"] == {
        "outcome": "cannot tell", "passed": False, "margin": 0.05, "reason": "the tuned model has not been scored",
    }  # fmt: skip
    only_tuned = summarize_evaluation(RECIPE, gate, {"eval": {"merged": rows_of(1)}}, [])
    assert only_tuned["gate"]["outcome"] == "cannot tell"
    assert "the base has not been scored" in only_tuned["gate"]["reason"]
    assert evaluate_gate(gate, RECIPE, {}, None)["outcome"] == "cannot tell"


def test_the_gate_looks_at_what_ships():
    variants = {"base": rows_of(*[0] * 40), "adapter": rows_of(*[1] * 40), "merged": rows_of(*[0] * 40)}
    assert not summarize_evaluation(RECIPE, GateSection(min=0.5), {"eval": variants}, [])["gate"]["passed"]
    del variants["merged"]
    assert summarize_evaluation(RECIPE, GateSection(min=0.5), {"eval": variants}, [])["gate"]["passed"]


def test_an_unknown_metric():
    with pytest.raises(ConfigError, match="did you mean 'right'"):
        verdict({"metric": "rihgt", "min": 0.5}, [0], [1])
