"""The completion format and the metrics of one row."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefit.metrics.tool_calls import GoldCalls, parse_calls, same_calls, score_calls
from surefit.metrics.tool_schema import function_document

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**200), 10**200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from("fgh"), "arguments": st.dictionaries(st.sampled_from("xyz"), JSON, max_size=3)}
    ),
    max_size=4,
)
FUNCTIONS = [
    function_document(
        {"name": "f", "parameters": {"x": {"type": "int"}, "y": {"type": "List[Dict]", "default": "[]"}}}
    ),
    function_document({"name": "g", "parameters": {"x": {"type": "Dict"}, "z": {"type": "str, optional"}}}),
    function_document({"name": "h", "parameters": {"y": {"type": "Tuple[float]"}, "z": {"type": "Any"}}}),
]


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


@settings(max_examples=300, deadline=None)
@given(CALLS, st.booleans())
def test_calls_come_back_from_json(calls, ascii_only):
    assert parse_calls(json.dumps(calls, ensure_ascii=ascii_only)) == calls


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        '{"name": "f", "arguments": {}}',
        '[{"name": "f"}]',
        '[{"name": "f", "parameters": {}}]',
        '[{"name": "f", "arguments": {}, "id": 1}]',
        '[{"name": "f", "arguments": "{}"}]',
        '[{"name": "f", "arguments": null}]',
        '[{"name": 1, "arguments": {}}]',
        '[[{"name": "f", "arguments": {}}]]',
        "[null]",
        "null",
        '```json\n[{"name": "f", "arguments": {}}]\n```',
        'Sure: [{"name": "f", "arguments": {}}]',
        '[{"name": "f", "arguments": {}}] Done.',
        "[f(x=1)]",
        '[{"name": "f", "arguments": {"x": NaN}}]',
        '[{"name": "f", "arguments": {"x": 1, "x": 2}}]',
        '[{"name": "f", "arguments": {"x": 1' + "0" * 5000 + "}}]",
        '[{"name": "f", "arguments": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}}]",
    ],
    ids=lambda text: text[:40],
)
def test_nothing_but_an_array_of_calls_parses(text):
    assert parse_calls(text) is None


@pytest.mark.parametrize(("text", "calls"), [("[]", []), (' [{"arguments": {}, "name": "f"}]\n', [call("f")])])
def test_what_parses(text, calls):
    assert parse_calls(text) == calls


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ([call("f", x=1), call("g")], [call("g"), call("f", x=1)], True),
        ([call("f"), call("f")], [call("f")], False),
        ([call("f", x=1)], [call("f", x=1.0)], True),
        ([call("f", x=1)], [call("f", x=True)], False),
        ([call("f", x=[0])], [call("f", x=[False])], False),
        ([call("f", x={"a": 1, "b": 2})], [call("f", x={"b": 2, "a": 1})], True),
        ([call("f", x=[1, 2])], [call("f", x=[2, 1])], False),
        ([call("f", x="a")], [call("f", x="A")], False),
        ([call("f", x=None)], [call("f")], False),
        ([call("f", x=[])], [call("f", x={})], False),
        ([], [], True),
    ],
)
def test_same_calls(left, right, same):
    assert same_calls(left, right) is same
    assert same_calls(right, left) is same


def test_scores_by_hand():
    gold = GoldCalls([call("f", x=1), call("g", x={"a": 1}, z="Oslo")], FUNCTIONS)
    answer = [call("g", x={"a": 1}, z="oslo"), call("f", x=2), call("f", x=1)]
    assert score_calls(gold, answer) == {
        "json_valid": 1.0,
        "name_accuracy": 2 / 3,
        "exact_match": 0.0,
        "argument_accuracy": 2 / 4,  # x of g and x of f, of the four that were given
        "ast": 0.0,
    }
    assert score_calls(gold, answer[:1] + answer[2:])["ast"] == 1.0, "the checker does not look at case"
    assert set(score_calls(gold, None).values()) == {0.0}


def test_arguments_are_paired_so_that_most_agree():
    gold = GoldCalls([call("f", x=1, y=2), call("f", x=1, y=9)], FUNCTIONS)
    answer = [call("f", x=1, y=9), call("f", x=1, y=5)]
    assert score_calls(gold, answer)["argument_accuracy"] == 3 / 4


def test_values_of_two_calls_do_not_mix():
    gold = GoldCalls([call("f", x=1, y=2), call("f", x=3, y=4)], FUNCTIONS)
    assert score_calls(gold, [call("f", x=1, y=4), call("f", x=3, y=2)])["argument_accuracy"] == 0.5


@pytest.mark.parametrize(
    ("answer", "irrelevance", "exact"),
    [([], 1.0, 1.0), ([call("f", x=1)], 0.0, 0.0), (None, 1.0, 0.0)],
)
def test_irrelevance(answer, irrelevance, exact):
    scores = score_calls(GoldCalls([], FUNCTIONS), answer)
    assert (scores["irrelevance"], scores["exact_match"]) == (irrelevance, exact)
    assert scores.keys() == {"json_valid", "name_accuracy", "exact_match", "irrelevance"}


@pytest.mark.parametrize(
    ("arguments", "right"),
    [({"x": 1}, 1.0), ({"x": 1, "y": []}, 1.0), ({"x": 1, "y": [{}]}, 0.0), ({"x": 1.0}, 0.0), ({"x": 1, "q": 1}, 0.0)],
)
def test_ast_lets_a_default_be_given_or_left_out(arguments, right):
    assert score_calls(GoldCalls([call("f", x=1)], FUNCTIONS), [call("f", **arguments)])["ast"] == right


def test_of_two_tools_with_one_name_the_first_counts():
    twice = [function_document({"name": "f", "parameters": {"x": {"type": kind}}}) for kind in ("int, optional", "int")]
    gold = GoldCalls([call("f")], twice)
    assert score_calls(gold, [call("f")])["ast"] == 1.0


@settings(max_examples=300, deadline=None)
@given(CALLS, st.none() | CALLS)
def test_scores_are_shares_and_which_there_are_depends_on_gold_alone(gold_calls, answer):
    gold = GoldCalls(gold_calls, FUNCTIONS)
    scores = score_calls(gold, answer)
    assert all(0.0 <= value <= 1.0 for value in scores.values())
    assert scores.keys() == score_calls(gold, gold_calls).keys()


@settings(max_examples=300, deadline=None)
@given(CALLS.flatmap(lambda calls: st.tuples(st.just(calls), st.permutations(calls))))
def test_gold_in_any_order_is_exactly_right(calls_and_order):
    calls, order = calls_and_order
    scores = score_calls(GoldCalls(calls, FUNCTIONS), order)
    assert all(scores[name] == 1.0 for name in scores if name != "ast")


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_parses_or_is_none(text):
    assert parse_calls(text) is None or isinstance(parse_calls(text), list)
