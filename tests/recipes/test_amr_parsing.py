"""Golden rows of both recipes, refusals, the two denominators, grammars, ceilings and the sample sets."""

from __future__ import annotations

from time import process_time

import penman
import pytest

from surefit.core.errors import DataError
from surefit.data.read.load import load_rows
from surefit.metrics.penman_text import is_well_formed
from surefit.recipes.amr_parsing import RECIPE, TWO_TASK
from surefit.task import Prediction

ROW = {
    "sentence": "Cậu bé  không muốn\nđi Huế.",
    "graph": '(m / muốn :polarity -\n  :pivot(c / cậu_bé)\n  :theme (đ / đi :agent c :goal (t / thành_phố :wiki "Q1" '
    ':name (t2 / tên :op1 "Huế"))))',
}
LINE = (
    "(m / muốn :polarity - :pivot (c / cậu_bé) :theme (đ / đi :agent c :goal "
    '(t / thành_phố :wiki "Q1" :name (t2 / tên :op1 "Huế"))))'
)
ENGLISH = {"sentence": "The boy sleeps.", "graph": "(s / sleep-01 :ARG0 (b / boy))"}


def scored(recipe, row, text, truncated=False):
    return recipe.score(recipe.to_example(row), Prediction(text, truncated, None if truncated else recipe.parse(text)))


def test_a_vietnamese_row():
    example = RECIPE.to_example(ROW)
    assert [message["content"] for message in example.messages] == [
        "Viết nghĩa của câu dưới dạng đồ thị PENMAN.",
        "Cậu bé không muốn đi Huế.",
        LINE,
    ]
    assert example.completion == LINE


def test_the_language_is_that_of_the_row():
    english = RECIPE.to_example(ENGLISH).messages[0]["content"]
    assert english == "Write the meaning of the sentence as a PENMAN graph."
    assert RECIPE.to_example(ENGLISH | {"language": "vi"}).messages[0] == RECIPE.to_example(ROW).messages[0]


def test_a_two_task_row():
    example = TWO_TASK.to_example(ENGLISH)
    assert example.completion == "Skeleton: (sleep-01 :ARG0 (boy))\nGraph: (s / sleep-01 :ARG0 (b / boy))"
    assert TWO_TASK.parse(example.completion) == "(s / sleep-01 :ARG0 (b / boy))"
    assert TWO_TASK.to_example(ROW).completion.endswith("\nĐồ thị: " + LINE)
    assert TWO_TASK.parse(TWO_TASK.to_example(ROW).completion) == LINE
    assert TWO_TASK.parse("(s / sleep-01)") is None, "a graph that is not announced is not this format"


@pytest.mark.parametrize("recipe", [RECIPE, TWO_TASK])
def test_gold_scores_one(recipe):
    scores = scored(recipe, ROW, recipe.to_example(ROW).completion)
    corpus = recipe.aggregate([scores])
    assert {name: value for name, value in corpus.items() if value != 1} == {"repaired": 0}
    assert corpus.keys() >= {"smatch", "concepts", "named_entities", "wiki", "negation", "reentrancies", "roles"}
    assert "srl" not in corpus, "the gold graph has no :ARG roles"


def test_a_row_without_a_graph_can_only_be_predicted():
    example = RECIPE.to_example({"sentence": "The boy sleeps."})
    assert example.completion is None
    assert len(example.messages) == 2
    with pytest.raises(DataError, match="no graph"):
        RECIPE.score(example, Prediction("(a / b)", parsed="(a / b)"))


def test_gold_alone_for_scoring_other_peoples_answers():
    example = RECIPE.to_gold({"graph": ENGLISH["graph"]})
    assert RECIPE.score(example, Prediction("x", parsed=ENGLISH["graph"]))["smatch"] == 1
    unclosed = RECIPE.to_gold({"graph": ENGLISH["graph"][:-1]})
    assert unclosed.reference.graph == example.reference.graph, "smatch does not miss the last parenthesis"
    with pytest.raises(DataError, match="not PENMAN"):
        RECIPE.to_gold({"graph": "(a / b"})


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"sentence": " "}, "sentence", "sentence is ' '"),
        ({"sentence": None}, "sentence", "sentence is None"),
        ({"graph": None}, "graph", "graph is None"),
        ({"graph": "(a / b :x (a / c))"}, "graph", "not PENMAN"),
        ({"graph": "(s / sleep-01 :ARG0 (b / boy)"}, "graph", "not PENMAN"),
        ({"graph": "(a / b) (c / d)"}, "graph", "not PENMAN"),
        ({"graph": "no graph"}, "graph", "not PENMAN"),
        ({"language": "fr"}, "language", "'fr', not vi or en"),
    ],
)
def test_rows_that_are_refused(change, field, message):
    with pytest.raises(DataError, match=message) as caught:
        RECIPE.to_example(ENGLISH | change)
    assert caught.value.field == field
    assert caught.value.help


