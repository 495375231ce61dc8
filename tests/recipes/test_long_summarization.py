"""Summaries: rows, scores by hand, baselines, and rows that are refused."""

import inspect
import re
from pathlib import Path

import pytest

from surefit import recipes
from surefit.core.errors import DataError
from surefit.data.rows.layouts import row_converter
from surefit.recipes.long_summarization import INSTRUCTION, LETTERS, RECIPE, GoldSummary
from surefit.task import Prediction

DOCUMENT = "The tax on figs is two percent. It ends in May. Dr. Roe signs the Act. The clerk keeps it."
ROW = {"document": DOCUMENT, "summary": "Taxes figs at two percent.\nEnds in May."}
VIETNAMESE = {"document": "Thuế đánh vào quả sung là hai phần trăm.", "summary": "Thuế quả sung hai phần trăm."}


def scores(text, row=ROW, recipe=RECIPE, truncated=False):
    return recipe.score(recipe.to_example(row), Prediction(text, truncated, None if truncated else recipe.parse(text)))


def test_a_row_becomes_three_turns():
    example = RECIPE.to_example(ROW)
    assert [(turn["role"], turn["content"]) for turn in example.messages] == [
        ("system", INSTRUCTION),
        ("user", DOCUMENT),
        ("assistant", ROW["summary"]),
    ]
    assert example.document == DOCUMENT
    assert example.reference == GoldSummary(ROW["summary"], DOCUMENT, letters=False)


def test_an_instruction_of_the_row_takes_the_place_of_the_usual_one():
    assert RECIPE.to_example(ROW | {"instruction": "In one line."}).messages[0]["content"] == "In one line."
    assert RECIPE.to_example(ROW | {"instruction": None}).messages[0]["content"] == INSTRUCTION
    asked = RECIPE.to_example({"origin_prompt": "Summarise this.\n\nA report.", "gold": ["Short."]})
    assert [turn["role"] for turn in asked.messages] == ["user", "assistant"]
    assert asked.completion == "Short."


@pytest.mark.parametrize(
    "columns",
    [("text", "summary"), ("original_text", "reference_summary"), ("judgement", "summary"), ("origin_prompt", "gold")],
)
def test_other_names_of_the_columns(columns):
    row = dict(zip(columns, (DOCUMENT, ROW["summary"]), strict=True)) | {"id": 1}
    example = row_converter(list(row), "rows.jsonl", RECIPE, "auto")(row)
    assert (example.document, example.completion) == (DOCUMENT, ROW["summary"])


def test_its_own_column_goes_before_other_names():
    assert RECIPE.to_example(ROW | {"text": "Another text."}).document == DOCUMENT


def test_the_reference_itself():
    found = scores(ROW["summary"])
    for name in ("rouge1", "rouge2", "rougeL", "rougeLsum", "rougeLsum_plain", "rouge1_precision", "length_ratio"):
        assert found[name] == 1.0
    assert "rougeLsum_letters" not in found


def test_scores_by_hand():
    """tax(es) fig(s) two percent: 4 of 8 answer words, 4 of 8 reference words; "two percent" of 7 bigrams each."""
    found = scores("The tax on figs is two percent.")
    assert found["rouge1_precision"] == pytest.approx(4 / 7)
    assert found["rouge1_recall"] == pytest.approx(4 / 8)
    assert found["rouge1"] == pytest.approx(8 / 15)
    assert found["rouge1_plain"] == pytest.approx(6 / 15)  # "tax" and "taxes" differ
    assert found["rouge2"] == pytest.approx(2 * 1 / 13)
    assert found["length_ratio"] == pytest.approx(7 / 8)
    assert found["novel_bigrams"] == 0.0
    assert found["coverage"] == 1.0
    assert found["density"] == 7.0


def test_lines_in_another_order_cost_rouge_l_but_not_rouge_lsum():
    found = scores("Ends in May.\nTaxes figs at two percent.")
    assert found["rougeLsum"] == 1.0
    assert found["rougeL"] < 0.7


def test_an_empty_answer_has_its_zeros():
    assert RECIPE.parse(" \n") is None
    assert set(scores("").values()) == {0.0}


