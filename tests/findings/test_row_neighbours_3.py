"""Findings T1 to T12 of 2026-11-25 about rows: texts that look like nothing, prompts that are rendered already,
held-out rows that are training rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.findings.conftest import write_rows
from tests.findings.test_rendered_rows import CHATML, HEAD, model

from surefit import recipes
from surefit.core.errors import DataError
from surefit.data.read.load import load_rows
from surefit.data.rows.layouts import read_splits, row_converter
from surefit.recipes import get_recipe
from surefit.stages.checking import run_check
from surefit.stages.run_context import load_run_context

Row = dict[str, Any]
Check = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """check(rows, held_out, template, data) → the findings about rows and templates."""

    def run(
        rows: Sequence[Row | str],
        held_out: Sequence[Row] = (),
        template: str = "",
        data: str = "",
        recipe: str = "chat",
    ) -> list[dict[str, Any]]:
        name = "surefit/nano"
        if template:
            (tmp_path / "model").mkdir(exist_ok=True)
            name = model(tmp_path / "model", template).name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "rows.jsonl").write_text("".join(line + "\n" for line in lines))
        share = "0.3"
        if held_out:
            share = write_rows(tmp_path / "held.jsonl", list(held_out)).name
        (tmp_path / "run.yaml").write_text(
            f"recipe: {recipe}\nmodel: {{name_or_path: {name}}}\n"
            f"data: {{train: rows.jsonl, eval: {share}, max_length: 512{data}}}\noutput_dir: out\n"
        )
        found = run_check(load_run_context(tmp_path / "run.yaml", None))["findings"]
        return [one for one in found if one["code"].startswith(("AUD", "DAT", "TPL0")) and one["code"] != "TPL006"]

    return run


def codes(found: list[dict[str, Any]]) -> set[str]:
    return {one["code"] for one in found if one["severity"] != "info"}


def pairs(answer: str = "A {n}.", prompt: str = "What is {n}?", count: int = 40, **more: Any) -> list[Row]:
    return [{"prompt": prompt.format(n=n), "completion": answer.format(n=n)} | more for n in range(count)]


@pytest.mark.parametrize("word", ["None", "null", " None ", "NONE", "Null", "none"])
@pytest.mark.parametrize("skip", ["", ", bad_rows: skip"], ids=["stop", "skip"])
def test_t1_the_text_none_is_an_answer_that_is_warned_of(check: Check, word: str, skip: str) -> None:
    rows = pairs()
    for row in rows[::3]:
        row["completion"] = word
    found = check(rows, data=skip)
    assert [(one["code"], one["severity"]) for one in found] == [("AUD028", "warning")]
    assert "14 of 40 rows" in found[0]["message"]
    assert "rows.jsonl:1" in found[0]["message"]


@pytest.mark.parametrize(
    ("layout", "answer"),
    [
        pytest.param("prompt", "None", id="T1-prompt-completion"),
        pytest.param("alpaca", "null", id="T1-alpaca"),
        pytest.param("messages", "None", id="T1-messages"),
        pytest.param("sharegpt", "null", id="T1-sharegpt"),
    ],
)
def test_t1_in_every_layout(check: Check, layout: str, answer: str) -> None:
    rows = [laid_out(layout, f"What is {n}?", answer if n % 3 == 0 else f"A {n}.") for n in range(40)]
    assert codes(check(rows)) == {"AUD028"}
    assert codes(check(rows, data=", bad_rows: skip")) == {"AUD028"}


def laid_out(layout: str, question: str, answer: Any) -> Row:
    if layout == "prompt":
        return {"prompt": question, "completion": answer}
    if layout == "alpaca":
        return {"instruction": question, "output": answer}
    if layout == "messages":
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


@pytest.mark.parametrize("answer", [None, "", " \n"], ids=["null", "empty", "blank"])
@pytest.mark.parametrize("layout", ["prompt", "alpaca", "messages", "sharegpt"])
def test_t1_what_has_no_answer_is_what_is_left_out(check: Check, layout: str, answer: Any, tmp_path: Path) -> None:
    rows = [laid_out(layout, f"What is {n}?", answer if n < 5 else f"A {n}.") for n in range(40)]
    assert {"DAT001"} <= codes(check(rows)) <= {"DAT001", "DAT003"}
    assert codes(check(rows, data=", bad_rows: skip")) == set()
    loaded = load_run_context(tmp_path / "run.yaml", None).loaded.config
    train, held_out = read_splits(loaded.data, get_recipe("chat"), 1)
    assert (len(train) + len(held_out), len(train.skipped)) == (35, 5)


@pytest.mark.parametrize("answer", [None, "", " \n"], ids=["null", "empty", "blank"])
@pytest.mark.parametrize("name", ["function_calling", "long_summarization", "math_reasoning", "amr_parsing"])
def test_t1_the_same_in_recipes_with_columns_of_their_own(name: str, answer: Any) -> None:
    sample = {"function_calling": "function-calling", "long_summarization": "summaries", "amr_parsing": "amr-tiny"}
    rows = load_rows(f"surefit/{sample.get(name, 'math-reasoning')}-train")
    recipe = recipes.get_recipe(name)
    column = recipe.columns_in(rows.columns)[-1]
    convert = row_converter(rows.columns, "x", recipe, "auto")
    assert convert(rows[0])
    with pytest.raises(DataError):
        convert(rows[0] | {column: answer})


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"answer": None}, id="answer"),
        pytest.param({"label": None}, id="label"),
        pytest.param({"answers": "None"}, id="text"),
        pytest.param({"answers": ""}, id="empty"),
    ],
)
@pytest.mark.parametrize("layout", ["prompt", "alpaca", "messages", "sharegpt", "text"])
def test_t1_columns_that_hold_no_answer_are_not_counted_as_one(check: Check, layout: str, more: Row) -> None:
    rows = [
        ({"text": f"Row {n} goes on."} if layout == "text" else laid_out(layout, f"What is {n}?", f"A {n}.")) | more
        for n in range(40)
    ]
    assert not codes(check(rows)) & {"DAT003", "DAT004", "AUD028" if layout != "text" else "DAT004"}


def test_t1_plain_text_with_a_column_that_is_always_the_same_is_no_error(check: Check) -> None:
    assert codes(check([{"text": f"Row {n} goes on.", "label": 1} for n in range(40)])) == set()


def laid(layout: str, first: int, count: int, answer: str = "A {n}.") -> list[Row]:
    return [laid_out(layout, f"What is {n}?", answer.format(n=n)) for n in range(first, first + count)]


@pytest.mark.parametrize("held", ["prompt", "alpaca", "messages", "sharegpt"])
@pytest.mark.parametrize("train", ["prompt", "alpaca", "messages", "sharegpt"])
def test_t4_held_out_rows_that_are_training_rows_are_an_error(check: Check, train: str, held: str) -> None:
    found = check(laid(train, 0, 60), laid(held, 50, 20, "Another {n}."))
    assert [(one["code"], one["severity"], one["field"]) for one in found] == [("AUD001", "error", "data.eval")]
    assert "10 of 20" in found[0]["message"]
    assert "held.jsonl:1" in found[0]["message"]
    assert "rows.jsonl:51" in found[0]["message"]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda row: row | {"prompt": row["prompt"] + " "}, id="T4-another-prompt"),
        pytest.param(lambda row: row | {"system": "Be terse."}, id="T4-another-system-message"),
        pytest.param(lambda row: row | {"prompt": [{"role": "user", "content": "Hi " + row["prompt"]}]}, id="T4-list"),
    ],
)
def test_t4_other_prompts_are_none(check: Check, change: Callable[[Row], Row]) -> None:
    assert codes(check(laid("prompt", 0, 60), [change(row) for row in laid("prompt", 0, 20)])) == set()


def test_t4_prompts_of_parts_columns_and_history_are_compared_too(check: Check) -> None:
    parts = [{"type": "text", "text": "What is 3?"}]
    train = [*laid("prompt", 0, 40), *({"prompt": [{"role": "user", "content": parts}], "completion": "A."},)]
    held = [{"instruction": f"What is {n}?", "input": "", "output": "B."} for n in range(3, 15)]
    found = check(train[4:], held)
    assert [one["code"] for one in found] == ["AUD001"]
    assert "12 of 12" in found[0]["message"]
    split = [{"instruction": "What is", "input": f"{n}?", "output": "B."} for n in range(12)]
    joined = [{"prompt": f"What is\n\n{n}?", "completion": "A."} for n in range(40)]
    assert codes(check(split * 2, joined)) >= {"AUD001"}


def test_t4_a_few_are_a_warning(check: Check) -> None:
    found = check(laid("messages", 0, 300), laid("messages", 299, 150))
    assert [(one["code"], one["severity"]) for one in found] == [("AUD007", "warning")]


def test_t4_recipes_with_columns_of_their_own(check: Check) -> None:
    train = [{"question": f"What is {n}?", "answer": f"So it is {n}. #### {n}"} for n in range(40)]
    found = check(train, train[5:17], recipe="math_reasoning")
    assert "AUD001" in codes(found)
    assert not codes(check(train[:20], train[20:], recipe="math_reasoning")) & {"AUD001", "AUD007"}


def test_t4_rows_that_share_their_beginning_are_bounded(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefit.data.audit.leaks.TRAINING_ROWS", 30)
    same = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]
    rows = [{"messages": [*same, *row["messages"]]} for row in laid("messages", 0, 60)]
    assert "AUD001" not in codes(check(rows, rows[40:55]))
    assert "AUD001" in codes(check(rows, rows[10:25]))


ALPACA = "### Instruction:\nName a color, number {n}.\n\n### Response:\n"
LONG_ALPACA = (
    "Below is an instruction that describes a task, paired with an input. Write a response.\n\n### Instruction:\n"
    "Translate.\n\n### Input:\nword {n}\n\n### Response:"
)
HH = "\n\nHuman: question {n}\n\nAssistant: hello\n\nHuman: another {n}\n\nAssistant:"
VICUNA = "A chat between a user and an assistant. USER: What is {n}? ASSISTANT:"


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param(ALPACA, id="T2-alpaca"),
        pytest.param(LONG_ALPACA, id="T2-alpaca-with-input"),
        pytest.param(HH, id="T2-hh"),
        pytest.param(VICUNA, id="T2-vicuna"),
        pytest.param("### Human: What is {n}?\n### Assistant:", id="T2-guanaco"),
        pytest.param("GPT4 Correct User: What is {n}?<|end_of_turn|>GPT4 Correct Assistant:", id="T2-openchat"),
        pytest.param("User: What is {n}?\n\nAssistant:", id="T2-user"),
    ],
)
@pytest.mark.parametrize("template", ["", CHATML], ids=["nano", "chatml"])
def test_t2_prompts_of_another_template_are_warned_of(check: Check, prompt: str, template: str) -> None:
    found = check(pairs(prompt=prompt), template=template)
    assert [(one["code"], one["severity"]) for one in found if one["severity"] != "info"] == [("AUD080", "warning")]
    assert "of 40 rows" in found[0]["message"]
    messages = [{"messages": [{"role": "user", "content": row["prompt"]}, CHAT_ANSWER]} for row in pairs(prompt=prompt)]
    assert codes(check(messages, template=template)) >= {"AUD080"}


CHAT_ANSWER = {"role": "assistant", "content": "Blue."}
QUOTES = [
    "What does this prompt of Alpaca mean? {n}\n\n### Instruction:\nName a color.\n\n### Response:\n",
    "Why do HH's rows look like this, {n}?\n\nHuman: Hi.\n\nAssistant:",
    "How does Vicuna end a prompt, {n}? With USER: Hi. ASSISTANT:",
]


@pytest.mark.parametrize("quote", QUOTES)
def test_t2_a_few_prompts_that_quote_one_are_not(check: Check, quote: str) -> None:
    rows = [*pairs(count=38), *pairs(prompt=quote, count=2)]
    assert codes(check(rows)) == set()


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param("Explain what '### Instruction:' and '### Response:' do in row {n}.", id="T2-marks-in-a-sentence"),
        pytest.param("```\n### Instruction:\nx {n}\n### Response:\n```\nWhat does this code print?", id="T2-code"),
        pytest.param("Question: What is {n}?\nAnswer:", id="T2-a-question-with-its-answer-to-be-filled-in"),
        pytest.param("Q: What is {n}?\nA:", id="T2-q-and-a"),
        pytest.param("Translate to French.\nEnglish: word {n}\nFrench:", id="T2-few-shot"),
        pytest.param("Write a dialog that begins with Human: and Assistant: about {n}.", id="T2-a-dialog"),
    ],
)
def test_t2_other_prompts_are_none(check: Check, prompt: str) -> None:
    assert codes(check(pairs(prompt=prompt))) == set()


def test_t2_vicuna_as_plain_text(check: Check) -> None:
    found = check([{"text": f"{VICUNA.format(n=n)} It is {n}."} for n in range(40)])
    assert codes(found) == {"AUD045"}
    assert codes(check([{"text": f"DENTAL ASSISTANT: Open wide, number {n}."} for n in range(40)])) == set()


FOREIGN = [
    "<|eot_id|>",
    "</s>",
    "<end_of_turn>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<eos>",
]
FOREIGN += [
    "<|return|>",
    "<|END_OF_TURN_TOKEN|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<turn|>",
    "<|end_of_turn|>",
]
FOREIGN += ["<|eot|>", "[EOS]", "<|EOT|>", "<|im_sep|>", "<|eod_id|>"]


@pytest.mark.parametrize("token", FOREIGN)
def test_t3_another_family_s_end_token_is_named(check: Check, token: str) -> None:
    for row in ({"answer": "A {n}" + token}, {"answer": "A {n}" + token + "\n"}):
        found = [one for one in check(pairs(**row)) if one["severity"] != "info"]
        assert [(one["code"], one["severity"]) for one in found] == [("AUD081", "warning")]
        assert "40 of 40 rows" in found[0]["message"]
        assert token in found[0]["message"]


def test_t3_in_other_layouts_and_in_plain_text(check: Check) -> None:
    assert codes(check(laid("messages", 0, 40, "A {n}<|eot_id|>"))) == {"AUD081"}
    assert codes(check(laid("alpaca", 0, 40, "A {n}</s>"))) == {"AUD081"}
    assert codes(check(laid("alpaca", 0, 40, "<s>A {n}</s>"))) == {"AUD081"}
    assert codes(check([{"text": f"Row {n} goes on.</s>"} for n in range(40)])) == {"AUD081"}
    both = [{"prompt": ALPACA.format(n=n), "completion": f"red {n}</s>"} for n in range(40)]
    assert codes(check(both)) == {"AUD080", "AUD081"}


def test_t3_the_tokenizer_s_own_is_said_as_before(check: Check) -> None:
    assert codes(check(pairs(answer="A {n}<|end|>"))) == {"AUD043"}
    assert codes(check(pairs(answer="A {n}<|im_end|>"), template=CHATML)) == {"AUD043"}
    assert codes(check(pairs(answer="A {n}<|eot_id|>"), template=CHATML)) == {"AUD081"}


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param("Use <s>old {n}</s>", id="T3-html-in-a-sentence"),
        pytest.param("A turn {n} ends with <|eot_id|>.", id="T3-in-a-sentence"),
        pytest.param("<tool_call>{n}</tool_call>", id="T3-call"),
        pytest.param("a {n} <|tool_calls_section_end|>", id="T3-calls"),
        pytest.param("<p>row {n}</p>", id="T3-tag"),
        pytest.param("list[{n}]", id="T3-brackets"),
        pytest.param("x <| {n} |>", id="T3-operators"),
    ],
)
def test_t3_other_ends_are_none(check: Check, answer: str) -> None:
    assert "AUD081" not in codes(check(pairs(answer=answer)))


def test_t3_a_few_answers_that_name_one_are_none(check: Check) -> None:
    assert codes(check([*pairs(count=38), *pairs(answer="In row {n}, Llama's is <|eot_id|>", count=2)])) == set()


THINKS = (
    HEAD + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n{% if m.reasoning_content %}"
    "{{ m.reasoning_content }}{% elif '</think>' in m.content %}{{ m.content.split('</think>')[0].split('<think>')[-1] "
    "}}{% endif %}\n</think>\n\n{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""A template that writes reasoning as Qwen 3's does, with its switch."""


