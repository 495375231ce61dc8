"""The function-calling recipe: golden rows raw → messages → parse → score, and every row it must refuse."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefit.core.errors import DataError
from surefit.recipes.function_calling import RECIPE
from surefit.task import Prediction, mean_scores

DATA = Path(__file__).parents[2] / "../shared/data/function_calling"

INSTRUCTION = (
    'Answer with a JSON array of tool calls, each {"name": ..., "arguments": {...}}, or [] if no tool fits.\nTools: '
)
XLAM = {"name": "weather", "parameters": {"city": {"type": "str"}, "days": {"type": "int", "default": 1}}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OPENAI = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
ANSWER = {"name": "weather", "arguments": {"city": "Tromsø"}}
ROW = {"query": "Weather in Tromsø?", "tools": [XLAM], "answers": [ANSWER]}


def predicted(text):
    return Prediction(text, parsed=RECIPE.parse(text))


def test_golden_row_of_xlam():
    """A row as the data set has it (JSON inside strings), written out by hand."""
    example = RECIPE.to_example(
        {
            "id": 7,
            "query": "Giveaways for beta access and games?",
            "answers": '[{"name": "live", "arguments": {"type":"beta"}}, {"name":"live","arguments":{"type":"game"}}]',
            "tools": '[{"name":"live","description":"Gets é.","parameters":{"type":{"type":"str","default":"game"}}}]',
        }
    )
    assert example.messages == (
        {
            "role": "system",
            "content": INSTRUCTION + '[{"name": "live", "description": "Gets é.", '
            '"parameters": {"type": {"type": "str", "default": "game"}}}]',
        },
        {"role": "user", "content": "Giveaways for beta access and games?"},
        {
            "role": "assistant",
            "content": '[{"name": "live", "arguments": {"type": "beta"}}, '
            '{"name": "live", "arguments": {"type": "game"}}]',
        },
    )
    assert example.prompt == example.messages[:2]
    assert example.completion == example.messages[2]["content"]
    assert example.tools is None
    answer = '[{"name": "live", "arguments": {}}, {"name": "live", "arguments": {"type": "Beta"}}]'
    assert RECIPE.score(example, predicted(answer)) == {
        "json_valid": 1.0,
        "name_accuracy": 1.0,
        "argument_accuracy": 0.0,
        "exact_match": 0.0,
        "ast": 1.0,  # the default left out, the case ignored, the order free
    }
    assert RECIPE.score(example, predicted(example.completion))["exact_match"] == 1.0


def test_golden_row_where_no_tool_fits():
    example = RECIPE.to_example(ROW | {"answers": []})
    assert example.completion == "[]"
    prose, call = predicted("I cannot do that."), predicted(json.dumps([ANSWER]))
    assert RECIPE.score(example, prose) == {
        "json_valid": 0.0,
        "name_accuracy": 0.0,
        "exact_match": 0.0,
        "irrelevance": 1.0,
    }
    assert RECIPE.score(example, call)["irrelevance"] == 0.0
    assert set(RECIPE.score(example, predicted("[]")).values()) == {1.0}


@pytest.mark.parametrize("tool", [XLAM, OPENAI, {"name": "weather", "parameters": SCHEMA | {"type": "dict"}}])
@pytest.mark.parametrize("as_text", [False, True])
def test_every_shape_of_row_gives_the_same_scores(tool, as_text):
    row = ROW | {"tools": [tool]}
    if as_text:
        row |= {column: json.dumps(row[column]) for column in ("tools", "answers")}
    example = RECIPE.to_example(row)
    assert example.messages[0]["content"] == INSTRUCTION + json.dumps([tool], ensure_ascii=False)
    assert example.completion == '[{"name": "weather", "arguments": {"city": "Tromsø"}}]'
    assert set(RECIPE.score(example, predicted(example.completion)).values()) == {1.0}


def test_a_row_to_predict_has_no_answer_and_cannot_be_scored():
    example = RECIPE.to_example({"query": "q", "tools": "[]", "id": 3})
    assert [message["role"] for message in example.messages] == ["system", "user"]
    assert example.prompt == example.messages
    assert example.completion is None
    with pytest.raises(DataError, match="no answers to score"):
        RECIPE.score(example, predicted("[]"))


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"query": None}, "query", "query is null"),
        ({"query": "  "}, "query", "query is '  '"),
        ({"query": ["q"]}, "query", "query is"),
        ({"tools": None}, "tools", "tools is null"),
        ({"tools": '[{"name": "weather",}]'}, "tools", "not JSON: .*column"),
        ({"tools": ""}, "tools", "not JSON"),
        ({"tools": "{}"}, "tools", "not a list"),
        ({"tools": XLAM}, "tools", "not a list"),
        ({"tools": ["weather"]}, "tools[0]", "a tool is text, not an object"),
        ({"tools": [XLAM, {"name": "f", "parameters": {"x": None}}]}, "tools[1].parameters.x", "'x' is null"),
        ({"tools": [{"name": "weather", "parameters": {"city": {"default": float("nan")}}}]}, "tools", "NaN"),
        ({"tools": [{"name": "weather", "parameters": {"city": {"default": {1}}}}]}, "tools", "not JSON"),
        ({"answers": None}, "answers", "answers is null"),
        ({"answers": "null"}, "answers", "None, not a list|null, not a list"),
        ({"answers": ANSWER}, "answers", "not a list"),
        ({"answers": '[{"name": "weather", "arguments": {"city": NaN}}]'}, "answers", "NaN"),
        ({"answers": '[{"name": "weather", "arguments": {"city": 1, "city": 2}}]'}, "answers", "occurs twice"),
        ({"answers": [None]}, "answers[0]", "a call is null"),
        ({"answers": [ANSWER, {"arguments": {}}]}, "answers[1].name", "no name"),
        ({"answers": [{"name": "weather"}]}, "answers[0].arguments", "are null, not an object"),
        ({"answers": [{"name": "weather", "arguments": '{"city": 1}'}]}, "answers[0].arguments", "not an object"),
        ({"answers": [ANSWER | {"id": "call_0"}]}, "answers[0]", "'id' in addition to name and arguments"),
        ({"answers": [ANSWER | {"name": "wether"}]}, "answers[0].name", "'wether'.*did you mean 'weather'"),
        ({"answers": [ANSWER | {"arguments": {"minutes": None}}]}, "answers[0].arguments.minutes", "no such parameter"),
    ],
)
def test_refused_rows_name_the_field(change, field, message):
    with pytest.raises(DataError, match=message) as caught:
        RECIPE.to_example(ROW | change)
    assert caught.value.field == field
    assert caught.value.help


@pytest.mark.parametrize("wrong", ["answer", "Answers", "anwsers"])
def test_a_misspelt_answers_column_is_never_taken_for_a_row_without_answers(wrong):
    """The real system read a column that was not there, and trained on `null` in every row."""
    row = {wrong if column == "answers" else column: value for column, value in ROW.items()}
    with pytest.raises(DataError, match=f"a column '{wrong}' but no column 'answers'") as caught:
        RECIPE.to_example(row)
    assert caught.value.field == "answers"


def test_a_missing_column_shows_the_ones_there_are():
    with pytest.raises(DataError, match=r"no column 'query', only 'queries', 'tools'; did you mean 'queries'\?"):
        RECIPE.to_example({"queries": "q", "tools": []})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from("fg"), "parameters": st.dictionaries(st.sampled_from(["x", "type"]), JSON)}
    )
)
ANSWERS = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from("fg"), "arguments": st.dictionaries(st.sampled_from("xy"), JSON)})
)


@settings(max_examples=300, deadline=None)
@given(tools=JSON | TOOLS, answers=JSON | ANSWERS, text=st.text())
def test_any_row_is_refused_or_scored(tools, answers, text):
    try:
        example = RECIPE.to_example({"query": "q", "tools": tools, "answers": answers})
    except DataError:
        return
    assert RECIPE.score(example, predicted(example.completion))["exact_match"] == 1.0
    assert 0.0 <= RECIPE.score(example, predicted(text))[RECIPE.primary_metric] <= 1.0


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared benchmark data is not beside this checkout")
@pytest.mark.parametrize("name", ["xlam_60k_two_quoted_rows.jsonl", "xlam_shape_from_bfcl.jsonl"])
def test_real_rows_score_perfectly_against_themselves(name):
    rows = [json.loads(line) for line in (DATA / "xlam" / name).read_text("utf-8").splitlines()]
    scores = []
    for row in rows:
        example = RECIPE.to_example(row)
        assert json.loads(example.completion) == json.loads(row["answers"])
        scores.append(RECIPE.score(example, predicted(example.completion)))
    means = mean_scores(scores)
    assert all(value == 1.0 for metric, value in means.items() if metric != "ast")
    assert means["ast"] > 0.99, "two rows of the benchmark lack a parameter that their own schema requires"
