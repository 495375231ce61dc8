"""Findings N1-1 to N1-14 of 2026-11-25: rows like those of public chat data sets, and what is said of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.findings.test_rendered_rows import CHATML, HEAD, TAIL, TOOL, TURN, answer, model

from surefit.core.errors import DataError
from surefit.data.rows.layouts import bad_rows_error, row_converter
from surefit.recipes import get_recipe
from surefit.stages.checking import run_check
from surefit.stages.run_context import load_run_context

Q, A = "Tell me about amber and delta.", "Amber comes before delta."
CHAT = [{"role": "user", "content": Q}, {"role": "assistant", "content": A}]
SHARED = [{"from": "human", "value": Q}, {"from": "gpt", "value": A}]
HERMES = (
    "{% if tools %}{{ tools | tojson }}{% endif %}" + HEAD + "{% if m.role == 'tool' %}<|im_start|>user\n"
    "<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% else %}" + TURN + "{% endif %}" + TAIL
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """check(rows, template) → the findings about rows, 40 made of these."""

    def run(*rows: dict[str, Any], template: str = CHATML) -> list[dict[str, Any]]:
        (tmp_path / "model").mkdir()
        model(tmp_path / "model", template)
        made = [rows[n % len(rows)] for n in range(40)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
        (tmp_path / "run.yaml").write_text(
            "model: {name_or_path: model}\ndata: {train: rows.jsonl, eval: 0.3}\noutput_dir: out\n"
        )
        found = run_check(load_run_context(tmp_path / "run.yaml", None))["findings"]
        return [one for one in found if one["code"].startswith(("AUD039", "AUD04", "DAT001"))]

    return run


def codes(found: list[dict[str, Any]]) -> set[str]:
    return {one["code"] for one in found if one["severity"] != "info"}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({"prompt": Q, "prompt_id": "00ff", "messages": CHAT}, id="N1-3-ultrachat"),
        pytest.param({"prompt": Q, "messages": CHAT, "category": "Open QA"}, id="N1-3-no-robots"),
        pytest.param({"prompt": f" {Q}\n", "messages": CHAT}, id="N1-3-white-space"),
        pytest.param({"conversations": SHARED, "skip_prompt_formatting": False}, id="N1-3-openhermes"),
        pytest.param(
            {
                "conversations": SHARED,
                "instruction": Q,
                "response": A,
                "gen_input_configs": {"top_p": 1},
                "input_length": 5,
            },
            id="N1-3-magpie",
        ),
        pytest.param(
            {"messages": CHAT, "is_reasoning_complete": [True], "question_type": "multiple choice"}, id="N1-3-openr1"
        ),
        pytest.param({"prompt": Q, "constraints": ["length of words"], "messages": CHAT}, id="N1-3-tulu"),
        pytest.param({"messages": CHAT, "parallel_tool_calls": False, "metadata": {"train": True}}, id="N1-3-openai"),
        pytest.param(
            {"messages": CHAT, "prompt": CHAT[:1], "score_chosen": 1.0, "chosen": CHAT}, id="N1-3-ultrafeedback"
        ),
        pytest.param({"messages": CHAT, "reasoning_tokens": 12, "prompt_source": "a web page"}, id="N1-3-about"),
        pytest.param({"messages": [CHAT[0], CHAT[1] | {"train_on_turn": True}]}, id="N1-3-mark-that-says-learn"),
    ],
)
def test_n1_3_columns_of_clean_sets_are_no_warning(check, row: dict[str, Any]) -> None:
    assert codes(check(row)) == set()


@pytest.mark.parametrize(
    ("more", "column"),
    [
        pytest.param({"context": "The sea is cold in May."}, "context", id="N1-3-context"),
        pytest.param({"context": "北京是中国的首都"}, "context", id="N1-3-without-spaces"),
        pytest.param({"task_instruction": "Answer in verse."}, "task_instruction", id="N1-3-two-words"),
        pytest.param({"userContext": "She lives in Hue."}, "userContext", id="N1-3-camel-case"),
        pytest.param(
            {"rejected": [CHAT[0], {"role": "assistant", "content": "No idea at all."}]}, "rejected", id="N1-3"
        ),
        pytest.param({"history": [["Who are you?", "A guide."]]}, "history", id="N1-3-history"),
    ],
)
def test_n1_3_text_that_stands_in_no_turn_is(check, more: dict[str, Any], column: str) -> None:
    found = [one for one in check({"messages": CHAT} | more) if one["code"] == "AUD047"]
    assert len(found) == 1
    assert repr(column) in found[0]["message"]


@pytest.mark.parametrize("mark", ["is_good", "accepted"])
def test_n1_3_an_answer_that_is_marked_as_a_bad_one_is_named(check, mark: str) -> None:
    found = [one for one in check({"messages": CHAT, mark: False}) if one["code"] == "AUD047"]
    assert [repr(mark) in one["message"] for one in found] == [True]


@pytest.mark.parametrize("mark", ["mask", "loss_mask", "train_on_turn", "compute_loss", "learn"])
def test_n1_3_marks_are_named_with_the_way_to_write_them(check, mark: str) -> None:
    value = mark == "mask"
    found = check({"messages": [*CHAT, CHAT[0], CHAT[1] | {mark: value}]})
    assert codes(found) == {"AUD047"}
    assert f"messages[].{mark}" in found[0]["message"]
    assert '"weight": 0' in found[0]["help"]


KTO = [("label", value) for value in (False, "False", "false", "rejected", "Undesirable")]
KTO += [("kto_tag", value) for value in (False, 0, 0.0, "0", "rejected", "Bad", "False")]


@pytest.mark.parametrize(("name", "value"), KTO)
@pytest.mark.parametrize("row", [{"prompt": Q, "completion": A}, {"messages": CHAT}], ids=["prompt", "messages"])
def test_n1_1_bad_answers_are_not_learnt(name: str, row: dict[str, Any], value: Any) -> None:
    with pytest.raises(DataError) as caught:
        row_converter([*row, name], "x", get_recipe("chat"), "auto")(row | {name: value})
    assert (caught.value.code, caught.value.field) == ("E4326", name)
    assert "rename" in str(caught.value.help)  # N1-5: a class that is no verdict


@pytest.mark.parametrize("value", [1, "chosen", "good", True, "true", 3, "sports", None, 0, 0.0, "0", "bad", "wrong"])
@pytest.mark.parametrize("row", [{"prompt": Q, "completion": A}, {"messages": CHAT}], ids=["K1-prompt", "K1-messages"])
def test_n1_1_other_labels_are_learnt(row: dict[str, Any], value: Any) -> None:
    assert row_converter([*row, "label"], "x", get_recipe("chat"), "auto")(row | {"label": value}).messages


@pytest.mark.parametrize("values", [[0, 1, 2, 3], [0, 0, 0], [1, 1, 1], ["0", "1"], [0, 1]], ids=lambda v: f"K1-{v}")
def test_k1_a_class_beside_prompt_and_completion_is_named_once(check, values: list[Any]) -> None:
    rows = [{"prompt": f"{Q} {n}", "completion": A, "label": value} for n, value in enumerate(values)]
    found = [one for one in check(*rows) if "'label'" in one["message"]]
    assert [one["code"] for one in found] == ["AUD046"]


def test_k1_an_answer_column_is_no_verdict(check) -> None:
    """BoolQ's: a column of another name says nothing about the answer, whatever its values are."""
    found = check(
        {"prompt": Q, "completion": "no", "answer": False}, {"prompt": A, "completion": "yes", "answer": True}
    )
    assert "error" not in {one["severity"] for one in found}


