"""Every layout becomes the same messages; every unusable row is named with file, line and field."""

from __future__ import annotations

import csv
import io
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from surefit import recipes
from surefit.config.schema import DataSection
from surefit.core.errors import DataError
from surefit.data.read.load import load_rows
from surefit.data.rows.layouts import LAYOUTS, detect_format, read_splits, to_examples, to_prompts

SFT, CALLING = recipes.get_recipe("chat"), recipes.get_recipe("function_calling")
USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {
    "name": "add",
    "description": "Adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
WRAPPED = {"type": "function", "function": TOOL}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.fixture
def examples(write):
    """examples(row, …) → what `to_examples` makes of a JSON Lines file with these rows."""

    def make(*rows, recipe=SFT, **options):
        return to_examples(load_rows(str(write("rows.jsonl", list(rows)))), recipe, **options)

    return make


GOOD = [
    ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
    ({"messages": json.dumps([USER, ANSWER])}, [USER, ANSWER]),
    ({"messages": [SYSTEM, USER, ANSWER, USER]}, [SYSTEM, USER, ANSWER]),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "2+"}, "2?"]}, ANSWER]}, [USER, ANSWER]),
    ({"messages": [{**USER, "name": None, "id": "u1"}, ANSWER]}, [{**USER, "id": "u1"}, ANSWER]),
    ({"prompt": "2+2?", "completion": "4"}, [USER, ANSWER]),
    ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, [SYSTEM, USER, ANSWER]),
    ({"prompt": [USER], "completion": "4"}, [USER, ANSWER]),
    ({"instruction": "2+2?", "input": "", "output": "4"}, [USER, ANSWER]),
    ({"instruction": "2+2?", "output": "4", "system": "Be brief."}, [SYSTEM, USER, ANSWER]),
    ({"instruction": "Add", "input": "2, 2", "output": "4"}, [{"role": "user", "content": "Add\n\n2, 2"}, ANSWER]),
    ({"instruction": "2+2?", "output": "4", "history": [["2+2?", "4"]]}, [USER, ANSWER, USER, ANSWER]),
    ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}, [USER, ANSWER]),
    (
        {
            "conversations": [{"from": "user", "value": "2+2?"}, {"from": "assistant", "value": "4"}],
            "system": "Be brief.",
        },
        [SYSTEM, USER, ANSWER],
    ),
]


@pytest.mark.parametrize(("row", "messages"), GOOD)
def test_layouts(examples, row, messages):
    (example,) = examples(row)
    assert list(example.messages) == messages
    assert example.completion == example.reference == "4"
    assert example.tools is None


def test_text(examples):
    (example,) = examples({"text": " once upon \n"})
    assert (example.text, example.messages) == (" once upon \n", ())


@pytest.mark.parametrize("tools", [[TOOL], [WRAPPED], json.dumps([TOOL]), [json.dumps(TOOL)]])
@pytest.mark.parametrize("arguments", [{"a": 2, "b": 2}, '{"a": 2, "b": 2}'])
def test_tools_and_calls_however_they_are_written(examples, tools, arguments):
    openai = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    bare = {"name": "add", "arguments": arguments}
    result = {"role": "tool", "content": "4", "tool_call_id": "c1"}
    rows = [
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [openai]}, result, ANSWER]},
        {"messages": [USER, {"role": "assistant", "tool_calls": [bare]}, result, ANSWER]},
    ]
    first, second = examples(*({**row, "tools": tools} for row in rows))
    assert first.tools == second.tools == (WRAPPED,)
    assert first.messages == (USER, {**CALLED, "tool_calls": [{"id": "c1", **CALL}]}, result, ANSWER)
    assert second.messages == (USER, CALLED, result, ANSWER)


@pytest.mark.parametrize("value", ['{"name": "add", "arguments": {"a": 2, "b": 2}}', json.dumps([CALL["function"]])])
def test_sharegpt_function_calls(examples, value):
    turns = [("human", "2+2?"), ("function_call", value), ("observation", "4"), ("gpt", "4")]
    conversation = [{"from": speaker, "value": text} for speaker, text in turns]
    (example,) = examples({"conversations": conversation, "tools": json.dumps([TOOL])})
    assert example.messages == (USER, CALLED, {"role": "tool", "content": "4"}, ANSWER)
    assert example.tools == (WRAPPED,)


