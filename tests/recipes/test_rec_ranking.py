"""The ranking recipe: golden rows raw → messages → choices → score, who stays in the mean, and every row it refuses."""

import json
import math

import pytest

from surefit.core.errors import DataError
from surefit.recipes.rec_ranking import RECIPE
from surefit.task import Prediction, mean_scores

ROW = {
    "user": "7",
    "history": ["Alien (1979)", "Heat (1995)"],
    "candidates": ["Solaris", "Casino", "Up"],
    "answer": "B",
}
OUTSIDE = {**ROW, "answer": "", "rank": 40}


def scored(row, text="", parsed=None):
    example = RECIPE.to_example(row)
    return RECIPE.score(example, Prediction(text, parsed=RECIPE.parse(text) if parsed is None else parsed))


def test_a_row_becomes_llamarecs_prompt_and_a_letter():
    example = RECIPE.to_example(ROW)
    assert example.messages == (
        {
            "role": "user",
            "content": "Given user history in chronological order, recommend an item from the candidate pool with its "
            "index letter.\n\nUser history: (1) Alien (1979) \n (2) Heat (1995); \n "
            "Candidate pool: (A) Solaris \n (B) Casino \n (C) Up",
        },
        {"role": "assistant", "content": "B"},
    )
    assert example.completion == "B"
    assert RECIPE.choices(example) == ("A", "B", "C")


def test_the_letters_probabilities_are_the_order():
    found = scored(ROW, parsed={"C": -0.1, "B": -2.0, "A": -5.0})
    assert found["recall@1"] == 0.0
    assert found["recall@5"] == 1.0
    assert found["mrr@5"] == 0.5
    assert found["ndcg@10"] == found["valid/ndcg@10"] == 1 / math.log2(3)
    assert scored(ROW, parsed={"C": -1.0, "B": -1.0, "A": -1.0})["mrr@5"] == 0.5, "ties go by the retriever's order"
    order = scored(ROW, "B > A > C")
    assert order == scored(ROW, "B")
    assert order["recall@1"] == 1.0


def test_an_answer_that_is_none_keeps_its_zeros():
    for text in ("", "Casino", "A", "b", "B B", "Z"):
        assert set(scored(ROW, text).values()) == {0.0}, text


def test_users_whom_no_ranker_can_help_stay_in_the_mean():
    example = RECIPE.to_example(OUTSIDE)
    assert example.completion is None
    assert example.prompt == example.messages
    assert RECIPE.choices(example) == ("A",)
    outside = scored(OUTSIDE, "A")
    assert set(outside.values()) == {0.0}
    assert not [name for name in outside if name.startswith("valid/")]
    means = mean_scores([scored(ROW, "B"), outside])
    assert (means["ndcg@10"], means["valid/ndcg@10"]) == (0.5, 1.0)
    near = scored({**OUTSIDE, "rank": 4}, "A")
    assert (near["recall@5"], near["mrr@5"]) == (1.0, 0.25), "of three candidates: the retriever's own fourth place"


def test_the_retriever_is_the_baseline():
    for answer, rank in (("A", 1), ("B", 2), ("C", 3)):
        example = RECIPE.to_example({**ROW, "answer": answer})
        assert RECIPE.score(example, RECIPE.baselines["retriever"](example))["mrr@5"] == 1 / rank
    example = RECIPE.to_example(OUTSIDE)
    assert RECIPE.score(example, RECIPE.baselines["retriever"](example)) == scored(OUTSIDE)


def test_a_row_to_predict_has_choices_and_no_score():
    example = RECIPE.to_example({name: value for name, value in ROW.items() if name != "answer"})
    assert example.completion is None
    assert RECIPE.choices(example) == ("A", "B", "C")
    with pytest.raises(DataError, match="no answer to score against"):
        RECIPE.score(example, Prediction("A", parsed={"A": 0.0}))


def test_gold_alone_can_be_scored():
    example = RECIPE.to_gold({"answer": "T"})
    assert RECIPE.score(example, Prediction("T", parsed=RECIPE.parse("T")))["recall@1"] == 1.0
    with pytest.raises(DataError, match="not a letter from A to C"):
        RECIPE.to_gold({"answer": "T", "candidates": ["a", "b", "c"]})
    with pytest.raises(DataError, match="1 candidate;"):
        RECIPE.to_gold({"answer": "A", "candidates": ["a"]})


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"history": None}, "history", "history is null"),
        ({"history": []}, "history", "not a list of titles"),
        ({"history": "Alien"}, "history", "not a list of titles"),
        ({"history": ["Alien", " "]}, "history\\[1\\]", "a title is ' '"),
        ({"candidates": ["a"]}, "candidates", "1 candidate;"),
        ({"candidates": ["a"] * 27}, "candidates", "27 candidates"),
        ({"candidates": ["a", 3]}, "candidates\\[1\\]", "a title is 3"),
        ({"answer": None}, "answer", "answer is null"),
        ({"answer": "D"}, "answer", "answer is 'D', not a letter from A to C"),
        ({"answer": "b"}, "answer", "not a letter"),
        ({"answer": "AB"}, "answer", "not a letter"),
        ({"answer": ""}, "rank", "rank is null or missing"),
        ({"answer": "", "rank": 3}, "rank", "rank is 3"),
        ({"answer": "", "rank": True}, "rank", "rank is True"),
    ],
)
def test_what_is_refused(change, field, message):
    with pytest.raises(DataError, match=message) as caught:
        RECIPE.to_example({**ROW, **change})
    assert caught.value.field == field.replace("\\", "")
    assert caught.value.help


def test_a_missing_column_names_the_near_miss():
    row = {"histroy": ["a"], "candidates": ["a", "b"], "answer": "A"}
    with pytest.raises(DataError, match="did you mean 'histroy'"):
        RECIPE.to_example(row)


def test_the_shipped_sample_has_all_kinds_of_rows():
    from surefit import samples

    rows = [json.loads(line) for line in samples.find_sample("surefit/rec-tiny-eval").read_text().splitlines()]
    examples = [RECIPE.to_example(row) for row in rows]
    inside = sum(example.completion is not None for example in examples)
    assert 0.3 < inside / len(examples) < 0.7
