"""Real rows, where the checkout has them beside it: xLAM's shape, Glaive's conversations and the odd ones."""

from __future__ import annotations

import json

import pytest
from tests.helpers.tokens import tokenize_example

from surefit import recipes
from surefit.core.errors import DataError
from surefit.data.read.load import load_rows
from surefit.data.rows.layouts import to_examples
from surefit.data.tokens.dataset import build_dataset
from surefit.data.tokens.tokenize import tokenize_prompt

CALLING, SFT = recipes.get_recipe("function_calling"), recipes.get_recipe("chat")


@pytest.mark.parametrize(
    ("name", "count"), [("xlam_shape_from_bfcl.jsonl", 872), ("xlam_60k_two_quoted_rows.jsonl", 2)]
)
def test_xlam_rows(shared, tokenizer, tmp_path, name, count):
    rows = load_rows(str(shared(f"function_calling/xlam/{name}")))
    examples = to_examples(rows, CALLING)
    assert len(examples) == count
    dataset = build_dataset(examples, tokenizer, max_length=20_000, cache=tmp_path)
    assert len(dataset) == count
    for index in range(0, count, 50):
        ids, labels = dataset[index]
        prompt = tokenize_prompt(examples[index], tokenizer)
        assert ids[: len(prompt)].tolist() == prompt
        learnt = tokenizer.decode(labels[labels != -100])
        answers = json.loads(rows[index]["answers"])
        assert json.loads(learnt.removesuffix("<|end|>")) == answers


def test_glaive_conversations(shared, tokenizer):
    rows = load_rows(str(shared("function_calling/glaive/glaive_toolcall_en_demo.jsonl")))
    examples = to_examples(rows, SFT)
    assert len(examples) == len(rows) == 188
    assert sum(example.tools is None for example in examples) == sum(row["tools"] == "[]" for row in rows)
    called = next(example for example in examples if any("tool_calls" in message for message in example.messages))
    assert isinstance(tokenize_example(called, tokenizer).input_ids, list)


def test_parts_that_are_not_text_are_named(shared):
    path = shared("function_calling/glaive/reason_tool_use_demo_50.jsonl")
    with pytest.raises(DataError, match="rows cannot be used") as caught:
        to_examples(load_rows(str(path)), SFT)
    assert caught.value.also[0].line == 2  # the first has text and reasoning alone
    assert caught.value.also[0].field == "messages[2].content[1]"
    assert caught.value.also[0].help == "write calls in tool_calls of the message"


def test_nasty_rows(shared, write, tokenizer):
    nasties = [json.loads(line) for line in shared("function_calling/nasties.jsonl").read_text().splitlines()]
    by_source = {nasty["source"]: nasty["raw"] for nasty in nasties}
    nine = json.loads(by_source["BFCL live_irrelevance_292-72-1"])["question"][0]
    (example,) = to_examples(load_rows(str(write("n.jsonl", [{"messages": nine}]))), SFT)
    assert [message["role"] for message in example.messages][:9] == ["user"] * 9
    assert example.messages[-1]["role"] == "assistant"
    assert tokenize_prompt(example, tokenizer)
    (glaive,) = to_examples(load_rows(str(write("g.jsonl", by_source["glaive demo"]))), SFT)
    assert glaive.tools is None
    cut = write("p.json", by_source["BFCL_v4_format_sensitivity.json"])
    with pytest.raises(DataError, match="unterminated string") as caught:
        load_rows(str(cut))
    assert (caught.value.path, caught.value.line) == (str(cut), 2)


def test_leaderboard_files_are_json_lines_named_json(shared):
    rows = load_rows(str(shared("function_calling/bfcl/BFCL_v4_simple_python.json")))
    assert rows.where(1).endswith("BFCL_v4_simple_python.json:2")
    assert all("question" in row for row in rows)
