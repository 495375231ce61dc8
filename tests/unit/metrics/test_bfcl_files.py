"""The leaderboard's files: a question becomes a row that the recipe reads, an answer gets the leaderboard's verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefit.core.errors import DataError
from surefit.metrics.bfcl_files import read_category, row_from_question, score_bfcl_answer
from surefit.recipes.function_calling import RECIPE

QUESTION: dict[str, Any] = {
    "id": "live_simple_0-0-0",
    "question": [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Oslo, in fahrenheit?"}]],
    "function": [{"name": "weather", "description": "Forecast", "parameters": {
        "type": "dict", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "City"},
            "unit": {"type": "string", "description": "Unit", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
            "hours": {"type": "array", "items": {"type": "integer"}, "description": "Which"},
        }}}],
}  # fmt: skip
GOLD = {"ground_truth": [{"weather": {"city": ["Oslo", "Oslo, NO"], "unit": ["fahrenheit"], "hours": ["", [1]]}}]}


def test_a_question_becomes_a_row_of_the_recipe() -> None:
    row = row_from_question(QUESTION | GOLD)
    assert row["query"] == "Be brief.\nOslo, in fahrenheit?"
    (tool,) = json.loads(row["tools"])
    assert tool["parameters"]["city"] == {"description": "City", "type": "str"}
    assert tool["parameters"]["unit"]["type"] == "str, optional"
    assert tool["parameters"]["unit"]["enum"] == ["celsius", "fahrenheit"]
    assert tool["parameters"]["hours"]["type"] == "List[int], optional"
    assert json.loads(row["answers"]) == [{"name": "weather", "arguments": {"city": "Oslo", "unit": "fahrenheit"}}]
    assert RECIPE.to_example(row).completion == row["answers"]
    assert json.loads(row_from_question(QUESTION)["answers"]) == []


def test_every_acceptable_value_is_accepted() -> None:
    def answer(**arguments: Any) -> str:
        return json.dumps([{"name": "weather", "arguments": arguments}])

    asked = QUESTION | GOLD
    assert score_bfcl_answer(asked, answer(city="Oslo", unit="fahrenheit"), "live_simple") == 1
    assert score_bfcl_answer(asked, answer(city="oslo, no", unit="fahrenheit", hours=[1]), "live_simple") == 1
    assert score_bfcl_answer(asked, answer(city="Oslo"), "live_simple") == 0
    assert score_bfcl_answer(asked, answer(city="Bergen", unit="fahrenheit"), "live_simple") == 0
    assert score_bfcl_answer(asked, "[", "live_simple") == 0
    assert score_bfcl_answer(asked, "[]", "live_simple") == 0


def test_where_no_tool_fits_a_call_is_wrong_and_prose_is_right() -> None:
    assert score_bfcl_answer(QUESTION, "[]", "irrelevance") == 1
    assert score_bfcl_answer(QUESTION, "Sorry.", "irrelevance") == 1
    assert score_bfcl_answer(QUESTION, '[{"name": "weather", "arguments": {"city": "Oslo"}}]', "irrelevance") == 0


def test_reading_a_category(tmp_path: Path) -> None:
    (tmp_path / "possible_answer").mkdir()
    name = "BFCL_v4_live_simple.json"
    (tmp_path / name).write_text(json.dumps(QUESTION) + "\n")
    assert read_category(tmp_path, "live_simple") == {QUESTION["id"]: QUESTION}
    (tmp_path / "possible_answer" / name).write_text(json.dumps({"id": QUESTION["id"], **GOLD}) + "\n")
    assert read_category(tmp_path, "live_simple") == {QUESTION["id"]: QUESTION | GOLD}
    with pytest.raises(DataError, match=r"BFCL_v4_multiple.json does not exist"):
        read_category(tmp_path, "multiple")
