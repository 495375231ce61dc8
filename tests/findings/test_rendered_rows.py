"""Findings D3 to D9, D12 and D15 of 2026-11-25: what the loss sees is what the row says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from surefit import nano
from surefit.core.errors import DataError
from surefit.data.rows.layouts import row_converter
from surefit.data.rows.messages import parse_conversation, parse_tool_calls
from surefit.recipes import get_recipe
from surefit.stages.checking import run_check
from surefit.stages.run_context import load_run_context

SFT = get_recipe("chat")
HEAD = "{% for m in messages %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CHATML = HEAD + TURN + TAIL
TRIMS = CHATML.replace("m.content", "m.content | trim")
DROPS = HEAD + "{% if m.role in ['user', 'assistant'] %}" + TURN + "{% endif %}" + TAIL
REFUSES = CHATML.replace(
    "<|im_start|>{{", "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}<|im_start|>{{", 1
)
LAST = CHATML.replace("m.content", "(m.content.split('</think>') | last)")
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
ASK = {"role": "user", "content": "What is 1+1?"}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"city": "Hue"}}}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}


def model(folder: Path, template: str) -> Path:
    """surefit/nano with ChatML's tokens and another template."""
    for file in nano.PATH.iterdir():
        if file.suffix in (".json", ".safetensors"):
            (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = Tokenizer.from_file(str(nano.PATH / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [ASK, {"role": "assistant", "content": text, **more}]}


def system(text: str = "Be terse.") -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": text}, ASK, {"role": "assistant", "content": "2"}]}


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """check(template, rows, data) → the findings about rows and templates, 40 rows made of these."""

    def run(template: str, *rows: dict[str, Any], data: str = "") -> list[dict[str, Any]]:
        (tmp_path / "model").mkdir()
        model(tmp_path / "model", template)
        made = [rows[n % len(rows)] for n in range(40)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
        (tmp_path / "run.yaml").write_text(
            f"model: {{name_or_path: model}}\ndata: {{train: rows.jsonl, eval: 0.3{data}}}\noutput_dir: out\n"
        )
        monkeypatch.chdir(tmp_path)
        found = run_check(load_run_context(tmp_path / "run.yaml", None))["findings"]
        # TPL006: the weights have no embeddings for ChatML's tokens, which no finding here is about.
        return [one for one in found if one["code"].startswith(("AUD04", "TPL", "DAT001")) and one["code"] != "TPL006"]

    return run


THOUGHT = "<think>a</think> b"
CASES = [
    pytest.param(CHATML, [answer("2")], set(), id="sound"),
    pytest.param(DROPS, [system()], {"AUD040"}, id="D7-system"),
    pytest.param(DROPS, [system("2")], {"AUD040"}, id="D7-system-that-the-answer-repeats"),
    pytest.param(CHATML, [answer("", tool_calls=[CALL])], {"AUD040"}, id="D7-call"),
    pytest.param(CHATML, [answer("2") | {"tools": [TOOL]}], {"TPL005"}, id="D7-tools"),
    pytest.param(TOOLS, [answer("2") | {"tools": [TOOL]}], set(), id="tools-written"),
    pytest.param(TRIMS, [answer("    y = x\n    return y\n")], {"AUD041"}, id="D7-indentation"),
    pytest.param(CHATML, [answer("    y = x\n    return y\n")], set(), id="indentation-kept"),
    pytest.param(LAST, [answer("Sure! " + THOUGHT)], {"AUD041", "TPL009"}, id="D7-before-a-thought"),
    pytest.param(CHATML, [answer("Sure! " + THOUGHT)], set(), id="thoughts-kept"),
    pytest.param(CHATML, [answer("2", reasoning_content="one and one")], {"TPL009"}, id="D7-reasoning"),
    pytest.param(CHATML, [answer("<think>\nHmm, and then")], {"AUD042"}, id="D8"),
    pytest.param(CHATML, [answer("[THINK]Hmm, and then")], {"AUD042"}, id="D8-mistral"),
    pytest.param(CHATML, [answer("2<|im_end|>")], {"AUD043"}, id="D5-end"),
    pytest.param(CHATML, [answer("2<|im_end|>\n")], {"AUD043"}, id="D5-end-and-newline"),
    pytest.param(
        CHATML,
        [{"prompt": "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", "completion": "2"}],
        {"AUD043"},
        id="D5-template-in-a-turn",
    ),
    pytest.param(CHATML, [answer("A turn ends with <|im_end|>, you see.")], {"AUD044"}, id="D5-mention"),
    pytest.param(
        CHATML, [{"text": "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n2"}], {"AUD045"}, id="D5-text"
    ),
    pytest.param(CHATML, [{"text": "### Instruction:\nq\n\n### Response:\n2"}], {"AUD045"}, id="D5-alpaca-text"),
    pytest.param(CHATML, [{"text": "Once upon a time."}], set(), id="plain-text"),
    pytest.param(CHATML, [answer("2") | {"context": "c"}], {"AUD047"}, id="D9-context"),
    pytest.param(CHATML, [answer("2") | {"chat_template_kwargs": {"x": 1}}], {"AUD047"}, id="D9-kwargs"),
    pytest.param(CHATML, [answer("2") | {"rejected": "3"}], {"AUD047"}, id="D9-rejected"),
    pytest.param(CHATML, [answer("2") | {"source": "forum"}], {"AUD046"}, id="D9-source"),
    pytest.param(CHATML, [answer("2", mood="glad")], {"AUD046"}, id="D9-key"),
    pytest.param(CHATML, [answer("2") | {"system": "Be terse."}], set(), id="D9-system-read"),
]


@pytest.mark.parametrize(("template", "rows", "codes"), CASES)
def test_what_check_finds(check, template: str, rows: list[dict[str, Any]], codes: set[str]) -> None:
    found = check(template, *rows)
    assert {one["code"] for one in found} == codes
    assert all("40 of 40" in one["message"] for one in found if one["code"] not in ("AUD046", "AUD047"))


def test_d3_refused_rows_are_counted_with_their_lines(check) -> None:
    found = check(REFUSES, system(), answer("2"), answer("3"), answer("4"))
    assert {one["code"] for one in found} == {"DAT001"}
    assert "10 of 40" in found[0]["message"]
    assert [one["line"] for one in found[1:]] == [1, 5, 9, 13, 17]
    assert {one["error"] for one in found[1:]} == {"E4136"}


def test_d3_skip_leaves_them_out(check) -> None:
    found = check(REFUSES, system(), answer("2"), answer("3"), answer("4"), data=", bad_rows: skip")
    assert [(one["code"], one["field"]) for one in found] == [("AUD048", "data.bad_rows")]
    assert "10 of 40" in found[0]["message"]


@pytest.mark.parametrize("mark", ["weight", "loss", "train", "training", "trainable", "loss_weight"])
@pytest.mark.parametrize("value", [False, 0, 0.0])
@pytest.mark.parametrize("layout", ["messages", "conversations"])
def test_d4_marks(mark: str, value: Any, layout: str) -> None:
    turns = [ASK, {"role": "assistant", "content": "bad", mark: value}, ASK, {"role": "assistant", "content": "2"}]
    if layout == "conversations":
        names = {"user": "human", "assistant": "gpt"}
        turns = [{"from": names[t.pop("role")], "value": t.pop("content"), **t} for t in map(dict, turns)]
    example = row_converter([layout], "x", SFT, "auto")({layout: turns})
    assert [turn.get("weight") for turn in example.messages] == [None, 0, None, None]
    assert mark == "weight" or mark not in example.messages[1]


@pytest.mark.parametrize(
    ("row", "field"),
    [
        pytest.param({"prompt": "q", "completion": "a", "label": False}, "label", id="D4-kto"),
        pytest.param(
            {"messages": [ASK, {"role": "assistant", "content": "a", "loss": 0.5}]}, "messages[1].loss", id="D4"
        ),
        pytest.param(
            {"messages": [ASK | {"train": True}, answer("2")["messages"][1]]}, "messages[0].train", id="D4-user"
        ),
        pytest.param(answer("a", train_detail=[{"begin": 0}]), "messages[1].train_detail", id="D4-detail"),
    ],
)
def test_d4_marks_that_are_not_honored(row: dict[str, Any], field: str) -> None:
    with pytest.raises(DataError) as caught:
        row_converter(list(row), "x", SFT, "auto")(row)
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["arguments", "parameters", "input", "args"])
@pytest.mark.parametrize("value", [{"city": "Hue"}, '{"city": "Hue"}'])
def test_d6_arguments(name: str, value: Any) -> None:
    for call in ({"name": "look", name: value}, {"function": {"name": "look", name: value}}):
        assert parse_tool_calls([call], "x")[0]["function"] == {"name": "look", "arguments": {"city": "Hue"}}


@pytest.mark.parametrize("value", ["", None, {}])
def test_d15_calls_without_arguments(value: Any) -> None:
    assert parse_tool_calls([{"name": "look", "arguments": value}], "x")[0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("call", "code"),
    [
        pytest.param({"name": "look", "kwargs": {"city": "Hue"}}, "E4324", id="D6-unknown-name"),
        pytest.param({"name": "look", "arguments": {"a": 1}, "input": {"b": 2}}, "E4323", id="D6-two"),
        pytest.param({"name": "look", "parameters": {"type": "object", "properties": {}}}, "E4325", id="D6-schema"),
    ],
)
def test_d6_arguments_that_are_unclear(call: dict[str, Any], code: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_tool_calls([call], "x")
    assert caught.value.code == code


@pytest.mark.parametrize("content", [None, "Let me look."])
def test_d12_function_call(content: str | None) -> None:
    call = {"name": "look", "arguments": '{"city": "Hue"}'}
    turns = [ASK, {"role": "assistant", "content": content, "function_call": call}]
    turns += [{"role": "function", "name": "look", "content": "21"}, {"role": "assistant", "content": "21."}]
    row = {"messages": turns, "functions": [TOOL["function"]]}
    example = row_converter(list(row), "x", SFT, "auto")(row)
    assert [turn["role"] for turn in example.messages] == ["user", "assistant", "tool", "assistant"]
    assert example.messages[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"city": "Hue"}}
    assert example.messages[1]["content"] == (content or "")
    assert example.tools is not None
    assert example.tools[0]["function"]["name"] == "look"


@pytest.mark.parametrize("column", ["system", "system_prompt", "system_message"])
@pytest.mark.parametrize(
    "row", [answer("2"), {"prompt": "q", "completion": "a"}, {"instruction": "q", "output": "a"}], ids=str
)
def test_d9_system_columns(column: str, row: dict[str, Any]) -> None:
    example = row_converter([*row, column], "x", SFT, "auto")(row | {column: "Be a pirate."})
    assert example.messages[0] == {"role": "system", "content": "Be a pirate."}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        pytest.param(["instruction", "context", "response"], "{output: response, input: context}", id="D15-dolly"),
        pytest.param(["query", "response", "history"], "{instruction: query, output: response}", id="PR5-swift"),
        pytest.param(["question", "answer"], "{prompt: question, completion: answer}", id="D15-qa"),
        pytest.param(["prompt", "response"], "{completion: response}", id="D15-response"),
        pytest.param(["input", "output"], "{prompt: input, completion: output}", id="D15-io"),
        pytest.param(["Instruction", "Output"], "{instruction: Instruction, output: Output}", id="D15-case"),
        pytest.param(["prompt", "chosen", "rejected"], "objective: dpo", id="PR3-dpo"),
        pytest.param(["chosen", "rejected"], "objective: dpo", id="PR3-turns"),
        pytest.param(["input", "preferred_output", "non_preferred_output"], "write input.messages", id="PR3-openai"),
        pytest.param(["data"], ".data[]", id="D15-wrapped"),
    ],
)
def test_d15_the_nearest_layout_is_named(columns: list[str], words: str) -> None:
    with pytest.raises(DataError) as caught:
        row_converter(columns, "x", SFT, "auto")
    assert caught.value.code == "E4015"
    assert words in str(caught.value.help)


def test_pr5_parts_without_a_type() -> None:
    turns = parse_conversation([{"role": r, "content": [{"text": r}]} for r in ("user", "assistant")], "messages")
    assert [turn["content"] for turn in turns] == ["user", "assistant"]


@pytest.mark.parametrize(("role", "write"), [("developer", "system"), ("model", "assistant"), ("human", "user")])
def test_d15_the_role_to_write(role: str, write: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_conversation([{"role": role, "content": "x"}], "messages")
    assert caught.value.code == "E4058"
    assert f'"{write}"' in str(caught.value.help)


def test_d15_python_text() -> None:
    with pytest.raises(DataError) as caught:
        parse_conversation(str([ASK, {"role": "assistant", "content": "it's"}]), "messages")
    assert caught.value.code == "E4071"
    assert "json.dumps" in str(caught.value.help)
