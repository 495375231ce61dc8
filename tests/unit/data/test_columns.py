"""`data.columns` and `data.roles`: rows under other names become the same examples as rows under SureFit's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.rows_config import rows_config

from surefit.core.errors import DataError
from surefit.data.read.load import Rows, load_rows
from surefit.data.rows.columns import recipe_for
from surefit.data.rows.layouts import to_examples, to_prompts
from surefit.data.rows.other_layouts import propose_columns
from surefit.data.rows.unread_fields import find_read_columns
from surefit.recipes import get_recipe
from surefit.task import Example


def rows_of(path: Path, *rows: dict[str, Any]) -> Rows:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_rows(str(path))


def convert(
    rows: Rows, columns: dict[str, str], roles: dict[str, str] | None = None, recipe: str = "chat"
) -> list[Example]:
    config = rows_config(columns=columns, roles=roles)
    return to_examples(rows, recipe_for(get_recipe(recipe), config)).examples


@pytest.mark.parametrize(
    ("usual", "other", "columns", "roles"),
    [
        ({"prompt": "a", "completion": "b"}, {"question": "a", "answer": "b"},
         {"prompt": "question", "completion": "answer"}, {}),
        ({"prompt": "a", "completion": "b"}, {"completion": "a", "prompt": "b"},
         {"prompt": "completion", "completion": "prompt"}, {}),
        ({"instruction": "a", "input": "c", "output": "b", "system": "s"},
         {"task": "a", "context": "ignored", "ctx": "c", "reply": "b", "sys": "s"},
         {"instruction": "task", "input": "ctx", "output": "reply", "system": "sys"}, {}),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
         {"chat": [{"who": "customer", "says": "a"}, {"who": "agent", "says": "b"}]},
         {"messages": "chat", "role": "who", "content": "says"}, {"user": "customer", "assistant": "agent"}),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
         {"messages": [{"role": "me", "content": "a"}, {"role": "it", "content": "b"}]},
         {}, {"user": "me", "assistant": "it"}),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
         {"dialog": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, {"conversations": "dialog"}, {}),
    ],
)  # fmt: skip
def test_renamed_rows_are_the_same_examples(tmp_path, usual, other, columns, roles):
    (expected,) = convert(rows_of(tmp_path / "usual.jsonl", usual), {})
    (example,) = convert(rows_of(tmp_path / "other.jsonl", other), columns, roles)
    assert example == expected


def test_a_recipe_with_columns_of_its_own(tmp_path):
    row = {"problem": "1 + 1?", "worked": "It is 2.\n#### 2"}
    columns = {"question": "problem", "answer": "worked"}
    (example,) = convert(rows_of(tmp_path / "rows.jsonl", row), columns, recipe="math_reasoning")
    assert example.has_answer
    assert "1 + 1?" in example.prompt[-1]["content"]


def test_columns_that_were_read_have_the_names_in_the_rows(tmp_path):
    rows = rows_of(tmp_path / "rows.jsonl", {"question": "a", "answer": "b", "note": "c"})
    config = rows_config(columns={"prompt": "question", "completion": "answer"}, roles={})
    read = find_read_columns(rows, recipe_for(get_recipe("chat"), config), "auto")
    assert {"question", "answer"} <= read
    assert not {"prompt", "completion", "note"} & read


def test_another_source_in_a_layout_of_its_own_is_read_as_it_is(tmp_path):
    rows = rows_of(tmp_path / "mix.jsonl", {"prompt": "a", "completion": "b"})
    (example,) = convert(rows, {"messages": "dialog"})
    assert example.completion == "b" or example.messages[-1]["content"] == "b"


def test_prompts_need_no_answer_column(tmp_path):
    rows = rows_of(tmp_path / "rows.jsonl", {"question": "a"})
    config = rows_config(columns={"prompt": "question", "completion": "answer"}, roles={})
    (example,) = to_prompts(rows, recipe_for(get_recipe("chat"), config)).examples
    assert example.prompt == ({"role": "user", "content": "a"},)


@pytest.mark.parametrize(
    ("row", "columns", "field", "words"),
    [
        ({"question": "a", "answer": "b"}, {"prompt": "question", "completion": "anser"}, "data.columns.completion",
         "answer"),
        ({"question": "a", "answer": "b"}, {"question": "prompt", "answer": "completion"}, "data.columns.question",
         "{prompt: question}"),
        ({"question": "a", "answer": "b"}, {"prompt": "question", "completon": "answer"}, "data.columns.completon",
         "completion"),
        ({"question": "a", "answer": ""}, {"prompt": "question", "completion": "answer"}, "answer", ""),
        ({"question": "a", "answer": None}, {"prompt": "question", "completion": "answer"}, "answer", ""),
    ],
)  # fmt: skip
def test_errors_name_the_columns_of_the_rows(tmp_path, row, columns, field, words):
    with pytest.raises(DataError) as raised:
        convert(rows_of(tmp_path / "rows.jsonl", row, {"question": "c", "answer": "d"}), columns)
    error = raised.value
    assert error.field == field
    assert words in f"{error.message} {error.help}"


def test_a_named_column_that_the_layout_does_not_read_is_an_error(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"messages": messages, "question": "c", "answer": "d"}
    with pytest.raises(DataError) as raised:
        convert(rows_of(tmp_path / "rows.jsonl", row), {"prompt": "question", "completion": "answer"})
    assert raised.value.field == "data.columns.prompt"


def test_a_usual_message_is_left_as_it_is(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (example,) = convert(rows_of(tmp_path / "rows.jsonl", {"messages": messages}), {"content": "text"})
    assert example.messages[-1]["content"] == "b"


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        (["input", "output", "context"], {"instruction": "input", "input": "context"}),
        (["question", "answer", "context"], {"instruction": "question", "output": "answer", "input": "context"}),
        (["question", "Our reply"], {"prompt": "question", "completion": "Our reply"}),
        (["Ticket text", "completion"], {"prompt": "Ticket text"}),
        (["question", "Our reply", "Their reply"], {}),
        (["answer", "question and answer"], {}),
    ],
)
def test_no_column_of_a_known_name_is_lost(columns, names):
    assert propose_columns(columns) == names


def test_context_reaches_the_prompt_where_input_is_the_question(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "Who?", "output": "Bo.", "context": "Bo did it."}\n', encoding="utf-8")
    rows = load_rows(str(path))
    section = rows_config(columns=propose_columns(rows.columns), roles={})
    (example,) = to_examples(rows, recipe_for(get_recipe("chat"), section))
    assert "Who?" in example.messages[0]["content"]
    assert "Bo did it." in example.messages[0]["content"]