@pytest.mark.parametrize("tools", [None, [], "[]", ""])
def test_no_tools_is_none(examples, tools):
    (example,) = examples({"messages": [USER, ANSWER], "tools": tools})
    assert example.tools is None


def test_answers_inside_a_prompt_are_not_trained_on(examples):
    (example,) = examples({"prompt": [USER, ANSWER, USER], "completion": "4"})
    assert [message.get("weight") for message in example.messages] == [None, 0, None, None]


BAD = [
    ({"messages": [USER]}, "messages", "no message has the role assistant"),
    ({"messages": [USER, {**ANSWER, "weight": 0}]}, "messages", "every assistant message has weight 0"),
    ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "messages[1].weight", "weight must be 0 or 1, not 0.5"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": None}, "messages", "missing"),
    ({"messages": {"role": "user"}}, "messages", "expected a list, got an object"),
    ({"messages": "[{"}, "messages", "not valid JSON"),
    ({"messages": ["hi", ANSWER]}, "messages[0]", "not text"),
    ({"messages": [ANSWER, USER, ANSWER]}, "messages[0].role", "starts with the assistant"),
    ({"messages": [{"content": "x"}, ANSWER]}, "messages[0].role", "no role"),
    ({"messages": [USER, {"role": "asistant", "content": "4"}]}, "messages[1].role", "did you mean 'assistant'"),
    ({"messages": [USER, {"role": 7, "content": "4"}]}, "messages[1].role", "unknown role 7"),
    ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "messages[1].content", "is empty"),
    ({"messages": [USER, {"role": "assistant"}]}, "messages[1].content", "no content"),
    ({"messages": [{"role": "user", "content": None}, ANSWER]}, "messages[0].content", "no content"),
    ({"messages": [{"role": "user", "content": 4}, ANSWER]}, "messages[0].content", "expected text, got a number"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]},
        "messages[0].content[0]",
        "parts of type 'image' are not supported",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ANSWER]},
        "messages[0].content[0]",
        "parts of type 'image_url' are not supported",
    ),
    ({"messages": [USER, ANSWER], "images": ["cat.png"]}, "images", "the row has images, but only text is trained on"),
    ({"prompt": "<image> 2+2?", "completion": "4", "image": "x.png"}, "image", "the row has image"),
    ({"messages": [{**USER, "tool_calls": [CALL]}, ANSWER]}, "messages[0].tool_calls", "cannot call tools"),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[1].tool_calls[0].function.arguments",
        "not valid JSON",
    ),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}]},
        "messages[1].tool_calls[0].arguments",
        "must be an object, not a list",
    ),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"arguments": {}}]}]},
        "messages[1].tool_calls[0].name",
        "no name",
    ),
    ({"messages": [USER, ANSWER], "tools": "[{]"}, "tools", "not valid JSON"),
    ({"messages": [USER, ANSWER], "tools": '[{"name": NaN}]'}, "tools", "not valid JSON"),
    ({"messages": [USER, ANSWER], "tools": TOOL}, "tools", "expected a list, got an object"),
    ({"messages": [USER, ANSWER], "tools": [1]}, "tools[0]", "must be an object, not a number"),
    ({"messages": [USER, ANSWER], "tools": [{"function": {}}]}, "tools[0].function.name", "no name"),
    ({"messages": [USER, ANSWER], "tools": [TOOL, {"parameters": {}}]}, "tools[1].name", "no name"),
    ({"prompt": "", "completion": "4"}, "prompt", "empty"),
    ({"prompt": "2+2?", "completion": " "}, "completion", "empty"),
    ({"prompt": "2+2?", "completion": None}, "completion", "missing"),
    ({"prompt": "2+2?", "completion": 4}, "completion", "expected a list, got a number"),
    ({"prompt": [USER], "completion": [USER]}, "completion", "must have the role assistant"),
    ({"instruction": "2+2?", "input": "", "output": ""}, "output", "empty"),
    ({"instruction": "", "input": " ", "output": "4"}, "instruction", "empty"),
    ({"instruction": "x", "input": 3, "output": "4"}, "input", "expected text, got a number"),
    ({"instruction": "x", "output": "4", "history": [["only"]]}, "history[0]", "a question and an answer"),
    ({"input_ids": []}, "input_ids", "no tokens"),
    ({"input_ids": "5 6"}, "input_ids", "not valid JSON"),
    ({"input_ids": [5, 1.5]}, "input_ids[1]", "expected an integer, not a number"),
    ({"input_ids": [5, True]}, "input_ids[1]", "expected an integer"),
    ({"input_ids": [5, -1]}, "input_ids[1]", "token ids start at 0, got -1"),
    ({"input_ids": [5, 6], "labels": [5]}, "labels", "1 values for 2 input_ids"),
    ({"input_ids": [5, 6, 7], "labels": [6, 7, -100]}, "labels[0]", "must be the token itself or -100, not 6 where"),
    ({"input_ids": [5, 6], "completion_mask": [0, 2]}, "completion_mask[1]", "expected 0 or 1, not 2"),
    ({"input_ids": [5, 6], "loss_mask": [1]}, "loss_mask", "1 values for 2 input_ids"),
    ({"input_ids": [5, 6], "attention_mask": [0, 0]}, "attention_mask", "no tokens"),
    (
        {"input_ids": [5, 6], "completion_mask": [0, 1], "assistant_masks": [1]},
        "assistant_masks",
        "1 values for 2 input_ids",
    ),
    ({"text": "\n"}, "text", "empty"),
    ({"text": ["a"]}, "text", "expected text, got a list"),
    ({"conversations": [{"from": "humn", "value": "x"}]}, "conversations[0].from", "did you mean 'human'"),
    ({"conversations": [{"role": "user", "content": "x"}]}, "conversations[0].from", "no from"),
    ({"conversations": [{"from": "human"}]}, "conversations[0].value", "missing"),
    (
        {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "add(1)"}]},
        "conversations[1].value",
        "not valid JSON",
    ),
]


