"""Rows of pairs, from the layouts in which data sets of preferences come, to two conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.rows_config import rows_config

from surefit.core.errors import DataError
from surefit.data.read.load import Rows, load_rows
from surefit.data.rows.columns import recipe_for
from surefit.data.rows.layouts import PAIR_LAYOUTS, detect_format, to_examples, to_prompts
from surefit.data.rows.pairs import pair_sides, scores_of
from surefit.data.rows.reasoning import convert_reasoning
from surefit.recipes import get_recipe
from surefit.task import Example

CHAT = get_recipe("chat")
ASK, GOOD, BAD = "What is 2 + 2?", "4.", "Five."
USER = {"role": "user", "content": ASK}
CHOSEN, REJECTED = {"role": "assistant", "content": GOOD}, {"role": "assistant", "content": BAD}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}],
}


def rows_of(path: Path, *rows: dict[str, Any]) -> Rows:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_rows(str(path))


def convert(tmp_path: Path, *rows: dict[str, Any], **names: Any) -> list[Example]:
    recipe = recipe_for(CHAT, rows_config(objective="dpo", **names))
    return to_examples(rows_of(tmp_path / "rows.jsonl", *rows), recipe).examples


def error_of(tmp_path: Path, *rows: dict[str, Any], **names: Any) -> DataError:
    with pytest.raises(DataError) as raised:
        convert(tmp_path, *rows, **names)
    return raised.value


ONE_PROMPT = {
    "text": {"prompt": ASK, "chosen": GOOD, "rejected": BAD},
    "messages": {"prompt": [USER], "chosen": [CHOSEN], "rejected": [REJECTED]},
    "messages as JSON text": {
        "prompt": json.dumps([USER]),
        "chosen": json.dumps([CHOSEN]),
        "rejected": json.dumps([REJECTED]),
    },
    "whole conversations": {"chosen": [USER, CHOSEN], "rejected": [USER, REJECTED]},
    "UltraFeedback-binarized": {
        "prompt": ASK,
        "prompt_id": "9a",
        "chosen": [USER, CHOSEN],
        "rejected": [USER, REJECTED],
        "messages": [USER, CHOSEN],
        "score_chosen": 8.5,
        "score_rejected": 3.0,
    },
    "HH-RLHF": {
        "chosen": f"\n\nHuman: {ASK}\n\nAssistant: {GOOD}",
        "rejected": f"\n\nHuman: {ASK}\n\nAssistant: {BAD}",
    },
    "HH-RLHF with its prompt": {
        "prompt": f"\n\nHuman: {ASK}\n\nAssistant:",
        "chosen": GOOD,
        "rejected": BAD,
    },
    "question": {"question": ASK, "chosen": GOOD, "rejected": BAD},
    "LLaMA-Factory, alpaca": {"instruction": ASK, "input": "", "chosen": GOOD, "rejected": BAD},
    "LLaMA-Factory, sharegpt": {
        "conversations": [{"from": "human", "value": ASK}],
        "chosen": {"from": "gpt", "value": GOOD},
        "rejected": {"from": "gpt", "value": BAD},
    },
    "Axolotl, chat_template": {"messages": [USER], "chosen": CHOSEN, "rejected": REJECTED},
    "the chosen answer twice": {"messages": [USER, CHOSEN], "chosen": GOOD, "rejected": BAD},
    "ms-swift": {"messages": [USER, CHOSEN], "rejected_response": BAD},
    "OpenAI": {
        "input": {"messages": [USER], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [CHOSEN],
        "non_preferred_output": [REJECTED],
    },
    "UltraFeedback": {
        "source": "evol_instruct",
        "instruction": ASK,
        "models": ["a", "b", "c"],
        "completions": [
            {"model": "a", "response": "Perhaps 4.", "overall_score": 6.0},
            {"model": "b", "response": GOOD, "overall_score": 8.5},
            {"model": "c", "response": BAD, "overall_score": "2"},
        ],
    },
}


@pytest.mark.parametrize("layout", ONE_PROMPT)
def test_a_pair_is_two_conversations_with_one_prompt(tmp_path, layout):
    (example,) = convert(tmp_path, ONE_PROMPT[layout])
    assert example.messages == (USER, CHOSEN)
    assert example.rejected == (USER, REJECTED)
    assert example.prompt == example.rejected[:-1]
    assert example.completion == GOOD
    chosen, rejected = pair_sides(example)
    assert (chosen.completion, rejected.completion) == (GOOD, BAD)
    assert chosen.rejected is rejected.rejected is None
    assert rejected.messages == (USER, REJECTED)


def test_every_layout_of_pairs_is_tried():
    recipe = recipe_for(CHAT, rows_config(objective="dpo"))
    assert {detect_format(list(row), recipe) for row in ONE_PROMPT.values()} == set(PAIR_LAYOUTS)


@pytest.mark.parametrize(
    "row",
    [
        {"system": "Be brief.", "question": ASK, "chosen": GOOD, "rejected": BAD},
        {"system": "Be brief.", "chosen": [USER, CHOSEN], "rejected": [USER, REJECTED]},
        {"chosen": [SYSTEM, USER, CHOSEN], "rejected": [SYSTEM, USER, REJECTED]},
        {"prompt": [SYSTEM, USER], "chosen": GOOD, "rejected": [REJECTED]},
    ],
)
def test_the_system_message_precedes_both_answers(tmp_path, row):
    (example,) = convert(tmp_path, row)
    assert example.messages == (SYSTEM, USER, CHOSEN)
    assert example.rejected == (SYSTEM, USER, REJECTED)


def test_only_the_last_turn_is_trained_on(tmp_path):
    turns = [USER, CHOSEN, {"role": "user", "content": "And 3 + 3?"}]
    row = {
        "chosen": [*turns, {"role": "assistant", "content": "6."}],
        "rejected": [*turns, {"role": "assistant", "content": "7."}],
    }
    (example,) = convert(tmp_path, row)
    assert [turn.get("weight") for turn in example.messages] == [None, 0, None, None]
    assert example.rejected is not None
    assert [turn.get("weight") for turn in example.rejected] == [None, 0, None, None]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASK, "chosen": [CALL], "rejected": BAD, "tools": TOOLS},
        {
            "chosen": {"messages": [USER, CALL], "tools": TOOLS},
            "rejected": {"messages": [USER, REJECTED], "tools": TOOLS},
        },
        {
            "input": {"messages": [USER], "tools": TOOLS},
            "preferred_output": [CALL],
            "non_preferred_output": [REJECTED],
        },
    ],
)
def test_tools_belong_to_both_answers(tmp_path, row):
    (example,) = convert(tmp_path, row)
    assert example.tools == tuple(TOOLS)
    assert example.messages[-1]["tool_calls"][0]["function"]["name"] == "add"
    assert example.rejected == (USER, REJECTED)
    assert all(side.tools == tuple(TOOLS) for side in pair_sides(example))


def test_columns_with_other_names(tmp_path):
    row = {"query": ASK, "a": GOOD, "b": BAD}
    (example,) = convert(tmp_path, row, columns={"prompt": "query", "chosen": "a", "rejected": "b"})
    assert (example.messages, example.rejected) == ((USER, CHOSEN), (USER, REJECTED))


def test_roles_with_other_names(tmp_path):
    row = {
        "prompt": [{"role": "me", "content": ASK}],
        "chosen": {"role": "it", "content": GOOD},
        "rejected": [{"role": "it", "content": BAD}],
    }
    (example,) = convert(tmp_path, row, roles={"user": "me", "assistant": "it"})
    assert (example.messages, example.rejected) == ((USER, CHOSEN), (USER, REJECTED))


def test_equal_answers_are_left_to_the_audit(tmp_path):
    (example,) = convert(tmp_path, {"prompt": ASK, "chosen": GOOD, "rejected": GOOD})
    assert example.rejected == example.messages


GOOD_ROW = ONE_PROMPT["text"]
UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "a null side": ({"prompt": ASK, "chosen": GOOD, "rejected": None}, "rejected"),
    "an empty side": ({"prompt": ASK, "chosen": " ", "rejected": BAD}, "chosen"),
    "an empty list": ({"prompt": ASK, "chosen": [], "rejected": BAD}, "chosen"),
    "no prompt": ({"chosen": GOOD, "rejected": BAD}, "prompt"),
    "a null prompt": ({"prompt": None, "chosen": GOOD, "rejected": BAD}, "prompt"),
    "only a system message": (
        {"chosen": [SYSTEM, CHOSEN], "rejected": [SYSTEM, REJECTED]},
        "chosen",
    ),
    "one side without an answer": ({"chosen": [USER, CHOSEN], "rejected": [USER]}, "rejected"),
    "one side is an answer only": ({"prompt": ASK, "chosen": [USER, CHOSEN], "rejected": BAD}, "chosen"),
    "different prompts": (
        {"chosen": [USER, CHOSEN], "rejected": [{"role": "user", "content": "What is 3 + 3?"}, REJECTED]},
        "rejected",
    ),
    "different earlier answers": (
        {"chosen": [USER, CHOSEN, USER, CHOSEN], "rejected": [USER, REJECTED, USER, CHOSEN]},
        "rejected",
    ),
    "different numbers of turns": (
        {"chosen": [USER, CHOSEN, USER, CHOSEN], "rejected": [USER, REJECTED]},
        "rejected",
    ),
    "another prompt in the column": (
        {"prompt": "What is 3 + 3?", "chosen": [USER, CHOSEN], "rejected": [USER, REJECTED]},
        "prompt",
    ),
    "tools on one side": (
        {"chosen": {"messages": [USER, CALL], "tools": TOOLS}, "rejected": {"messages": [USER, REJECTED]}},
        "rejected.tools",
    ),
    "an answer with weight 0": (
        {"prompt": ASK, "chosen": [{**CHOSEN, "weight": 0}], "rejected": BAD},
        "chosen",
    ),
    "a prompt that ends with another answer": (
        {"messages": [USER, REJECTED], "chosen": GOOD, "rejected": BAD},
        "messages",
    ),
    "null": ({"prompt": ASK, "chosen": GOOD, "rejected": None}, "rejected"),
    "a number": ({"prompt": ASK, "chosen": 4, "rejected": BAD}, "chosen"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_an_unusable_row_is_an_error_with_its_line(tmp_path, case):
    row, field = UNUSABLE[case]
    error = error_of(tmp_path, ONE_PROMPT["whole conversations"] if "prompt" not in row else GOOD_ROW, row)
    assert (error.line, error.field) == (2, field)
    assert str(error.code).startswith("E")


def test_an_answer_that_is_no_text_is_said_in_words(tmp_path):
    error = error_of(tmp_path, {"prompt": ASK, "chosen": 4, "rejected": BAD})
    assert "an answer as text or as turns" in error.message
    assert "a list of turns" in (error.help or "")


@pytest.mark.parametrize(
    ("completions", "field"),
    [
        ([{"response": GOOD, "overall_score": 8}], "completions"),
        ([{"response": GOOD, "overall_score": 8}, {"response": BAD, "overall_score": 8}], "completions"),
        ([{"response": GOOD, "overall_score": 8}, {"response": BAD, "overall_score": "n/a"}], "completions[1]"),
        ([{"response": GOOD, "overall_score": 8}, {"response": "", "overall_score": 2}], "completions[1]"),
        ([{"response": GOOD, "overall_score": 8}, BAD], "completions[1]"),
    ],
)
def test_scores_that_make_no_pair(tmp_path, completions, field):
    assert error_of(tmp_path, {"instruction": ASK, "completions": completions}).field == field


@pytest.mark.parametrize(
    ("row", "help_text"),
    [
        ({"query": ASK, "response_chosen": GOOD, "response_rejected": BAD},
         "data.columns: {chosen: response_chosen, rejected: response_rejected, prompt: query}"),
        ({"prompt": ASK, "Better": GOOD, "Worse": BAD}, "data.columns: {chosen: Better, rejected: Worse}"),
        ({"prompt": ASK, "completion": GOOD}, "objective: sft"),
        ({"messages": [USER, CHOSEN]}, "objective: sft"),
        ({"prompt": ASK, "completion": GOOD, "label": True}, "objective: kto"),
    ],
)  # fmt: skip
def test_rows_that_are_no_pairs_are_told_what_to_write(tmp_path, row, help_text):
    error = error_of(tmp_path, row)
    assert error.field == "objective"
    assert error.path == str(tmp_path / "rows.jsonl")
    assert help_text in str(error.help)


PAIRS_ALONE = ["text", "messages", "question", "HH-RLHF", "LLaMA-Factory, alpaca", "OpenAI", "UltraFeedback"]


@pytest.mark.parametrize("layout", PAIRS_ALONE)
def test_pairs_without_a_preference_objective_are_told_to_write_one(tmp_path, layout):
    with pytest.raises(DataError) as raised:
        to_examples(rows_of(tmp_path / "rows.jsonl", ONE_PROMPT[layout]), CHAT)
    assert raised.value.field == "data.format"
    assert "objective: dpo" in str(raised.value.help)


def test_the_format_must_suit_the_objective(tmp_path):
    rows = rows_of(tmp_path / "rows.jsonl", ONE_PROMPT["UltraFeedback-binarized"])
    dpo = recipe_for(CHAT, rows_config(objective="dpo"))
    for recipe, fmt, word in ((dpo, "messages", "sft"), (CHAT, "pairs", "dpo")):
        with pytest.raises(DataError) as raised:
            to_examples(rows, recipe, fmt)
        assert raised.value.field == "data.format"
        assert f"objective: {word}" in str(raised.value.help)


@pytest.mark.parametrize("recipe", ["math_reasoning", "chat + math_reasoning"])
def test_recipes_of_single_answers_read_no_pairs(recipe):
    with pytest.raises(DataError) as raised:
        recipe_for(get_recipe(recipe), rows_config(objective="simpo"))
    assert raised.value.field == "recipe"


def test_the_reasoning_of_both_answers_is_dropped(tmp_path):
    row = {"prompt": ASK, "chosen": f"<think>easy</think>{GOOD}", "rejected": f"<think>hm</think>{BAD}"}
    (example,) = convert(tmp_path, row)
    dropped = convert_reasoning(example, "drop")
    assert (dropped.messages, dropped.rejected) == ((USER, CHOSEN), (USER, REJECTED))
    assert convert_reasoning(example, "only_last").rejected == example.rejected


@pytest.mark.parametrize("layout", ONE_PROMPT)
def test_the_prompt_of_a_pair_can_be_answered(tmp_path, layout):
    recipe = recipe_for(CHAT, rows_config(objective="dpo"))
    (example,) = to_prompts(rows_of(tmp_path / "rows.jsonl", ONE_PROMPT[layout]), recipe).examples
    assert example.prompt == (USER,)


def test_scores_stand_in_columns_of_several_names():
    assert scores_of({"score_chosen": 8, "score_rejected": "3.5"}) == ("score_chosen", 8.0, "score_rejected", 3.5)
    assert scores_of({"chosen_score": None, "rejected_score": 1}) is None
    assert scores_of({"chosen-rating": True, "rejected-rating": 1}) is None


def test_a_column_named_label_says_nothing_about_a_pair(tmp_path: Path) -> None:
    (example,) = convert(tmp_path, {"prompt": ASK, "chosen": GOOD, "rejected": BAD, "label": False})
    assert example.rejected is not None
