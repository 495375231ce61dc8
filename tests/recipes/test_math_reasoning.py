"""Word problems: rows, what counts as the answer, and rows that are refused."""

import re

import pytest

from surefit import recipes
from surefit.core.errors import DataError
from surefit.recipes.math_reasoning import ANNOTATED, BOXED, RECIPE, GoldAnswer
from surefit.task import Prediction

ROW = {"question": "Ann has 3 boxes of 4 figs. How many figs?", "answer": "3 * 4 = <<3*4=12>>12 figs\n#### 12"}
BOX = {"problem": "What is 1/4 + 1/4?", "solution": "They add up to $\\boxed{\\frac{1}{2}}$."}


def scores(recipe, row, text, truncated=False):
    return recipe.score(recipe.to_example(row), Prediction(text, truncated, None if truncated else recipe.parse(text)))


def test_a_row_becomes_three_turns_without_its_notes():
    example = RECIPE.to_example(ROW)
    assert [message["role"] for message in example.messages] == ["system", "user", "assistant"]
    assert example.messages[1]["content"] == ROW["question"]
    assert example.completion == "3 * 4 = 12 figs\n#### 12"
    assert example.reference == GoldAnswer("number", "12")


def test_keeping_the_notes_is_a_choice_by_name():
    assert ANNOTATED.to_example(ROW).completion == ROW["answer"]
    assert [recipes.get_recipe(name).name for name in ("math_reasoning", "math_reasoning_annotated", "math_boxed")]


@pytest.mark.parametrize(
    ("text", "exact", "last", "answered"),
    [
        ("3 * 4 = 12\n#### 12", 1, 1, 1),
        ("#### 1,2", 1, 0, 1),
        ("#### 12.0", 0, 1, 1),
        ("#### 13", 0, 0, 1),
        ("#### 12\n#### 13", 1, 0, 1),
        ("So it is 12.", 0, 1, 0),
        ("So it is twelve.", 0, 0, 0),
        ("####12", 0, 1, 0),
        ("", 0, 0, 0),
        ("[invalid]", 0, 0, 0),
    ],
)
def test_scores_of_a_number(text, exact, last, answered):
    assert scores(RECIPE, ROW, text) == {"exact_match": exact, "last_number": last, "answered": answered}


def test_an_answer_that_was_cut_off_is_no_answer():
    assert set(scores(RECIPE, ROW, "#### 12", truncated=True).values()) == {0.0}


@pytest.mark.parametrize(
    ("text", "exact", "same", "answered"),
    [
        ("\\boxed{\\frac{1}{2}}", 1, 1, 1),
        ("first \\boxed{3}, no: \\boxed{\\dfrac12}", 1, 1, 1),
        ("\\boxed{0.5}", 1, 1, 1),
        ("\\boxed{0.50}", 0, 1, 1),
        ("\\boxed{\\frac{2}{4}}", 0, 0, 1),
        ("\\boxed{\\frac{1}{2}", 0, 0, 0),
        ("1/2", 0, 0, 0),
    ],
)
def test_scores_of_a_box(text, exact, same, answered):
    assert scores(BOXED, BOX, text) == {"exact_match": exact, "same_value": same, "answered": answered}


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ({"answer": "steps\n#### 1,080"}, ("number", "1080")),
        ({"answer": "18"}, ("number", "18")),
        ({"answer": 18}, ("number", "18")),
        ({"answer": 2.5}, ("number", "2.5")),
        ({"answer": "\\boxed{x^2}"}, ("boxed", "x^2")),
        ({"answer": "x^2"}, ("boxed", "x^2")),
        ({"problem": "…", "answer": "18"}, ("boxed", "18")),
        ({"problem": "…", "solution": "so $\\boxed{18}$", "answer": "18"}, ("boxed", "18")),
    ],
)
def test_a_gold_answer_alone(row, gold):
    assert RECIPE.to_gold(row).reference == GoldAnswer(*gold)


def test_a_row_to_predict_has_no_answer():
    example = RECIPE.to_example({"question": ROW["question"]})
    assert (len(example.messages), example.completion, example.reference) == (2, None, None)
    with pytest.raises(DataError, match="no answer"):
        RECIPE.score(example, Prediction("#### 12"))


@pytest.mark.parametrize(
    ("recipe", "row", "field", "message"),
    [
        (RECIPE, {"answer": "#### 1"}, "question", "no column 'question'"),
        (RECIPE, ROW | {"question": " "}, "question", "is empty"),
        (RECIPE, ROW | {"answer": None}, "answer", "is null"),
        (RECIPE, ROW | {"answer": "It is 12.\nA: 12"}, "answer", "no final line .* 'A: 12'"),
        (RECIPE, {"question": "?", "answers": "#### 1"}, "answer", "did you mean 'answers'"),
        (BOXED, BOX | {"solution": "It is 1/2."}, "solution", "no closed"),
        (BOXED, BOX | {"solution": "\\boxed{1"}, "solution", "no closed"),
    ],
)
def test_rows_that_are_refused(recipe, row, field, message):
    with pytest.raises(DataError, match=message) as caught:
        recipe.to_example(row)
    assert caught.value.field == field
    assert caught.value.help


def test_the_grammar_ends_in_the_line_that_is_scored():
    pattern = re.compile(RECIPE.grammar(RECIPE.to_example(ROW)).source)
    assert pattern.fullmatch("3 * 4 = 12 figs\n#### 12")
    assert pattern.fullmatch("It costs\n#### -1.5")
    assert not pattern.fullmatch("3 * 4 = 12 figs")
    assert not pattern.fullmatch("#### 12 figs")
