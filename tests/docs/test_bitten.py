"""Every file on the page of known failures, checked as it stands there, gets the findings that the page shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app

PAGE = Path(__file__).parents[2] / "docs" / "bitten.md"
CASE = re.compile(r'```\w+ title="([^"]+)"\n(.*?)```\n+```text\n(.*?)```', re.DOTALL)
CASES: list[tuple[str, str, str]] = CASE.findall(PAGE.read_text(encoding="utf-8"))


def write_rows(path: Path, count: int) -> None:
    turns = (
        [{"role": "user", "content": f"What is {n} + 1?"}, {"role": "assistant", "content": str(n + 1)}]
        for n in range(count)
    )
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in turns), encoding="utf-8")


@pytest.mark.parametrize(("name", "text", "findings"), CASES, ids=[case[0] for case in CASES])
def test_the_findings_of_a_case(
    name: str, text: str, findings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_rows(tmp_path / "rows.jsonl", 400)
    write_rows(tmp_path / "test.jsonl", 40)
    (tmp_path / name).write_text(text, encoding="utf-8")
    done = CliRunner().invoke(app, ["check", name], env={"COLUMNS": "400"})
    assert [line for line in findings.splitlines() if line not in done.output] == [], done.output


def test_the_page_has_cases() -> None:
    assert len(CASES) >= 6
