"""What a row's tools allow: every right answer, and nothing that the scorer could not read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefit.core.errors import DataError
from surefit.metrics.tool_calls import parse_calls
from surefit.metrics.tool_grammar import calls_grammar
from surefit.recipes.function_calling import RECIPE, to_example
from surefit.task import Example

xgrammar = pytest.importorskip("xgrammar", reason="the extra `constrained` is not installed")

DATA = Path(__file__).parents[4] / "shared" / "data" / "function_calling"


def accepts(tools, text):
    from xgrammar.testing import _is_grammar_accept_string

    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    accepted = _is_grammar_accept_string(calls_grammar(tools), text)
    assert not accepted or parse_calls(text) is not None, "whatever is allowed can be read"
    return accepted


def tool(required=None, name="f", **properties):
    required = list(properties) if required is None else required
    return {"name": name, "parameters": {"type": "dict", "properties": properties, "required": required}}


def call(name="f", /, **arguments):
    return {"name": name, "arguments": arguments}


def takes(spec, value):
    return accepts([tool(x=spec)], [call(x=value)])


def test_no_call_one_call_several_calls():
    tools = [tool(x={"type": "integer"}), tool(name="g")]
    assert accepts(tools, [])
    assert accepts(tools, [call(x=1)])
    assert accepts(tools, [call("g"), call(x=1), call("g")])
    assert not accepts(tools, [call("h")])
    assert not accepts(tools, [call("g", x=1)])
    assert not accepts(tools, [call("g")] * 2 + [call()]), "x is required"
    assert accepts([], [])
    assert not accepts([], [call()])


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "arguments": {"x": 1}}',
        '[{"name": "f", "arguments": {"x": 1}}',
        '[{"arguments": {"x": 1}, "name": "f"}]',
        '[{"name": "f", "arguments": {"x": 1}, "id": 3}]',
        '[{"name": "f", "arguments": "{}"}]',
        'Sure: [{"name": "f", "arguments": {"x": 1}}]',
        '[{"name": "f", "arguments": {"x": 1, "x": 2}}]',
        '[{"name":"f","arguments":{"x":1}}]',
        "",
    ],
)
def test_other_shapes(text):
    assert not accepts([tool(x={"type": "integer"})], text)


@pytest.mark.parametrize(
    ("spec", "right", "wrong"),
    [
        ({"type": "integer"}, [0, -3, 10**18], [1.5, "1", True, None, [1]]),
        ({"type": "float"}, [0, -0.5, 2.0, 1e21], ["1.0", False, None]),
        ({"type": "boolean"}, [True, False], [1, "true", None]),
        ({"type": "string"}, ["", "São", 'a "b"\n\\', "😀"], [1, None, ["a"]]),
        ({"type": "array", "items": {"type": "string"}}, [[], ["a"], ["a", "b"]], ["a", [1], [["a"]], None]),
        ({"type": "array"}, [[], [1, "a", None, [2]]], ["a", {}]),
        ({"type": "tuple", "items": {"type": "float"}}, [[1, 2.5]], [["a"]]),
        ({"type": "dict"}, [{}, {"a": [1, {"b": None}]}], [[], "a"]),
        ({"type": "any"}, [1, "a", None, [], {"a": 1}], []),
        ({"type": "Callable"}, [1, "a", {}], []),
        ({}, [1, "a", None], []),
        ({"enum": ["km", "São", 3, None]}, ["km", "São", 3, None], ["k", "3", 4, "kmS"]),
        ({"type": "string", "enum": []}, ["a"], [1]),
        ({"const": "x"}, ["x"], ["y"]),
        ({"type": "array", "enum": ["a", "b"]}, [[], ["a", "b", "a"]], ["a", ["c"]]),
        ({"type": "array", "items": {"type": "string", "enum": ["a"]}}, [["a", "a"]], [["b"]]),
        ({"type": ["string", "null"]}, ["a", None], [1]),
        ({"type": "string", "nullable": True}, ["a", None], [1]),
        ({"type": "string", "default": None}, ["a", None], [1]),
        ({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]}, [1, [1]], ["a", ["a"]]),
        ({"oneOf": [{"const": 1}, {"const": 2}]}, [1, 2], [3]),
        ({"$ref": "#/$defs/x", "type": "string"}, ["a", 1], []),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é\nü"], ["a", "abcd", "\x01\x02"]),
        ({"type": "string", "maxLength": 2}, ["", "ab"], ["abc"]),
        ({"type": "string", "minLength": 2, "format": "date", "pattern": "^a*$"}, ["bb"], ["b"]),
        ({"type": "string", "minLength": 3, "maxLength": 1}, ["", "ab"], [1]),
        ({"type": "string", "maxLength": 10**9}, ["abc"], [1]),
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
            [[1, 2], [1, 2, 3]],
            [[1], [1] * 4],
        ),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [[1, 2], [1] * 9], [[], [1]]),
        ({"type": "array", "maxItems": 0}, [[]], [[1]]),
        ({"type": "array", "maxItems": 1}, [[], [1]], [[1, 2]]),
        ({"type": "integer", "minimum": 3}, [3, 1], ["3"]),
    ],
    ids=str,
)
def test_types(spec, right, wrong):
    for value in right:
        assert takes(spec, value), value
    for value in wrong:
        assert not takes(spec, value), value


@pytest.mark.parametrize("text", ['"\\ud800"', '"\x01"', "1e999", "1" * 400, "01", "NaN", "1.", ".5", "+1", '"\\x"'])
def test_what_the_scorer_refuses_is_never_allowed(text):
    for spec in ({}, {"type": "string"}, {"type": "string", "maxLength": 9}, {"type": "float"}, {"type": "dict"}):
        assert not accepts([tool(x=spec)], f'[{{"name": "f", "arguments": {{"x": {text}}}}}]')


def test_optional_arguments_in_the_declared_order():
    tools = [tool(["b"], a={"type": "integer"}, b={"type": "integer"}, c={"type": "integer"}, d={"type": "integer"})]
    for names in ("b", "ab", "bc", "bd", "abcd", "abd", "bcd"):
        assert accepts(tools, [call(**dict.fromkeys(names, 1))]), names
    for names in ("", "a", "acd", "ba", "bb", "be"):
        text = "{" + ", ".join(f'"{name}": 1' for name in names) + "}"
        assert not accepts(tools, f'[{{"name": "f", "arguments": {text}}}]'), names
    every = [tool([], a={}, b={})]
    assert all(accepts(every, [call(**dict.fromkeys(names, 1))]) for names in ("", "a", "b", "ab"))


def test_nested_objects():
    inner = {"type": "dict", "properties": {"lat": {"type": "float"}, "unit": {"enum": ["m"]}}, "required": ["lat"]}
    assert takes(inner, {"lat": 1.5, "unit": "m"})
    assert takes(inner, {"lat": 1.5})
    assert not takes(inner, {"unit": "m"})
    assert not takes(inner, {"lat": 1, "other": 2})
    assert takes(inner | {"additionalProperties": True}, {"lat": 1, "other": 2})
    assert takes({"type": "array", "items": inner}, [{"lat": 1}, {"lat": 2, "unit": "m"}])
    assert not takes({"type": "array", "items": inner}, [{"lat": "1"}])
    assert takes({"type": "dict", "properties": {}}, {})


def test_the_ways_of_writing_a_tool():
    xlam = {
        "name": "f",
        "parameters": {
            "n": {"type": "int"},
            "names": {"type": "List[str], optional"},
            "type": {"type": "Optional[str]"},
            "both": {"type": "Union[int, str]", "default": 1},
        },
    }
    assert accepts([xlam], [call(n=1)])
    assert accepts([xlam], [call(n=1, names=["a"], type=None, both="x")])
    assert not accepts([xlam], [call(names=["a"])])
    assert not accepts([xlam], [call(n=1, names=[1])])
    assert not accepts([xlam], [call(n=1, both=1.5)])
    openai = {"type": "function", "function": tool(x={"type": "integer"})}
    assert accepts([openai], [call(x=1)])
    assert accepts([{"name": "f"}], [call()])
    assert accepts([{"name": "f", "parameters": None}], [call()])
    assert accepts(
        [tool(name='odd "name"\n.é', **{'a"b': {"type": "integer"}})], [call('odd "name"\n.é', **{'a"b': 1})]
    )


def test_what_is_no_tool_is_left_out_and_odd_schemas_are_open():
    odd = {"type": "dict", "properties": {"x": "text", "y": {"type": 7}, "z": {"enum": "abc"}}, "required": "x"}
    assert accepts([None, 3, {}, {"name": 4}, {"name": "f", "parameters": odd}], [call(x=1, y="a", z=[])])
    deep = {"type": "integer"}
    for _ in range(60):
        deep = {"type": "array", "items": deep}
    assert takes(deep, [])
    assert not takes(deep, [1])
    wide = tool([], **{f"p{n}": {"type": "integer"} for n in range(200)})
    assert len(calls_grammar([wide])) < 50_000, "a grammar grows with the number of its parameters"
    assert accepts([wide], [call(p0=1, p77=2, p199=3)])


def test_the_recipe_reads_the_tools_from_the_prompt():
    tools = [tool(x={"type": "integer"})]
    example = to_example({"query": "q", "tools": json.dumps(tools)})
    grammar = RECIPE.grammar(example)
    assert (grammar.kind, grammar.source) == ("ebnf", calls_grammar(tools))
    by_hand = Example(messages=({"role": "user", "content": "hello"},))
    assert RECIPE.grammar(by_hand).source == calls_grammar([])


def leaderboard():
    if not DATA.exists():
        pytest.skip("the shared data is not here")
    for file in sorted((DATA / "bfcl").glob("*.json")):
        yield from (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())


def test_every_tool_of_the_leaderboard_gives_a_grammar():
    grammars = [calls_grammar(row["function"]) for row in leaderboard()]
    assert len(grammars) == 2471
    for grammar in dict.fromkeys(grammars):
        xgrammar.Grammar.from_ebnf(grammar)


def in_declared_order(value, schema):
    if isinstance(value, list):
        return [in_declared_order(item, schema.get("items") or {}) for item in value]
    if not isinstance(value, dict):
        return value
    inner = schema.get("properties") or {}
    order = [*inner, *value]
    return {name: in_declared_order(value[name], inner.get(name, {})) for name in dict.fromkeys(order) if name in value}


def test_right_answers_are_allowed():
    """All but three, which leave out an argument that their own tool requires."""
    if not DATA.exists():
        pytest.skip("the shared data is not here")
    rows, refused = 0, []
    for line in (DATA / "xlam" / "xlam_shape_from_bfcl.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        tools, answers = json.loads(row["tools"]), json.loads(row["answers"])
        try:
            to_example(row)
        except DataError:
            continue
        rows += 1
        named = {tool["name"]: {"properties": tool["parameters"]} for tool in reversed(tools)}
        wanted = [call(a["name"], **in_declared_order(a["arguments"], named[a["name"]])) for a in answers]
        if not accepts(tools, wanted):
            refused.append(row["id"])
    assert (rows, refused) == (872, ["simple_python_200", "parallel_88", "parallel_multiple_94"])
