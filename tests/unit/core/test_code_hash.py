"""What is remembered of a run is known by a hash of SureFit's own code: another table is other code."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefit.core import packaging


@pytest.mark.parametrize("file", ["plan/step.py", "facts/attention.json", "facts/chat_templates/plain.jinja"])
def test_a_changed_module_or_table_changes_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(packaging, "__file__", str(tmp_path / "core/packaging.py"))
    path.write_text("before")
    before = packaging.code_sha256.__wrapped__()
    path.write_text("after")
    assert packaging.code_sha256.__wrapped__() != before


def test_rows_and_weights_are_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaging, "__file__", str(tmp_path / "core/packaging.py"))
    before = packaging.code_sha256.__wrapped__()
    for name in ("rows.jsonl", "model.safetensors"):
        (tmp_path / name).write_text("new")
    assert packaging.code_sha256.__wrapped__() == before


def test_every_table_that_the_code_reads_is_hashed() -> None:
    root = Path(packaging.__file__).parents[1]
    tables = [*root.glob("facts/*.json"), *root.glob("importers/schemas/*"), *root.glob("facts/chat_templates/*")]
    assert len(tables) > 20
    assert {table.suffix for table in tables} <= set(packaging.CODE_SUFFIXES)
