"""Ways of writing, and graphs that do not parse."""

from __future__ import annotations

from typing import Any

import pytest

from surefit.data.audit.detectors.conventions import CodeStyle, FinalAnswers, Graphs, JsonStyle


def names(detector: Any, answer: str, column: str = "completion") -> list[str]:
    return [sighting.name for sighting in detector.look(0, {column: answer})]


@pytest.mark.parametrize(
    ("graph", "ways"),
    [
        ("(w / want-01 :ARG0 (b / boy) :ARG1 b)", []),
        ('(b / bear-02\n :ARG1 (p / poet :name (n / name :op1 "William" :op2 "S (x / y")))', []),
        ("(c / cho :domain(b / bi_kich))", ["graph_underscored_concepts"]),
        ("(c / cho :domain(b / bi kich))", ["graph_spaced_concepts"]),
        ("(w / want-01 :ARG0 (b / boy)", ["graph_unparseable"]),
        ("(w / want-01 :ARG0 (b / boy)))", ["graph_unparseable"]),
        ('(w / want-01 :name "Bob :op1 x)', ["graph_unparseable"]),
        ("(w / :ARG0 (b / boy))", ["graph_unparseable"]),
        ("(w / want-01 :ARG0 :ARG1 b)", ["graph_unparseable"]),
        ("(w / want-01 :ARG0 (/ boy))", ["graph_unparseable"]),
        ("(w / want-01 :ARG0 b) and so on", ["graph_unparseable"]),
    ],
)
def test_graphs(graph: str, ways: list[str]) -> None:
    found = names(Graphs(), graph)
    assert found[1:] == ways
    assert found == [] or found[0] == "graph"


@pytest.mark.parametrize("text", ["(a / b) + c", "(1 / 2)", "(see / ask) the doctor", "plain"])
def test_fractions_and_asides_are_no_graphs(text: str) -> None:
    assert names(Graphs(), text) == []


@pytest.mark.parametrize(
    ("text", "ways"),
    [
        ("so 3.\n#### 1,080", ["final_hashes", "thousands_separated"]),
        ("so 3.\n#### 70000", ["final_hashes", "thousands_plain"]),
        ("so.\nA: 26", ["final_letter_a"]),
        ("Thus \\boxed{12}.", ["final_boxed"]),
        ("The answer is 1,234.5", ["final_sentence", "thousands_separated"]),
        ("#### a heading\nand text", []),
        ("It costs $1,080.", []),
    ],
)
def test_final_answers(text: str, ways: list[str]) -> None:
    assert names(FinalAnswers(), text) == ways


def test_json_with_and_without_spaces() -> None:
    assert names(JsonStyle(), '[{"a": 1}]') == ["json_spaced"]
    assert names(JsonStyle(), '{"a":"b: c"}') == ["json_compact"]
    assert names(JsonStyle(), "[1]") == []
    assert not JsonStyle().applies(["query", "tools", "answers"], "function_calling")


def test_code_is_indented_by_tabs_or_spaces() -> None:
    assert names(CodeStyle(), "def f():\n\treturn 1", "code") == ["code_tabs"]
    assert names(CodeStyle(), "Here:\n```python\ndef f():\n    return 1\n```") == ["code_spaces"]
    assert names(CodeStyle(), "a list:\n  one") == []
