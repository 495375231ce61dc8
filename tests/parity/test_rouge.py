"""ROUGE: every recorded value of rouge-score 0.1.2 and of ROUGE-1.5.5, and real rows through the recipe."""

import json
from pathlib import Path

import pytest

from surefit.core.errors import DataError
from surefit.metrics.rouge import KINDS, rouge
from surefit.recipes.long_summarization import RECIPE
from surefit.task import Prediction

DATA = Path(__file__).parents[2] / "../shared/data/legal_summarization"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the shared benchmark data is not beside this checkout")
WAYS = {"stem": "stemmed", "nostem": "plain"}


def read(name):
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def cases():
    return read("scorer/rouge_cases.jsonl")


@pytest.mark.parametrize("recorded", WAYS)
def test_every_recorded_value(cases, recorded):
    assert len(cases) >= 80
    for case in cases:
        found = rouge(case["target"], case["prediction"], WAYS[recorded])
        for kind, values in case["rouge_score_0_1_2"][recorded].items():
            assert found[kind] == pytest.approx(values, abs=1e-6), (case["source"], case["target"][:60], kind)


def test_every_published_value(cases):
    """Of the Perl script, rounded to five digits."""
    published = [case for case in cases if "published" in case]
    assert published
    for case in published:
        for recorded, kinds in case["published"].items():
            found = rouge(case["target"], case["prediction"], WAYS[recorded])
            for kind, values in kinds.items():
                assert found[kind] == pytest.approx(values, abs=1.1e-5), (case["target"][:60], kind)


def test_the_recipe_reports_these_values(cases):
    for case in cases:
        if not case["target"].strip():
            continue
        example = RECIPE.to_gold({"summary": case["target"]})
        scores = RECIPE.score(example, Prediction(case["prediction"]))
        for kind in KINDS:
            precision, recall, f = case["rouge_score_0_1_2"]["stem"][kind]
            assert scores[kind] == pytest.approx(f, abs=1e-6)
            assert scores[f"{kind}_precision"] == pytest.approx(precision, abs=1e-6)
            assert scores[f"{kind}_recall"] == pytest.approx(recall, abs=1e-6)
            assert scores[f"{kind}_plain"] == pytest.approx(case["rouge_score_0_1_2"]["nostem"][kind][2], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "gold"),
    [
        ("manor_plain_english_contracts_all_v1.jsonl", True),
        ("billml_bill_summary_us_10.jsonl", True),
        ("billml_bill_text_us_10.jsonl", False),
        ("govreport_minilongbench_12.jsonl", True),
    ],
)
def test_every_shared_row_is_an_example(name, gold):
    for row in read(name):
        example = RECIPE.to_example(row)
        assert (example.completion is not None) == gold
        assert example.document
        assert example.messages[-1]["role"] == ("assistant" if gold else "user")


def test_odd_real_rows():
    raw = {row["source"]: row["raw"] for row in read("nasties.jsonl")}
    row = json.loads(raw["BillML bill_summary row"])
    assert RECIPE.to_example(row).completion.startswith("(This measure has not been amended")
    for row in json.loads(raw["Manor legalsum"]):  # summaries that are longer than their texts
        example = RECIPE.to_example(row)
        scores = RECIPE.score(example, Prediction(example.completion))
        assert scores["rougeLsum"] == scores["length_ratio"] == 1.0


def test_a_list_of_references_is_refused():
    row = read("govreport_minilongbench_12.jsonl")[0]
    assert isinstance(row["gold"], list)
    with pytest.raises(DataError, match="not a string"):
        RECIPE.to_example(row | {"gold": row["gold"] * 2})