@pytest.mark.parametrize(
    "row", [{"sentence": "A.", "amr": "(a / b)"}, {"sentence": "A.", "grpah": "(a / b)"}, {"snt": "A."}]
)
def test_misspelt_columns(row):
    with pytest.raises(DataError, match="no column"):
        RECIPE.to_example(row)


def test_gold_with_spaces_in_concepts_is_kept_as_it_is():
    row = {"sentence": "Bi kịch.", "graph": "(b / bi kịch\n :domain(c / chó))"}
    example = RECIPE.to_example(row)
    assert example.completion == "(b / bi kịch :domain (c / chó))"
    assert scored(RECIPE, row, example.completion)["smatch"] == 1
    underscored = scored(RECIPE, row, "(b / bi_kịch :domain (c / chó))")
    assert underscored["smatch"] == 0.75
    assert underscored["smatch_normalised"] == 1


def test_strict_lenient_and_repaired():
    good = scored(RECIPE, ENGLISH, ENGLISH["graph"])
    lost = scored(RECIPE, ENGLISH, "I cannot say")
    twice = scored(RECIPE, ENGLISH, "(s / sleep-01 :ARG0 (s / boy))")
    cut = scored(RECIPE, ENGLISH, "(s / sleep-01 :ARG0 (b / boy", truncated=True)
    corpus = RECIPE.aggregate([good, lost, twice, cut])
    assert corpus["smatch"] == pytest.approx(2 * 4 / (4 + 16))
    assert corpus["smatch_recall"] == 0.25
    assert corpus["smatch_precision"] == 1
    assert corpus["smatch_lenient"] == 1, "the three that cannot be read are out of the denominator"
    assert corpus["smatch_repaired"] == pytest.approx(2 * 12 / (12 + 16))
    assert corpus["repaired"] == 0.5
    assert corpus["valid"] == 0.25
    assert corpus["exact_match"] == 0.25
    assert corpus["smatch_macro"] == 0.25


def test_the_corpus_score_is_micro_and_not_the_mean():
    short = scored(RECIPE, {"sentence": "Go!", "graph": "(g / go-02)"}, "(g / go-02)")
    long = scored(RECIPE, ENGLISH, "(x / x :ARG1 (b / y))")
    assert RECIPE.aggregate([short, long])["smatch"] == pytest.approx(2 * 3 / (6 + 6))


def test_a_thousand_resamples_take_seconds():
    rows = [scored(RECIPE, ROW, LINE), scored(RECIPE, ROW, "x")] * 100
    start = process_time()
    for _ in range(50):
        RECIPE.aggregate(rows)
    assert process_time() - start < 0.5


def test_ceilings():
    example = RECIPE.to_example(ROW)
    found = {name: RECIPE.score(example, answer(example))["smatch"] for name, answer in RECIPE.baselines.items()}
    assert found["gold-without-wiki"] == pytest.approx(26 / (13 + 14))
    assert found["gold-without-coreference"] == pytest.approx(26 / (15 + 14))
    assert found["gold-underscored"] == 1
    assert found["gold-glued"] == pytest.approx(24 / 28)


def test_grammars_take_every_sample_and_refuse_what_is_no_graph():
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string as accepts

    for recipe in (RECIPE, TWO_TASK):
        compiled = {}
        for number, row in enumerate([*load_rows("surefit/amr-train"), *load_rows("surefit/amr-eval")][::3]):
            example = recipe.to_example(row)
            source = recipe.grammar(example).source
            grammar = compiled.setdefault(source, xgrammar.Grammar.from_ebnf(source))
            assert accepts(grammar, example.completion), example.completion
            broken = (example.completion[:-1], example.completion + ")", example.completion.replace(" / ", " ", 1))
            assert not accepts(grammar, broken[number % 3])
        assert len(compiled) == (1 if recipe is RECIPE else 2)


def test_the_sample_set():
    train, held_out = list(load_rows("surefit/amr-train")), list(load_rows("surefit/amr-eval"))
    rows = train + held_out
    assert len(rows) >= 60
    for row in rows:
        variables = [variable for variable, _ in penman.parse(row["graph"]).nodes()]
        assert len(set(variables)) == len(variables), row["id"]
        assert is_well_formed(row["graph"]), row["id"]
        assert RECIPE.to_example(row).completion
    for column in ("id", "sentence", "graph"):
        assert len({row[column] for row in rows}) == len(rows), column
    vietnamese = [row for row in rows if RECIPE.to_example(row).messages[0]["content"].startswith("Viết")]
    assert len(vietnamese) >= 30
    assert all(row["id"].startswith("vi") == (row in vietnamese) for row in rows)


def test_the_generated_sets_share_no_graph():
    train, held_out = load_rows("surefit/amr-tiny-train"), load_rows("surefit/amr-tiny-eval")
    assert not {row["graph"] for row in train} & {row["graph"] for row in held_out}
    assert not {row["sentence"] for row in train} & {row["sentence"] for row in held_out}
    assert all(is_well_formed(row["graph"]) for row in [*train, *held_out])
