"""Generic supervised fine-tuning: conversations and plain text."""

import pytest

from surefit.core.errors import DataError
from surefit.recipes.chat import RECIPE
from surefit.task import Prediction

USER = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": " 4\n"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def score(example, text):
    return RECIPE.score(example, Prediction(text, parsed=RECIPE.parse(text)))


def test_a_conversation():
    example = RECIPE.to_example({"messages": [USER, ANSWER], "tools": [TOOL]})
    assert example.messages == (USER, ANSWER)
    assert example.prompt == (USER,)
    assert example.completion == " 4\n"
    assert example.tools == (TOOL,)
    assert score(example, "4 ") == {"exact_match": 1.0}
    assert score(example, "It is 4") == {"exact_match": 0.0}


def test_plain_text_is_trained_on_and_not_scored():
    example = RECIPE.to_example({"text": "Once upon a time", "messages": None})
    assert (example.text, example.messages, example.completion) == ("Once upon a time", (), None)
    with pytest.raises(DataError, match="no final answer"):
        score(example, "x")


@pytest.mark.parametrize(
    "messages", [[USER], [USER, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]]
)
def test_a_conversation_without_a_final_text_is_kept_but_not_scored(messages):
    example = RECIPE.to_example({"messages": messages, "tools": None})
    assert example.messages == tuple(messages)
    assert (example.completion, example.reference, example.tools) == (None, None, None)


@pytest.mark.parametrize(
    ("row", "field", "message"),
    [
        ({}, "messages", "neither messages nor text, only none"),
        ({"message": []}, "messages", "did you mean 'message'"),
        ({"messages": []}, "messages", "messages is empty"),
        ({"messages": "hi"}, "messages", "text, not a list"),
        ({"messages": [None]}, "messages[0]", "a turn is null"),
        ({"messages": [USER, {"role": "bot", "content": "x"}]}, "messages[1].role", "'bot', not one of system"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "None, not one of"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "null, not a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content",
            "a list, not a string",
        ),
        ({"messages": [USER, ANSWER], "tools": "[]"}, "tools", "not a list of objects"),
        ({"messages": [USER, ANSWER], "tools": [None]}, "tools", "not a list of objects"),
        ({"text": " "}, "text", "text is empty"),
        ({"text": 3}, "text", "text is a number"),
    ],
)
def test_refused_rows_name_the_field(row, field, message):
    with pytest.raises(DataError, match=message) as caught:
        RECIPE.to_example(row)
    assert caught.value.field == field
    assert caught.value.help
