"""GSM8K: the flags published with the model solutions of its paper, all of them, and the rows' own answers."""

import json
from pathlib import Path

import pytest

from surefit.core.errors import DataError
from surefit.metrics.exact_match import INVALID, final_answer, last_number, same_answer
from surefit.recipes.math_reasoning import RECIPE, without_annotations
from surefit.task import Prediction

DATA = Path(__file__).parents[2] / "../shared/data/math_code"
SYSTEMS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the shared benchmark data is not beside this checkout")


def _read(name):
    return [json.loads(line) for line in (DATA / "gsm8k" / name).read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def solutions():
    return _read("gsm8k_example_model_solutions.jsonl")


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_published_flag(solutions, system):
    differing = [
        row["question"]
        for row in solutions
        if same_answer(final_answer(row[system]["solution"], "A: "), final_answer(row["ground_truth"], "A: "))
        != row[system]["is_correct"]
    ]
    assert differing == []
    assert 0 < sum(row[system]["is_correct"] for row in solutions) < len(solutions)


@pytest.mark.parametrize("system", SYSTEMS)
def test_two_misses_are_not_a_hit(solutions, system):
    """The solutions write "A: 18" and not "#### 18": a grader that compares two misses scores 100 %."""
    for row in solutions:
        given, gold = final_answer(row[system]["solution"]), final_answer(row["ground_truth"])
        assert given == gold == INVALID
        assert not same_answer(given, gold)


@pytest.mark.parametrize("name", ["gsm8k_train.jsonl", "gsm8k_test.jsonl"])
def test_every_row_is_an_example_that_its_own_solution_answers(name):
    rows = _read(name)
    assert len(rows) > 800
    for row in rows:
        example = RECIPE.to_example(row)
        for text in (row["answer"], example.completion):
            scores = RECIPE.score(example, Prediction(text, parsed=RECIPE.parse(text)))
            assert set(scores.values()) == {1.0}, (row["question"], scores)
        assert "<<" not in example.completion


def _with_marker(solution):
    """The solution with its last "A: " as "#### ", and what comes after that."""
    before, found, after = solution.rpartition("A: ")
    return (f"{before}#### {after}" if found else after), after


def test_the_recipe_judges_the_published_solutions_as_their_paper_does(solutions):
    """Through the recipe, with their "A: " as "#### ": flags may differ only where that line is no plain number."""
    for system in SYSTEMS:
        for row in solutions:
            gold, (text, after) = _with_marker(row["ground_truth"])[0], _with_marker(row[system]["solution"])
            example = RECIPE.to_example({"question": row["question"], "answer": gold})
            scores = RECIPE.score(example, Prediction(text, parsed=RECIPE.parse(text)))
            if after.replace(",", "").replace(".", "").lstrip("-").isdigit():
                assert bool(scores["exact_match"]) == row[system]["is_correct"], (system, row["question"])


def test_odd_real_rows():
    for line in (DATA / "nasties.jsonl").read_text("utf-8").splitlines():
        nasty = json.loads(line)
        if not nasty["source"].startswith("gsm8k"):
            continue
        text = nasty["raw"]
        if "####" in text:
            assert final_answer(text) == format(last_number(text), "g").replace("1.08e+03", "1080")
        assert "<<" not in without_annotations(text)
    with pytest.raises(DataError, match="no final line"):
        RECIPE.to_example({"question": "How many?", "answer": "Four.\nA: 4"})
