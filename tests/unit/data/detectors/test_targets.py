"""Answers that are not what they should be."""

from __future__ import annotations

from typing import Any

import pytest

from surefit.data.audit.detectors.targets import EmptyWords, ListsOfOne, LongSummaries, PythonValues


def names(detector: Any, row: dict[str, Any]) -> list[str]:
    return [sighting.name for sighting in detector.look(0, row)]


@pytest.mark.parametrize("text", ["nan", " N/A ", "null", "undefined", "[object Object]", "TBD", "-"])
def test_placeholders(text: str) -> None:
    assert names(EmptyWords(), {"completion": text}) == ["placeholder"]


@pytest.mark.parametrize("text", ["Nancy", "None of these", "0", "", "no"])
def test_short_answers_that_are_answers(text: str) -> None:
    assert names(EmptyWords(), {"completion": text}) == []


def test_the_answer_of_a_conversation_is_its_last_assistant_turn() -> None:
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "N/A"}, {"from": "human", "value": "thanks"}]
    assert names(EmptyWords(), {"conversations": turns}) == ["placeholder"]


def test_a_summary_is_shorter_than_its_text() -> None:
    assert names(LongSummaries(), {"text": "short", "summary": "rather longer"}) == ["summary_longer_than_source"]
    assert names(LongSummaries(), {"text": "rather longer", "summary": "short"}) == []
    assert names(LongSummaries(), {"text": "", "summary": "short"}) == []
    assert LongSummaries().applies(["text", "summary"], None)
    assert not LongSummaries().applies(["text", "label"], None)


@pytest.mark.parametrize(
    "text", ["{'a': 1}", "[{'name': 'f', 'arguments': {}}]", '{"a": None}', '["x", True]', "('a',)"]
)
def test_python_values(text: str) -> None:
    assert names(PythonValues(), {"completion": text}) == ["python_answer"]


@pytest.mark.parametrize(
    "text",
    ["[1, 2]", '["None of them is True"]', "(w / want-01)", "{'cut", "'quoted'", "[citation needed]", "{x: 'y'}", ""],
)
def test_texts_that_are_no_python_values(text: str) -> None:
    assert names(PythonValues(), {"completion": text}) == []


def test_json_that_python_reads_as_well_is_json() -> None:
    tools = '[{"name": "f", "description": "Returns True or None"}]'
    assert names(PythonValues(), {"completion": tools, "tools": tools}) == ["json_answer"]
    assert names(PythonValues(), {"completion": "x", "sections": "[{'text': 'y'}]"}) == ["python_column"]


def test_deep_nesting_is_no_crash() -> None:
    assert names(PythonValues(), {"completion": "[" * 9000 + "'"}) == []


def test_a_list_of_one_text() -> None:
    assert names(ListsOfOne(), {"gold": ["a summary"]}) == ["list_of_one"]
    assert names(ListsOfOne(), {"gold": ["one", "other"]}) == []
    assert names(ListsOfOne(), {"answers": [{"name": "f", "arguments": {}}]}) == []
