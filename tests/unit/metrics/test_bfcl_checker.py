"""The checker's rules one at a time, the ones we judge wrong (docs/recipes/function-calling.md) included."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefit.metrics.bfcl_checker import check_calls


def function(kind, items=None, required=("x",)):
    schema = {"type": kind} | ({"items": {"type": items}} if items else {})
    parameters = {"properties": {"x": schema, "y": {"type": "integer"}}, "required": list(required)}
    return {"name": "f", "parameters": parameters}


def verdict(kind, value, acceptable, items=None):
    call = {"name": "f", "arguments": {"x": value}}
    return check_calls([function(kind, items)], [call], [{"f": {"x": acceptable}}], "simple_python")


@pytest.mark.parametrize(
    ("kind", "items", "value", "acceptable", "expected"),
    [
        ("integer", None, 5, [5], None),
        ("integer", None, 6, [5], "value_error:others"),
        ("integer", None, 5.0, [5], "type_error:simple"),
        ("integer", None, True, [1], "type_error:simple"),
        ("float", None, 5, [5.0], None),
        ("float", None, 10**400, [5.0], "type_error:simple"),
        ("boolean", None, "true", [True], "type_error:simple"),
        ("string", None, "new york", ["New York"], None),
        ("string", None, "it's", ['it"s'], None),
        ("string", None, "York", ["New York"], "value_error:string"),
        ("any", None, 3, [3], None),
        ("array", "integer", [1, 2], [[1, 2]], None),
        ("array", "integer", [2, 1], [[1, 2]], "value_error:list/tuple"),
        ("array", "float", [1, 2], [[1.0, 2.0]], "type_error:nested"),
        ("array", "string", ["A b"], [["ab"]], None),
        ("array", "string", [], ["", ["a"]], None),
        ("array", "integer", (1, 2), [[1, 2]], "type_error:simple"),
        ("tuple", "integer", (1, 2), [[1, 2]], None),
        ("array", "integer", [1], [], "type_error:simple"),
        ("dict", None, {"k": "V"}, [{"k": ["v"]}], None),
        ("dict", None, {"k": "w"}, [{"k": ["v"]}], "value_error:dict_value"),
        ("dict", None, {"k": "v", "z": 1}, [{"k": ["v"]}], "value_error:dict_key"),
        ("dict", None, {}, [{"k": ["v"]}], "value_error:dict_key"),
        ("dict", None, {"k": "w"}, [{"k": ["v"], "z": [1]}], "value_error:dict_key"),
        ("dict", None, {}, [{"k": ["v", ""]}], None),
        ("dict", None, {}, [""], "dict_checker:unclear"),
        ("dict", None, {"k": 1}, [{"k": [1]}, None], None),
        ("array", "dict", [{"k": 1}], [[{"k": [1]}]], None),
        ("array", "dict", [{"k": 1}, {"k": 1}], [[{"k": [1]}]], "value_error:list_dict_count"),
        ("array", "dict", [{"k": 2}], [[{"k": [1]}]], "value_error:dict_value"),
        ("array", "dict", [1], ["", [{"k": [1]}]], "value_error:dict_key"),
        ("array", "dict", [], [None], "value_error:others"),
    ],
)
def test_one_argument(kind, items, value, acceptable, expected):
    assert verdict(kind, value, acceptable, items) == expected


@pytest.mark.parametrize(
    ("kind", "items", "value", "acceptable", "why"),
    [
        ("string", None, "15", ["1.5"], "punctuation is deleted, so 1.5 is 15"),
        ("string", None, "5", ["-5"], "and so is a minus sign"),
        ("string", None, " . ", ["a", ""], "a string that may be left out may also be given as nothing"),
        ("integer", None, "n", ["n"], "a value of the first answer's type is taken for a variable's name"),
        ("array", "integer", ["a"], ["", ["a"]], "items are not checked where the list may be left out"),
        ("array", "string", ["a", "b"], [["x"], "ab"], "a string among the lists is a list of characters"),
        ("dict", None, {"k": True}, [{"k": [1]}], "inside a dict True is 1"),
    ],
)
def test_accepted_though_arguably_wrong(kind, items, value, acceptable, why):
    assert verdict(kind, value, acceptable, items) is None, why


CALL = {"name": "f", "arguments": {"x": 1}}
ANSWER = {"f": {"x": [1]}}


@pytest.mark.parametrize(
    ("arguments", "answer", "expected"),
    [
        ({"x": 1}, {"f": {"x": [1], "y": [2, ""]}}, None),
        ({"x": 1}, {"f": {"x": [1], "y": [2]}}, "simple_function_checker:missing_optional"),
        ({"y": 1}, {"f": {"x": [1], "y": [1]}}, "simple_function_checker:missing_required"),
        ({"x": 1, "z": 1}, {"f": {"x": [1], "z": [1]}}, "simple_function_checker:unexpected_param"),
        ({"x": 1, "y": 1}, {"f": {"x": [1]}}, "simple_function_checker:unexpected_param"),
    ],
)
def test_which_parameters(arguments, answer, expected):
    assert check_calls([function("integer")], [{"name": "f", "arguments": arguments}], [answer], "simple") == expected


@pytest.mark.parametrize("category", ["simple_python", "multiple", "live_parallel_multiple"])
def test_the_number_of_calls_must_be_right(category):
    for calls in ([], [CALL, CALL]):
        error = check_calls([function("integer")], calls, [ANSWER], category)
        assert error is not None
        assert error.endswith(":wrong_count")


def test_names_match_to_the_letter():
    call = {"name": "F", "arguments": {"x": 1}}
    assert check_calls([function("integer")], [call], [ANSWER], "simple") == "simple_function_checker:wrong_func_name"


def test_simple_looks_at_the_first_function_and_multiple_at_the_named_one():
    other = {"name": "g", "parameters": {"properties": {}, "required": []}}
    functions = [other, function("integer")]
    assert check_calls(functions, [CALL], [ANSWER], "simple") == "simple_function_checker:wrong_func_name"
    assert check_calls(functions, [CALL], [ANSWER], "multiple") is None


def test_parallel_takes_calls_in_any_order_and_never_gives_one_back():
    answers = [{"f": {"x": [1, 2]}}, {"f": {"x": [1]}}]
    one, two = CALL, {"name": "f", "arguments": {"x": 2}}
    assert check_calls([function("integer")], [two, one], answers, "parallel") is None
    stuck = "parallel_function_checker_no_order:cannot_find_match"
    assert check_calls([function("integer")], [one, two], answers, "parallel") == stuck, "though a matching exists"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)
KINDS = st.sampled_from(["string", "integer", "float", "boolean", "array", "tuple", "dict", "any"])


@pytest.mark.parametrize("answer", [{"": None}, {}])
def test_a_reference_with_values_that_are_no_lists_accepts_nothing(answer):
    assert verdict("dict", answer, [{"": None}]) in ("value_error:dict_key", "value_error:dict_value")
    assert verdict("array", [answer], [[{"": None}]], "dict") is not None


@settings(max_examples=300, deadline=None)
@given(kind=KINDS, items=st.none() | KINDS, value=JSON, gold=JSON)
def test_never_raises_whatever_the_argument(kind, items, value, gold):
    option = {key: [inner] for key, inner in gold.items()} if isinstance(gold, dict) else gold
    assert isinstance(verdict(kind, value, [option, ""], items), (str, type(None)))


@settings(max_examples=200, deadline=None)
@given(value=st.integers() | st.text(min_size=1) | st.booleans(), wrong=st.integers() | st.text(min_size=1))
def test_the_only_acceptable_value_passes_and_another_type_does_not(value, wrong):
    kind = {int: "integer", str: "string", bool: "boolean"}[type(value)]
    assert verdict(kind, value, [value]) is None
    if type(wrong) is not type(value):
        assert verdict(kind, wrong, [value]) == "type_error:simple"