@pytest.mark.parametrize(("row", "field", "message"), BAD)
def test_unusable_rows(examples, write, row, field, message):
    good = {"messages": [USER, ANSWER]}
    for name, layout in LAYOUTS.items():
        if set(layout.columns) <= set(row):
            good = {**dict(GOOD_BY_LAYOUT[name])}
    with pytest.raises(DataError) as caught:
        examples(good, row)
    error = caught.value
    assert (error.path, error.line, error.field) == (str(write("rows.jsonl", [good, row])), 2, field)
    assert message in error.message
    assert "data.bad_rows: skip" in error.help


GOOD_BY_LAYOUT = {
    "messages": {"messages": [USER, ANSWER]},
    "sharegpt": {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
    "prompt_completion": {"prompt": "a", "completion": "b"},
    "alpaca": {"instruction": "a", "output": "b"},
    "tokens": {"input_ids": [1, 2]},
    "text": {"text": "a"},
}


@pytest.mark.parametrize(
    ("row", "ids", "learnt"),
    [
        ({"input_ids": [5, 6, 7]}, (5, 6, 7), (True, True, True)),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}, (5, 6, 7), (False, True, False)),
        ({"input_ids": [5, 6], "assistant_masks": [0, True], "other": "rest"}, (5, 6), (False, True)),
        ({"input_ids": [5, 6], "completion_mask": [0, 1], "assistant_masks": [1, 0]}, (5, 6), (False, False)),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "loss_mask": [1, 0, 1]}, (5, 6, 7), (False, False, True)),
        ({"input_ids": "[0, 5, 6]", "attention_mask": [0, 1, 1], "labels": [-100, 5, 6]}, (5, 6), (True, True)),
    ],
)  # fmt: skip
def test_rows_of_tokens(examples, row, ids, learnt):
    (found,) = examples(row)
    assert found.tokens == (ids, learnt)
    assert found.text == " ".join(map(str, ids))


def test_all_bad_rows_are_reported_at_once(examples):
    rows = [{"prompt": "a", "completion": "b" if i % 2 else ""} for i in range(16)]
    with pytest.raises(DataError) as caught:
        examples(*rows)
    error = caught.value
    assert error.message.startswith("8 of 16 rows cannot be used")
    assert [(other.line, other.field) for other in error.also] == [(n, "completion") for n in (1, 3, 5, 7, 9)]
    assert "data.bad_rows: skip" in error.help


def test_skipping_bad_rows(examples, write):
    path = str(write("rows.jsonl", []))
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    found = examples(*rows, bad_rows="skip")
    assert [example.completion for example in found] == ["b", "d"]
    assert found.where == [f"{path}:1", f"{path}:3"]
    assert found.skipped == [f"{path}:2: prompt: empty"]