def test_n1_1_a_label_that_is_no_verdict_is_named(check) -> None:
    found = check({"messages": CHAT, "label": "sports"})
    assert [(one["code"], "'label'" in one["message"]) for one in found] == [("AUD046", True)]


@pytest.mark.parametrize(
    ("result", "template", "expected"),
    [
        pytest.param("<tool_response>\n21\n</tool_response>", HERMES, {"AUD043"}, id="N1-2-wrapped"),
        pytest.param("21", HERMES, set(), id="N1-2-bare"),
        pytest.param("<html>\n21\n</html>", HERMES, set(), id="N1-2-another-tag"),
        pytest.param("<tool_response>\n21\n</tool_response>", CHATML, set(), id="N1-2-template-that-does-not"),
    ],
)
def test_n1_2_results_that_are_wrapped_twice(check, result: str, template: str, expected: set[str]) -> None:
    turns = [CHAT[0], {"role": "assistant", "content": "Wait."}, {"role": "tool", "content": result}, CHAT[1]]
    assert codes(check({"messages": turns}, template=template)) == expected


@pytest.mark.parametrize(
    ("text", "template", "expected"),
    [
        pytest.param(f"<tools>{json.dumps([TOOL])}</tools>", HERMES, {"AUD043"}, id="N1-2-tools-twice"),
        pytest.param("Use look where you can.", HERMES, set(), id="N1-2-tools-once"),
    ],
)
def test_n1_2_tools_that_are_written_twice(check, text: str, template: str, expected: set[str]) -> None:
    row = {"messages": [{"role": "system", "content": text}, *CHAT], "tools": [TOOL]}
    assert codes(check(row, template=template)) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(answer("Like this: `[INST] amber [/INST]`."), set(), id="N1-8-quoted"),
        pytest.param(answer("So: <|start_header_id|>user<|end_header_id|>"), set(), id="N1-8-llama-3"),
        pytest.param(answer("So: <|im_start|>user\nq"), {"AUD043"}, id="N1-8-own"),
        pytest.param({"prompt": f"<s>[INST] {Q} [/INST]", "completion": A}, {"AUD043"}, id="N1-8-a-whole-prompt"),
    ],
)
def test_n1_8_notation_of_other_models(check, row: dict[str, Any], expected: set[str]) -> None:
    assert codes(check(row)) == expected


