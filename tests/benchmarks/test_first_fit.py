"""The config that `init --data` writes fits by simulation, or `init` says what does: benchmarks/first_fit.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import first_fit


@pytest.fixture
def chats(tmp_path) -> Path:
    first_fit.write_rows(tmp_path / "chats.jsonl", 400)
    return tmp_path / "chats.jsonl"


@pytest.mark.parametrize(
    ("name", "size", "written", "how"),
    [("0.5B", 8, True, "16 bits"), ("7B", 12, True, "4 bits"), ("32B", 12, False, "Qwen2.5-7B-Instruct, 4 bits")],
)
def test_some_cells(chats, name, size, written, how) -> None:
    cell = first_fit.judge_cell(chats, first_fit.write_model(chats.parent, name), size)
    assert cell["good"], cell["text"]
    assert cell["written"] is written
    assert cell["text"].startswith(how)
    assert cell["plan"]["estimate"]["high_bytes"] <= 0.97 * size * 2**30


@pytest.mark.slow
def test_every_cell(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["first_fit.py"])
    code, said = first_fit.main(), capsys.readouterr().out
    assert code == 0, said
    assert "36 of 36 fit by simulation" in said