def test_skipping_every_row_is_an_error(examples):
    with pytest.raises(DataError, match="2 of 2 rows"):
        examples({"prompt": "", "completion": ""}, {"prompt": "", "completion": ""}, bad_rows="skip")


def test_the_format_is_found_by_the_columns():
    for name, layout in LAYOUTS.items():
        beside = ["input_ids"] if name in ("text", "tokens") else ["text", "input_ids"]
        assert detect_format([*layout.columns, "id", *beside], SFT) == name
    assert detect_format(["tools", "query", "answers", "id"], CALLING) == "recipe"
    with pytest.raises(DataError, match="no format has the columns question, answer") as caught:
        detect_format(["question", "answer"], SFT)
    assert "prompt_completion: prompt, completion" in caught.value.help


def test_misspelt_columns_are_not_read_as_missing_answers(examples):
    row = {"query": "x", "tools": "[]", "answer": "[]"}
    with pytest.raises(DataError, match=r"needs the column 'answers'.*did you mean 'answer'") as caught:
        examples(row, recipe=CALLING)
    assert caught.value.field == "answers"


@pytest.mark.parametrize(
    ("recipe", "fmt", "message"),
    [
        (SFT, "recipe", "does not define columns"),
        (CALLING, "messages", "reads its own columns"),
        (SFT, "alpaca", "needs the columns 'instruction' and 'output'"),
    ],
)
def test_formats_that_do_not_go_with_the_recipe(examples, recipe, fmt, message):
    with pytest.raises(DataError, match=message):
        examples({"messages": [USER, ANSWER]}, recipe=recipe, fmt=fmt)


def test_an_explicit_format_wins_over_the_columns(examples):
    (example,) = examples({"messages": [USER, ANSWER], "text": "plain"}, fmt="text")
    assert example.text == "plain"


def test_csv_and_parquet_give_what_json_lines_give(examples, write, tmp_path):
    row = {"messages": [SYSTEM, USER, CALLED, {"role": "tool", "content": "4"}, ANSWER], "tools": [WRAPPED]}
    (expected,) = examples(row)
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerows([list(row), [json.dumps(value) for value in row.values()]])
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    for path in (write("a.csv", table.getvalue()), tmp_path / "a.parquet"):
        (example,) = to_examples(load_rows(str(path)), SFT)
        assert example == expected


def test_prompts_need_no_gold(write):
    rows = [
        {"messages": [USER]},
        {"messages": [USER, ANSWER]},
        {"prompt": "2+2?"},
        {"instruction": "2+2?"},
        {"conversations": [{"from": "human", "value": "2+2?"}]},
    ]
    found = to_prompts(load_rows(str(write("rows.jsonl", rows))), SFT)
    assert [list(example.prompt) for example in found] == [[USER]] * 5
    with pytest.raises(DataError, match="no prompt among the columns x"):
        to_prompts(load_rows(str(write("bad.jsonl", [{"x": 1}]))), SFT)
    (calling,) = to_prompts(load_rows(str(write("q.jsonl", [{"query": "x", "tools": []}]))), CALLING)
    assert calling.prompt[-1]["content"] == "x"


def test_splits_of_a_config(write):
    train = write("train.jsonl", [{"prompt": str(i), "completion": "x"} for i in range(50)])
    held = write("eval.jsonl", [{"prompt": "a", "completion": "x"}])
    first, second = read_splits(DataSection(train=str(train), eval=0.2), SFT, seed=0)
    assert len(first) + len(second) == 50
    assert 3 <= len(second) <= 20
    first, second = read_splits(DataSection(train=str(train), eval=str(held)), SFT, seed=0)
    assert (len(first), len(second)) == (50, 1)
    with pytest.raises(DataError, match="the same rows as"):
        read_splits(DataSection(train=str(train), eval=str(train)), SFT, seed=0)


def test_a_limit_takes_rows_evenly_and_holds_out_a_share_of_them(write):
    train = write("train.jsonl", [{"prompt": str(i), "completion": "x"} for i in range(100)])
    first, second = read_splits(DataSection(train=str(train), eval=0.2, limit=50), SFT, seed=0)
    asked = sorted(int(example.prompt[-1]["content"]) for example in (*first, *second))
    assert asked == list(range(0, 100, 2))
    assert 3 <= len(second) <= 20
    whole, _ = read_splits(DataSection(train=str(train), eval=0.2, limit=1000), SFT, seed=0)
    assert len(whole) > 50