def only(found: list[dict[str, Any]], code: str) -> dict[str, Any]:
    matching = [one for one in found if one["code"] == code]
    assert len(matching) == 1
    return matching[0]


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        pytest.param("<thinking>", "</thinking>", id="T8-thinking"),
        pytest.param("<thought>", "</thought>", id="T8-thought"),
        pytest.param("<reasoning>", "</reasoning>", id="T8-reasoning"),
        pytest.param("<|begin_of_thought|>", "<|end_of_thought|>", id="T8-begin-of-thought"),
        pytest.param("<scratchpad>", "</scratchpad>", id="T8-scratchpad"),
        pytest.param("<Thought>", "</Thought>", id="T8-capital"),
    ],
)
def test_t8_reasoning_in_another_tag_is_named(check: Check, opening: str, closing: str) -> None:
    found = only(check(pairs(answer=f"{opening}\nlong {{n}}\n{closing}\n\nA."), template=THINKS), "TPL010")
    assert f"40 of 40 sampled conversations have their reasoning in {opening}" in found["message"]
    assert "enable_thinking" not in found["help"]
    followed = check(pairs(answer="<think>\nlong {n}\n</think>\n\nA."), template=THINKS)
    assert codes(followed) == set()


def test_t8_answers_without_any_are_said_as_before(check: Check) -> None:
    found = only(check(pairs(answer="<b>A {n}</b>"), template=THINKS), "TPL010")
    assert "have no reasoning" in found["message"]
    assert "enable_thinking: false" in found["help"]
    assert codes(check(pairs(answer="<thought>long {n}</thought>A."), template=CHATML)) == set()


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "Complex_CoT", "rationale"])
@pytest.mark.parametrize("layout", ["prompt", "alpaca"])
def test_t10_a_column_of_reasoning_is_not_told_to_be_renamed(check: Check, layout: str, name: str) -> None:
    rows = [row | {name: f"A long thought about row {n}."} for n, row in enumerate(laid(layout, 0, 40))]
    found = only(check(rows, template=THINKS), "AUD047")
    assert repr(name) in found["message"]
    assert "rename" not in found["help"]
    for followed in (
        [laid_out(layout, f"What is {n}?", f"<think>\nThought {n}.\n</think>\n\nA.") for n in range(40)],
        [
            {"messages": [row["messages"][0], row["messages"][1] | {"reasoning_content": f"Thought {n}."}]}
            for n, row in enumerate(laid("messages", 0, 40))
        ],
    ):
        assert codes(check(followed, template=THINKS)) == set()


