"""Findings D3, D5, D7 and D8 of 2026-11-25 in the sources beside data.train: data.mix, data.eval,
evaluate.extra_sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.findings.test_rendered_rows import CALL, CHATML, DROPS, REFUSES, TOOL, TRIMS, answer, model, system

from surefit.data.rows import template_checks
from surefit.stages.checking import run_check
from surefit.stages.run_context import load_run_context

KEYS = {
    "data.mix.other.jsonl": "data: {train: rows.jsonl, eval: 0.3, mix: {other.jsonl: 1.0}%s}\n",
    "data.eval": "data: {train: rows.jsonl, eval: other.jsonl%s}\n",
    "evaluate.extra_sets.more": "data: {train: rows.jsonl, eval: 0.3%s}\nevaluate: {extra_sets: {more: other.jsonl}}\n",
}


def numbered(rows: list[dict[str, Any]], start: int, count: int) -> list[dict[str, Any]]:
    """As many rows with prompts of their own."""
    made = []
    for n in range(start, start + count):
        row = json.loads(json.dumps(rows[n % len(rows)]))
        for turn in row.get("messages", ()):
            if turn["role"] == "user":
                turn["content"] = f"What is {n}+1?"
        made.append(row)
    return made


def findings(folder: Path, template: str, key: str, rows: list[dict[str, Any]], data: str = "") -> list[dict[str, Any]]:
    (folder / "model").mkdir()
    model(folder / "model", template)
    for name, made in (("rows", numbered([answer("2")], 0, 40)), ("other", numbered(rows, 100, 40))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    (folder / "run.yaml").write_text(f"model: {{name_or_path: model}}\n{KEYS[key] % data}output_dir: out\n")
    found = run_check(load_run_context(folder / "run.yaml", None))["findings"]
    return [one for one in found if one["code"].startswith(("AUD04", "TPL", "DAT001")) and one["code"] != "TPL006"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("template", "row", "codes"),
    [
        pytest.param(CHATML, answer("2"), set(), id="sound"),
        pytest.param(DROPS, system(), {"AUD040"}, id="D7-system"),
        pytest.param(CHATML, answer("2") | {"tools": [TOOL]}, {"TPL005"}, id="D7-tools"),
        pytest.param(CHATML, answer("2<|im_end|>"), {"AUD043"}, id="D5-end"),
        pytest.param(CHATML, answer("It ends with <|im_end|>, you see."), {"AUD044"}, id="D5-mention"),
        pytest.param(CHATML, answer("<think>\nHmm, and then"), {"AUD042"}, id="D8"),
    ],
)
def test_what_is_found_in_other_sources(tmp_path: Path, template: str, key: str, row: Any, codes: set[str]) -> None:
    found = findings(tmp_path, template, key, [row])
    assert {(one["code"], one["field"]) for one in found} == {(code, key) for code in codes}
    assert all("40 of 40" in one["message"] and "other.jsonl:1" in one["message"] for one in found)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("template", "row", "code"),
    [
        pytest.param(TRIMS, answer("    y = x\n    return y\n"), "AUD041", id="D7-indentation"),
        pytest.param(CHATML, answer("", tool_calls=[CALL]), "AUD040", id="D7-call"),
        pytest.param(CHATML, answer("2", reasoning_content="one and one"), "TPL009", id="D7-reasoning"),
    ],
)
def test_answers_are_only_rendered_where_there_is_a_loss(
    tmp_path: Path, template: str, key: str, row: Any, code: str
) -> None:
    found = findings(tmp_path, template, key, [row])
    expected = [] if key.startswith("evaluate.extra_sets") else [(code, key)]
    assert [(one["code"], one["field"]) for one in found] == expected


@pytest.mark.parametrize("key", KEYS)
def test_d3_refused_rows_of_other_sources(tmp_path: Path, key: str) -> None:
    found = findings(tmp_path, REFUSES, key, [system(), answer("2"), answer("3"), answer("4")])
    assert {one["code"] for one in found} == {"DAT001"}
    assert "10 of 40" in found[0]["message"]
    assert found[0]["field"] == key
    assert [(Path(one["path"]).name, one["line"]) for one in found[1:]] == [
        ("other.jsonl", n) for n in (1, 5, 9, 13, 17)
    ]
    assert {one["error"] for one in found[1:]} == {"E4136"}


@pytest.mark.parametrize("key", KEYS)
def test_d3_skipped_rows_of_other_sources(tmp_path: Path, key: str) -> None:
    rows = [system(), answer("2"), answer("3"), answer("4")]
    found = findings(tmp_path, REFUSES, key, rows, data=", bad_rows: skip")
    assert [(one["code"], one["field"]) for one in found] == [("AUD048", key)]
    assert "10 of 40" in found[0]["message"]


def test_all_rows_refused_cannot_be_skipped(tmp_path: Path) -> None:
    found = findings(tmp_path, REFUSES, "data.mix.other.jsonl", [system()], data=", bad_rows: skip")
    assert found[0]["code"] == "DAT001"
    assert found[0]["field"] == "data.mix.other.jsonl"
    assert "40 of 40" in found[0]["message"]


def test_the_sources_share_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little there is, some row of every source is looked at."""
    monkeypatch.setattr(template_checks, "SECONDS", 0.0)
    monkeypatch.setattr(template_checks, "LEAST", 1)
    found = findings(tmp_path, DROPS, "data.eval", [system()])
    assert [(one["code"], one["field"]) for one in found] == [("AUD040", "data.eval")]
    assert "1 of 1" in found[0]["message"]
