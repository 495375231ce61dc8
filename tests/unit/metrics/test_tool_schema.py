"""Three ways of writing a tool, one document; and which answers are acceptable for it."""

import pytest

from surefit.core.errors import DataError
from surefit.metrics.tool_schema import acceptable_answer, function_document

XLAM = {
    "name": "f",
    "description": "…",
    "parameters": {
        "city": {"type": "str", "description": "…"},
        "days": {"type": "int, optional", "default": "10"},
        "tags": {"type": "List[str], optional"},
        "type": {"type": "str", "default": "game"},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "default": 10},
        "tags": {"type": "array", "items": {"type": "string"}},
        "type": {"type": ["string", "null"], "default": "game"},
    },
    "required": ["city"],
}
DOCUMENT = {
    "name": "f",
    "parameters": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "default": 10},
            "tags": {"type": "array", "items": {"type": "string"}},
            "type": {"type": "string", "default": "game"},
        },
        "required": ["city"],
    },
}


@pytest.mark.parametrize(
    "tool",
    [
        XLAM,
        {"name": "f", "parameters": SCHEMA},
        {"name": "f", "parameters": SCHEMA | {"type": "dict"}},
        {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    ],
    ids=["xlam", "json schema", "leaderboard", "openai"],
)
def test_every_shape_becomes_the_same_document(tool):
    assert function_document(tool) == DOCUMENT


@pytest.mark.parametrize("tool", [{"name": "f"}, {"name": "f", "parameters": None}, {"name": "f", "parameters": {}}])
def test_a_tool_without_parameters(tool):
    assert function_document(tool) == {"name": "f", "parameters": {"properties": {}, "required": []}}


@pytest.mark.parametrize(
    ("written", "kind", "items"),
    [
        ("float", "float", None),
        ("Dict[str, int]", "dict", None),
        ("list", "array", None),
        ("List[List[int]]", "array", "array"),
        ("Tuple[float, float]", "tuple", "float"),
        ("Set[int]", "array", "integer"),
        ("Optional[List[int]], optional", "array", "integer"),
        ("List[Dict]", "array", "dict"),
        ("Union[int, str]", "any", None),
        ("Callable[[float], float]", "any", None),
        ("bool,optional", "boolean", None),
        (None, "any", None),
        (3, "any", None),
    ],
)
def test_types(written, kind, items):
    schema = function_document({"name": "f", "parameters": {"x": {"type": written}}})["parameters"]["properties"]["x"]
    assert schema == {"type": kind} | ({"items": {"type": items}} if items else {})


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        (None, "tools[3]"),
        ("f", "tools[3]"),
        ({}, "tools[3].name"),
        ({"name": ""}, "tools[3].name"),
        ({"type": "function", "function": {"name": 1}}, "tools[3].function.name"),
        ({"name": "f", "parameters": [1]}, "tools[3].parameters"),
        ({"name": "f", "parameters": {"x": None}}, "tools[3].parameters.x"),
        ({"name": "f", "parameters": {"x": "str"}}, "tools[3].parameters.x"),
        ({"name": "f", "parameters": {"type": "object", "properties": [1]}}, "tools[3].parameters"),
        ({"name": "f", "parameters": {"type": "object", "required": "x"}}, "tools[3].parameters"),
    ],
)
def test_malformed_tools_are_placed(tool, field):
    with pytest.raises(DataError) as caught:
        function_document(tool, "tools[3]")
    assert caught.value.field == field
    assert caught.value.help


@pytest.mark.parametrize(
    ("arguments", "acceptable"),
    [
        ({"city": "Oslo"}, {"city": ["Oslo"], "days": ["", 10], "type": ["", "game"]}),
        ({"city": "Oslo", "days": 10}, {"city": ["Oslo"], "days": [10, ""], "type": ["", "game"]}),
        ({"city": "Oslo", "days": 3, "type": "x"}, {"city": ["Oslo"], "days": [3], "type": ["x"]}),
    ],
)
def test_an_optional_parameter_may_take_its_default(arguments, acceptable):
    assert acceptable_answer({"name": "f", "arguments": arguments}, DOCUMENT) == {"f": acceptable}


def test_dicts_become_alternatives_per_key():
    parameters = {"one": {"type": "Dict"}, "many": {"type": "List[Dict]"}, "other": {"type": "str"}}
    function = function_document({"name": "f", "parameters": parameters})
    arguments = {"one": {"k": 1}, "many": [{"k": 1}], "other": {"k": 1}}
    answer = acceptable_answer({"name": "f", "arguments": arguments}, function)
    assert answer == {"f": {"one": [{"k": [1]}], "many": [[{"k": [1]}]], "other": [{"k": 1}]}}