def test_t11_reasoning_that_the_config_drops_is_not_asked_for(check: Check) -> None:
    rows = pairs(answer="<think>\nlong {n}\n</think>\n\nA.")
    found = only(check(rows, template=THINKS, data=", thinking: drop"), "TPL010")
    assert "data.thinking: drop" in found["message"]
    assert "train on rows with reasoning" not in found["help"]
    assert "data.thinking: keep" in found["help"]
    assert codes(check(rows, template=THINKS, data=", thinking: keep")) == set()


def spoken(layout: str, count: int = 40, speakers: Sequence[str] = ("Ann", "Bo"), text: str = "Hi {n}.") -> list[Row]:
    rows = []
    for n in range(count):
        row = laid_out(layout, text.format(n=n, name=speakers[n % len(speakers)]), f"A {n}.")
        row["messages" if layout == "messages" else "conversations"][0]["name"] = speakers[n % len(speakers)]
        rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param(spoken("messages"), {"AUD047"}, id="T9"),
        pytest.param(spoken("sharegpt"), {"AUD047"}, id="T9-sharegpt"),
        pytest.param(spoken("messages", speakers=["Ann"]), {"AUD046"}, id="T9-always-the-same"),
        pytest.param(spoken("messages", text="{name}: Hi {n}."), {"AUD046"}, id="T9-in-the-text-too"),
    ],
)
def test_t9_names_of_speakers_that_nothing_writes_are_said(check: Check, rows: list[Row], expected: set[str]) -> None:
    found = [one for one in check(rows, template=CHATML) if one["code"] in ("AUD046", "AUD047")]
    assert {one["code"] for one in found} == expected
    assert "[].name'" in found[0]["message"]