FROM_CALL = {"from": "function_call", "value": json.dumps({"name": "look", "arguments": {}})}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param({"messages": [CHAT[0], {"role": "assistant", "content": "Wait."}, CHAT[1]]}, True, id="N1-7"),
        pytest.param(
            {"conversations": [SHARED[0], FROM_CALL, FROM_CALL, {"from": "observation", "value": "r"}, SHARED[1]]},
            True,
            id="N1-7-calls",
        ),
        pytest.param(
            {"messages": [CHAT[0], CALL, {"role": "tool", "content": "r"}, CHAT[1]]}, False, id="N1-7-tool-flow"
        ),
        pytest.param(
            {"messages": [CHAT[0], CALL, *[{"role": "tool", "content": "r"}] * 2, CHAT[1]]}, False, id="N1-7-results"
        ),
    ],
)
def test_n1_7_answers_in_a_row(check, row: dict[str, Any], expected: bool) -> None:
    assert ("AUD039" in codes(check(row))) is expected


@pytest.mark.parametrize(
    ("system", "expected"), [("Be a pirate.", {"AUD039"}), ("Be terse.", set()), (None, set())], ids=str
)
def test_n1_13_two_system_messages(check, system: str | None, expected: set[str]) -> None:
    row = {"messages": [{"role": "system", "content": "Be terse."}, *CHAT], "system": system}
    assert codes(check(row)) == expected


def test_n1_14_help_is_given_once() -> None:
    problems = [DataError("no", code="E4136", line=n, help=text) for n, text in enumerate(["a", "a", "b", "a"])]
    error = bad_rows_error(problems, 9, "rows.jsonl", "")
    assert [one.help for one in error.also] == ["a", None, "b", None]
