"""The second start of the same rows: what was made of them is found again, and noticed where it would be otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Surefit, row

from surefit.core.errors import EXIT_OK
from surefit.data.rows import layouts
from surefit.data.tokens import dataset_index_cache


def trained(surefit: Surefit, config: Path, name: str, *more: str) -> tuple[dict[str, Any], list[float]]:
    """What a run says of its rows, and its losses."""
    answer = surefit("train", config, "--set", f"output_dir=runs/{name}", *more, "--json")
    assert answer.code == EXIT_OK, answer.text
    lines = map(json.loads, Path("runs", name, "metrics.jsonl").read_text().splitlines())
    return answer.json["rows"], [line[key] for line in lines for key in ("loss", "eval_loss") if key in line]


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by one each time that all rows are converted."""
    calls: list[str] = []
    real = layouts.read_splits

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append("all rows")
        return real(*arguments, **options)

    monkeypatch.setattr(layouts, "read_splits", counted)
    return calls


def test_the_second_start_converts_no_training_row(surefit: Surefit, config: Path, conversions: list[str]) -> None:
    first = trained(surefit, config, "first")
    assert len(conversions) == 1
    assert trained(surefit, config, "second") == first
    assert len(conversions) == 1, "the rows were converted again"
    trained(surefit, config, "other", "--set", "data.eval=0.3")
    assert len(conversions) == 2, "other settings make other examples"


def test_changed_rows_and_changed_code_are_converted_again(
    surefit: Surefit, config: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path("rows.jsonl")
    path.write_text(path.read_text() + '{"query": "", "tools": "[]", "answers": 1}\n')
    skip = ("--set", "data.bad_rows=skip")
    first, losses = trained(surefit, config, "first", *skip)
    assert first["skipped"] == 1
    assert trained(surefit, config, "second", *skip) == (first, losses), "the row left out is counted again"
    assert len(conversions) == 1
    path.write_text(path.read_text() + json.dumps(row("nobody")) + "\n")
    trained(surefit, config, "third", *skip)
    assert len(conversions) == 2
    monkeypatch.setattr(dataset_index_cache, "code_sha256", lambda: "edited")
    trained(surefit, config, "fourth", *skip)
    assert len(conversions) == 3


def test_a_row_that_was_left_out_is_named_by_the_file_that_it_is_in_now(
    surefit: Surefit, config: Path, conversions: list[str]
) -> None:
    folder = Path("rows")
    folder.mkdir()
    Path("rows.jsonl").rename(folder / "a.jsonl")
    with (folder / "a.jsonl").open("a") as file:
        file.write('{"query": "", "tools": "[]", "answers": 1}\n')
    for name in ("a", "b"):
        if name == "b":
            (folder / "a.jsonl").rename(folder / "b.jsonl")
        more = ("--set", "data.train=rows", "--set", "data.bad_rows=skip", "--set", f"output_dir=runs/{name}")
        answer = surefit("train", config, *more)
        assert answer.code == EXIT_OK, answer.text
        assert f"rows/{name}.jsonl:" in answer.text
    assert len(conversions) == 2


def test_tokens_that_have_gone_are_made_again(surefit: Surefit, config: Path, conversions: list[str]) -> None:
    first = trained(surefit, config, "first")
    for path in Path("cache", "tokens").glob("*/meta.json"):
        path.unlink()
    assert trained(surefit, config, "second") == first
    for path in Path("cache", "starts").glob("*.json"):
        path.write_text("{")
    assert trained(surefit, config, "third") == first
    assert len(conversions) == 3