def test_t9_names_that_the_template_writes_are_none(check: Check) -> None:
    writes = CHATML.replace("{{ m.role }}\n", "{{ m.role }}{{ ' ' + m.name if m.name else '' }}\n", 1)
    assert check(spoken("messages"), template=writes) == []
    rows = laid("messages", 0, 40)
    for row in rows:
        result = {"role": "tool", "name": "look", "content": "21"}
        row["messages"][:0] = [row["messages"][0], {"role": "assistant", "content": "Wait."}, result]
    assert check(rows, template=CHATML) == []


@pytest.mark.parametrize("text", ["<noinput>", " <noinput>\n", "<NoInput>"])
def test_t12_an_input_that_stands_for_none_is_none(text: str) -> None:
    row = {"instruction": "Name a color.", "input": text, "output": "Red."}
    example = row_converter([*row], "x", get_recipe("chat"), "auto")(row)
    assert example.messages[0]["content"] == "Name a color."
    said = row_converter([*row], "x", get_recipe("chat"), "auto")(row | {"input": "What is <noinput>?"})
    assert "What is <noinput>?" in said.messages[0]["content"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"], ids="T12-{}".format)
@pytest.mark.parametrize(
    "row", ['{"output": "a", "output": "b"}', '{"messages": [{"role": "user", "role": "system"}]}']
)
def test_a_key_that_stands_twice_is_an_error(tmp_path: Path, name: str, row: str) -> None:
    path = tmp_path / name
    path.write_text('{"output": "one"}\n' + row + "\n" if name.endswith("l") else f"[{row}]")
    with pytest.raises(DataError) as caught:
        list(load_rows(str(path)))
    assert caught.value.code == "E4140"
    assert caught.value.line == (2 if name.endswith("l") else None)