def test_a_cut_summary_is_scored_as_it_stands():
    assert scores("Taxes figs at two", truncated=True) == scores("Taxes figs at two")


def test_letters_outside_a_to_z():
    """The package takes "thuế" for "thu": sharing the pieces of words counts, which letters as letters do not."""
    answer = "Thuê quà sưng hài phân trâm."
    assert scores(answer, VIETNAMESE)["rouge1"] > 0.5
    assert scores(answer, VIETNAMESE)["rouge1_letters"] == 0.0
    assert scores(VIETNAMESE["summary"], VIETNAMESE)["rougeLsum_letters"] == 1.0
    japanese = {"document": "東京は大きい。", "summary": "東京は大きい"}
    assert scores(japanese["summary"], japanese)["rougeLsum"] == 0.0
    assert scores(japanese["summary"], japanese)["rougeLsum_letters"] == 1.0


def test_a_language_says_whether_letters_matter():
    assert "rouge1_letters" in scores("x", ROW | {"language": "vi"})
    assert "rouge1_letters" not in scores("x", VIETNAMESE | {"language": "en-GB"})
    assert LETTERS.primary_metric in scores("x", ROW, LETTERS)
    assert inspect.unwrap(recipes.get_recipe("long_summarization_letters").score) is LETTERS.score


def test_many_rows_score_as_one_by_one():
    pairs = [(RECIPE.to_example(row), Prediction(text)) for row in (ROW, VIETNAMESE) for text in ("Figs.", "", "quả")]
    assert list(RECIPE.score_many(pairs)) == [RECIPE.score(*pair) for pair in pairs]
    assert list(LETTERS.score_many(pairs)) == [LETTERS.score(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lead-1", "The tax on figs is two percent."),
        ("lead-3", "The tax on figs is two percent.\nIt ends in May.\nDr. Roe signs the Act."),
        ("lead-100-words", DOCUMENT),
        ("oracle-lead", "The tax on figs is two percent. It"),
    ],
)
def test_baselines(name, text):
    assert RECIPE.baselines[name](RECIPE.to_example(ROW)).text == text


def test_leading_words_keep_the_documents_lines():
    example = RECIPE.to_example({"document": "One two\nthree  four\nfive", "summary": "a b c"})
    assert RECIPE.baselines["oracle-lead"](example).text == "One two\nthree"


def test_a_gold_row_without_a_document_has_no_scores_that_need_one():
    example = RECIPE.to_gold({"summary": "Ends in May."})
    found = RECIPE.score(example, Prediction("Ends."))
    assert "coverage" not in found
    assert found["length_ratio"] == pytest.approx(1 / 3)


def test_a_row_to_predict_has_no_answer():
    example = RECIPE.to_example({"text": DOCUMENT, "text_length": 9})
    assert (len(example.messages), example.completion, example.reference) == (2, None, None)
    with pytest.raises(DataError, match="no summary"):
        RECIPE.score(example, Prediction("x"))


@pytest.mark.parametrize(
    ("row", "field", "message"),
    [
        ({"summary": "x"}, "document", "no column 'document'"),
        (ROW | {"document": None}, "document", "is null"),
        (ROW | {"document": "  "}, "document", "is empty"),
        (ROW | {"document": 5}, "document", "is 5, not a string"),
        (ROW | {"summary": None}, "summary", "is null"),
        (ROW | {"summary": ""}, "summary", "is empty"),
        (ROW | {"summary": ["one", "two"]}, "summary", "not a string"),
        (ROW | {"instruction": ""}, "instruction", "is empty"),
        ({"document": "x", "sumary": "y"}, "summary", "column 'sumary'"),
    ],
)
def test_rows_that_are_refused(row, field, message):
    with pytest.raises(DataError, match=message) as found:
        RECIPE.to_example(row)
    assert found.value.field == field
    assert found.value.help


def test_the_worked_examples_of_the_page_hold():
    page = (Path(__file__).parents[2] / "docs/recipes/long-summarization.md").read_text("utf-8")
    namespace: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "long-summarization.md", "exec"), namespace)
