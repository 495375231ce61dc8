"""What an even sample says about a data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import pytest

from surefit.facts.dataset import dataset_facts
from surefit.facts.environment import environment_facts


def row(n: int, answers: Any = "x") -> dict[str, Any]:
    return {"query": f"question {n}", "answers": f"answer {n}" if answers == "x" else answers}


class Counted(Sequence[dict[str, Any]]):
    """A hundred thousand rows that note which of them were looked at."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __len__(self) -> int:
        return 100_000

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: Any) -> Any:
        self.seen.append(index)
        return row(index)


def test_the_sample_is_even_and_the_rest_is_not_read() -> None:
    rows = Counted()
    facts = dataset_facts("big", rows, limit=50)
    assert (facts.rows, facts.sample, facts.target_distinct, facts.duplicates) == (100_000, 50, 50, 0)
    assert rows.seen == list(range(0, 100_000, 2000))


def test_columns_nulls_blanks_and_duplicates() -> None:
    rows = [row(0), row(1, None), row(2, "  "), row(3, "null"), row(0), {"query": None}]
    facts = dataset_facts("d", rows, lambda n: f"d.jsonl:{n + 1}")
    assert facts.target == "answers"
    assert (facts.target_null, facts.target_blank, facts.first_bad) == (2, 1, "d.jsonl:2")
    assert facts.duplicates == 1
    assert list(facts.columns) == ["query", "answers"]
    column = facts.columns["answers"]
    assert (column.present, column.null, column.blank) == (5, 1, 1)
    assert (facts.columns["query"].present, facts.columns["query"].null) == (6, 1)


def test_an_empty_list_is_an_answer() -> None:
    facts = dataset_facts("d", [row(n, []) for n in range(3)])
    assert (facts.target_null, facts.target_blank, facts.target_distinct, facts.target_example) == (0, 0, 1, "[]")


@pytest.mark.parametrize(
    ("columns", "expected", "target"),
    [
        ({"messages": [], "answers": []}, (), "messages"),
        ({"messages": [], "answers": []}, ("query", "answers"), "answers"),
        ({"instruction": "", "output": ""}, (), "output"),
        ({"answer": ""}, ("query", "answers"), None),
        ({"text": ""}, (), None),
    ],
)
def test_where_the_answers_are(columns: dict[str, Any], expected: Sequence[str], target: str | None) -> None:
    assert dataset_facts("d", [columns], expected=expected).target == target


def test_a_conversation_s_answer_is_its_last_assistant_turn() -> None:
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    rows = [{"messages": m} for m in ([user, answer], [user, answer, user], [user, call], [user], [], "text", [3])]
    facts = dataset_facts("d", rows)
    assert facts.target_null == 3
    assert facts.target_distinct == 4
    shares = [{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": ""}]}]
    assert dataset_facts("d", shares).target_blank == 1


def test_no_rows_and_odd_values() -> None:
    empty = dataset_facts("d", [])
    assert (empty.rows, empty.target, empty.target_example, empty.first_bad) == (0, None, "", None)
    odd = dataset_facts("d", [{"output": object()}, {"output": {"b": 1, "a": [2]}}, {"output": 3}])
    assert odd.target_distinct == 3


def test_the_environment_is_facts_not_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    facts = environment_facts()
    assert (facts.hub_token, facts.offline) == (True, True)
    assert "xxx" not in repr(facts)
