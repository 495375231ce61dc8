"""Calls against tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from surefit.data.audit.detectors.tools import ToolUse, TurnsInARow

TOOL = {
    "name": "weather",
    "parameters": {"city": {"type": "str"}, "days": {"type": "int, optional", "default": "1"}},
}
SCHEMA = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def seen(row: dict[str, Any]) -> set[str]:
    usual = {"has_tools", "name_first", "python_types"}
    return {sighting.name for sighting in ToolUse().look(0, row)} - usual


def xlam(arguments: Any, name: str = "weather", tool: Any = TOOL) -> dict[str, Any]:
    return {"tools": json.dumps([tool]), "answers": json.dumps([{"name": name, "arguments": arguments}])}


def test_a_right_call() -> None:
    assert seen(xlam({"city": "Hue"})) == set()
    assert seen(xlam({"city": "Hue", "days": 3})) == set()


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (xlam({"city": "Hue"}, name="wether"), "unknown_tool"),
        (xlam({"city": "Hue", "unit": "C"}), "unknown_parameter"),
        (xlam({"days": 2}), "missing_required"),
        (xlam({"city": "Hue", "amount": None}), "merged_schema"),
        (xlam('{"city": "Hue"}'), "double_encoded"),
        ({"tools": json.dumps(json.dumps([TOOL])), "answers": "[]"}, "double_encoded"),
        ({"tools": "[]", "answers": "[]"}, "no_tools"),
        (
            xlam({"city": "Hue"}, tool={"name": "weather", "parameters": {"city": {"type": "str"}, "x": None}}),
            "merged_schema",
        ),
    ],
)
def test_contradictions(row: dict[str, Any], name: str) -> None:
    assert name in seen(row)


def test_calls_in_conversations_of_both_kinds() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"town": "Hue"}'}}
    openai = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    sharegpt = {
        "conversations": [{"from": "function_call", "value": '{"name": "weather", "arguments": {"town": "Hue"}}'}]
    }
    for row in (openai, sharegpt):
        assert seen(row | {"tools": [{"type": "function", "function": SCHEMA}]}) == {
            "unknown_parameter",
            "missing_required",
        }


def test_which_key_of_a_call_comes_first() -> None:
    row = {"tools": [TOOL], "answers": [{"arguments": {"city": "Hue"}, "name": "weather"}]}
    assert {sighting.name for sighting in ToolUse().look(0, row)} >= {"arguments_first"}


@pytest.mark.parametrize(
    ("accepted", "unwinnable"),
    [
        ({"city": ["Hue"]}, False),
        ({"city": ["Hue"], "unit": ["C", ""]}, False),
        ({"city": []}, True),
        ({"city": ["Hue"], "unit": ["C"]}, True),
        ({}, True),
    ],
)
def test_gold_of_the_leaderboard_that_no_answer_passes(accepted: dict[str, Any], unwinnable: bool) -> None:
    row = {"function": [SCHEMA], "ground_truth": [{"weather": accepted}]}
    assert ("unwinnable" in seen(row)) is unwinnable


@pytest.mark.parametrize(
    "row",
    [
        {"tools": None, "answers": None},
        {"tools": "not json", "answers": "["},
        {"tools": [None, 3, {"name": 7}], "answers": [None, {"name": None, "arguments": []}]},
        {"tools": {"a": 1}, "ground_truth": [{"f": 3}, None, {"g": {"x": None}}]},
        {
            "tools": [{"name": "f", "parameters": {"type": "object", "properties": [1]}}],
            "answers": [{"name": "f", "arguments": {"x": [{}]}}],
        },
        {"tools": "[" * 5000, "messages": ["a", {"tool_calls": {"function": 3}}]},
    ],
)
def test_odd_rows_are_no_crash(row: dict[str, Any]) -> None:
    list(ToolUse().look(0, row))
    list(TurnsInARow().look(0, row))


def test_user_turns_in_a_row() -> None:
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    (sighting,) = TurnsInARow().look(0, {"messages": [user, user, user, assistant, user]})
    assert sighting.what == "3 user turns in a row"
    assert not list(TurnsInARow().look(0, {"messages": [user, assistant, user]}))
