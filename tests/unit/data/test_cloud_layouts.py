"""Rows as Vertex AI, Amazon Bedrock and OpenAI take them: read as messages by check, audit and training alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.rows_config import rows_config

from surefit.core.errors import DataError
from surefit.data.audit.detectors.parts import answer_text, find_answer, turn_roles
from surefit.data.read.load import Rows, load_rows
from surefit.data.rows.columns import recipe_for
from surefit.data.rows.layouts import detect_format, to_examples, to_prompts
from surefit.data.rows.unread_fields import find_unread_columns
from surefit.facts.dataset import dataset_facts
from surefit.recipes import get_recipe
from surefit.task import Example

CHAT = get_recipe("chat")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Rain in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": '{"rain": true}'},
    {"role": "assistant", "content": "Yes.", "reasoning_content": "It says true."},
]
TOOL = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
VERTEX = {
    "systemInstruction": {"role": "system", "parts": [{"text": "Be brief."}]},
    "contents": [
        {"role": "user", "parts": [{"text": "Rain "}, {"text": "in Oslo?"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "weather", "args": {"city": "Oslo"}}}]},
        {"role": "function", "parts": [{"functionResponse": {"name": "weather", "response": {"rain": True}}}]},
        {"role": "model", "parts": [{"text": "It says true.", "thought": True}, {"text": "Yes."}]},
    ],
    "tools": [
        {
            "functionDeclarations": [
                {
                    **TOOL,
                    "parameters": {
                        "type": "OBJECT",
                        "properties": {"city": {"type": "STRING"}, "days": {"type": "ARRAY"}},
                    },
                }
            ]
        }
    ],
}
BEDROCK = {
    "schemaVersion": "bedrock-conversation-2024",
    "system": [{"text": "Be brief."}],
    "toolConfig": {"tools": [{"toolSpec": {"name": "weather", "description": "The weather.",
                                           "inputSchema": {"json": SCHEMA}}}]},
    "messages": [
        {"role": "user", "content": [{"text": "Rain in "}, {"text": "Oslo?"}]},
        {"role": "assistant",
         "content": [{"toolUse": {"toolUseId": "1", "name": "weather", "input": {"city": "Oslo"}}}]},
        {"role": "user", "content": [{"toolResult": {"toolUseId": "1", "content": [{"json": {"rain": True}}]}}]},
        {"role": "assistant",
         "content": [{"reasoningContent": {"reasoningText": {"text": "It says true."}}}, {"text": "Yes."}]},
    ],
}  # fmt: skip
OPENAI = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain in Oslo?"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {
            "name": "weather", "arguments": '{"city": "Oslo"}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": '{"rain": true}'},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "It says true."},
    ],
    "tools": [{"type": "function", "function": TOOL}],
    "parallel_tool_calls": False,
}  # fmt: skip


def rows_of(path: Path, *rows: Any) -> Rows:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_rows(str(path))


def essence(example: Example) -> list[dict[str, Any]]:
    """Return the turns without the ids and names by which results refer to calls: the clouds differ in them."""
    turns = []
    for turn in example.messages:
        kept = {key: value for key, value in turn.items() if key not in ("name", "tool_call_id")}
        if "tool_calls" in kept:
            kept["tool_calls"] = [{k: v for k, v in call.items() if k != "id"} for call in kept["tool_calls"]]
        turns.append(kept)
    return turns


@pytest.mark.parametrize("row", [VERTEX, BEDROCK, OPENAI], ids=["vertex", "bedrock", "openai"])
def test_a_conversation_with_tools_is_the_same_from_every_cloud(tmp_path, row):
    rows = rows_of(tmp_path / "rows.jsonl", row)
    (example,) = to_examples(rows, CHAT)
    assert essence(example) == MESSAGES
    assert example.tools == ({"type": "function", "function": TOOL},)
    (prompt,) = to_prompts(rows, CHAT)
    assert essence(prompt)[:4] == MESSAGES[:4]
    unread = find_unread_columns(rows, CHAT, "auto", None)
    assert [name for observation in unread.values() for name in observation.examples] == []


@pytest.mark.parametrize("row", [VERTEX, BEDROCK, OPENAI], ids=["vertex", "bedrock", "openai"])
def test_the_audit_finds_the_answer(tmp_path, row):
    assert find_answer(row)[0] == ("contents" if row is VERTEX else "messages")
    assert turn_roles(row)[-1] == "assistant"
    facts = dataset_facts("rows", rows_of(tmp_path / "rows.jsonl", row))
    assert (facts.target, facts.target_null) == ("contents" if row is VERTEX else "messages", 0)


def test_the_text_of_an_answer_in_parts():
    assert answer_text({"contents": [{"role": "model", "parts": [{"text": "Yes."}]}]}) == "Yes."
    assert answer_text({"messages": [{"role": "assistant", "content": [{"text": "Yes."}]}]}) == "Yes."


def test_bedrocks_older_rows_and_snake_case(tmp_path):
    (example,) = to_examples(rows_of(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"}), CHAT)
    assert [turn["content"] for turn in example.messages] == ["a", "b"]
    row = {
        "system_instruction": {"parts": {"text": "S"}},
        "contents": [
            {"role": "user", "parts": {"text": "a"}},
            {"role": "model", "parts": [{"function_call": {"name": "f", "args": {}}}]},
        ],
        "tools": [{"function_declarations": [{"name": "f"}, {"name": "g"}]}],
    }
    (example,) = to_examples(rows_of(tmp_path / "b.jsonl", row), CHAT)
    assert [turn["role"] for turn in example.messages] == ["system", "user", "assistant"]
    assert [tool["function"]["name"] for tool in example.tools or ()] == ["f", "g"]


def test_two_results_in_one_turn_are_two_tool_messages(tmp_path):
    row = {
        "contents": [
            {"role": "user", "parts": [{"text": "a"}]},
            {"role": "model", "parts": [{"functionCall": {"name": n, "args": {}}} for n in "fg"]},
            {"role": "user", "parts": [{"functionResponse": {"name": n, "response": {}}} for n in "fg"]},
            {"role": "model", "parts": [{"text": "b"}]},
        ]
    }
    (example,) = to_examples(rows_of(tmp_path / "rows.jsonl", row), CHAT)
    assert [turn["role"] for turn in example.messages] == ["user", "assistant", "tool", "tool", "assistant"]


def gemini(*parts: Any, role: Any = "user") -> dict[str, Any]:
    return {"contents": [{"role": role, "parts": list(parts)}, {"role": "model", "parts": [{"text": "b"}]}]}


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (gemini({"fileData": {"fileUri": "gs://b/a.png"}}), "contents[0].parts[0]"),
        (gemini({"text": "a"}, {"inlineData": {"data": "xx"}}), "contents[0].parts[1]"),
        (gemini({"text": "a", "fileData": {"fileUri": "gs://b/a.png"}}), "contents[0].parts[0]"),
        (
            {"messages": [{"role": "user", "content": [{"text": "a", "image": {"format": "png"}}]}]},
            "messages[0].content[0]",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"toolResult": {"content": [{"text": "a", "image": {"b": 1}}]}}]}
                ]
            },
            "messages[0].content[0]",
        ),
        (gemini({"text": "a"}) | {"tools": [{"functionDeclarations": [{"name": "f"}]}, {"googleSearch": {}}]}, "tools"),
        (gemini({"text": 3}), "contents[0].parts[0]"),
        (gemini({}), "contents[0].parts[0]"),
        (gemini("a"), "contents[0].parts[0]"),
        (gemini({"text": "a"}, role="assistant"), "contents[0].role"),
        (gemini({"text": "a"}, role=["user"]), "contents[0].role"),
        ({"contents": [{"role": "user", "content": "a"}]}, "contents[0]"),
        ({"contents": ["a"]}, "contents[0]"),
        ({"contents": "a"}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": [{"role": "user", "parts": [{"text": "a"}]}]}, "contents"),
        ({"messages": [{"role": "user", "content": [{"image": {"format": "png"}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"toolUse": 1}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"toolResult": {"content": [{"image": {}}]}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_rows_that_are_not_text(tmp_path, row, field):
    with pytest.raises(DataError) as raised:
        to_examples(rows_of(tmp_path / "rows.jsonl", row), CHAT)
    assert raised.value.field == field
    assert raised.value.line == 1


def test_a_turn_with_a_result_and_a_call_keeps_both(tmp_path):
    vertex = {
        "contents": [
            {"role": "user", "parts": [{"text": "a"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]},
            {"role": "model", "parts": [{"functionResponse": {"name": "f", "response": {}}},
                                        {"functionCall": {"name": "g", "args": {}}}]},
        ]
    }  # fmt: skip
    bedrock = {
        "messages": [
            {"role": "user", "content": [{"text": "a"}, {"cachePoint": {"type": "default"}}]},
            {"role": "assistant", "content": [{"toolUse": {"name": "f", "input": {}}}]},
            {"role": "assistant", "content": [{"toolResult": {"content": [{"text": "x", "json": {"y": 1}}]}},
                                              {"toolUse": {"name": "g", "input": {}}}]},
        ]
    }  # fmt: skip
    for name, row in (("vertex", vertex), ("bedrock", bedrock)):
        (example,) = to_examples(rows_of(tmp_path / f"{name}.jsonl", row), CHAT)
        assert [turn["role"] for turn in example.messages] == ["user", "assistant", "tool", "assistant"]
        assert example.messages[-1]["tool_calls"][0]["function"]["name"] == "g"
    assert example.messages[2]["content"] == 'x{"y": 1}'


def test_a_part_with_text_and_a_call_keeps_both(tmp_path):
    row = {
        "contents": [
            {"role": "user", "parts": [{"text": "a"}]},
            {"role": "model", "parts": [{"text": "b", "functionCall": {"name": "f", "args": {}}}]},
        ]
    }
    (example,) = to_examples(rows_of(tmp_path / "rows.jsonl", row), CHAT)
    assert example.messages[-1]["content"] == "b"
    assert example.messages[-1]["tool_calls"][0]["function"]["name"] == "f"


def test_the_nulls_of_a_column_of_tools_say_nothing(tmp_path):
    """Parquet gives every tool of a column the keys of all of them."""
    nulls = {"functionDeclarations": None, "googleSearch": None}
    row = gemini({"text": "a"}) | {"tools": [nulls | {"function_declarations": [{"name": "f"}]}, nulls]}
    (example,) = to_examples(rows_of(tmp_path / "rows.jsonl", row), CHAT)
    assert [tool["function"]["name"] for tool in example.tools or ()] == ["f"]
    row = gemini({"text": "a"}) | {"tools": [nulls]}
    (example,) = to_examples(rows_of(tmp_path / "none.jsonl", row), CHAT)
    assert not example.tools


def test_openais_weights_leave_a_turn_out(tmp_path):
    turns = [{"role": role, "content": text, **({"weight": weight} if weight is not None else {})}
             for role, text, weight in (("user", "a", None), ("assistant", "b", 0), ("user", "c", None),
                                        ("assistant", "d", 1))]  # fmt: skip
    (example,) = to_examples(rows_of(tmp_path / "rows.jsonl", {"messages": turns}), CHAT)
    assert [turn.get("weight") for turn in example.messages] == [None, 0, None, 1]
    with pytest.raises(DataError) as raised:
        to_examples(rows_of(tmp_path / "none.jsonl", {"messages": turns[:2]}), CHAT)
    assert raised.value.field == "messages"


def test_openais_rows_of_preferences_are_no_rows_to_train_on(tmp_path):
    row = {
        "input": {"messages": [{"role": "user", "content": "a"}], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [{"role": "assistant", "content": "b"}],
        "non_preferred_output": [{"role": "assistant", "content": "c"}],
    }
    with pytest.raises(DataError) as raised:
        to_examples(rows_of(tmp_path / "rows.jsonl", row), CHAT)
    assert raised.value.field == "data.format"
    assert "objective: dpo" in str(raised.value.help)


@pytest.mark.parametrize("recipe", ["chat", "chat + math_reasoning"])
def test_roles_are_renamed_in_json_text_and_beside_other_tasks(tmp_path, recipe):
    turns = [{"role": "me", "content": "a"}, {"role": "it", "content": "b"}]
    config = rows_config(columns={}, roles={"user": "me", "assistant": "it"})
    for value in (turns, json.dumps(turns)):
        (example,) = to_examples(
            rows_of(tmp_path / "rows.jsonl", {"messages": value}), recipe_for(get_recipe(recipe), config)
        )
        assert [turn["role"] for turn in example.messages] == ["user", "assistant"]


def test_roles_reach_a_source_without_the_columns_of_another_task(tmp_path):
    row = {"messages": [{"role": "me", "content": "a"}, {"role": "it", "content": "b"}]}
    config = rows_config(columns={"question": "problem"}, roles={"user": "me", "assistant": "it"})
    recipe = recipe_for(get_recipe("chat + math_reasoning"), config)
    (example,) = to_examples(rows_of(tmp_path / "rows.jsonl", row), recipe)
    assert [turn["role"] for turn in example.messages] == ["user", "assistant"]


def test_roles_that_nothing_reads_are_an_error(tmp_path):
    config = rows_config(columns={}, roles={"user": "me", "assistant": "it"})
    with pytest.raises(DataError) as raised:
        to_examples(
            rows_of(tmp_path / "rows.jsonl", {"question": "a", "answer": "b\n#### 1"}),
            recipe_for(get_recipe("math_reasoning"), config),
        )
    assert raised.value.field == "data.roles"


@pytest.mark.parametrize(
    ("columns", "layout"),
    [
        (["prompt", "completion", "contents"], "prompt_completion"),
        (["contents"], "gemini"),
    ],
)
def test_a_column_of_the_same_name_beside_another_layout_changes_nothing(columns, layout):
    assert detect_format(columns, get_recipe("chat")) == layout
