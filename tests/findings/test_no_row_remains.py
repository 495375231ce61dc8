"""A plan for rows that are all left out is no plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import surefit
from surefit.cli.app import app
from surefit.core.errors import DataError

RUN = """recipe: chat
model: {name_or_path: surefit/nano}
data: {train: rows.jsonl, eval: 0.2, max_length: 64}
hardware: {gpu: cpu}
output_dir: run
"""


@pytest.fixture(autouse=True)
def _config() -> None:
    Path("run.yaml").write_text(RUN, encoding="utf-8")


def write_rows(*words: int) -> None:
    rows = [{"prompt": f"Row {n}: " + "word " * many, "completion": f"yes {n}"} for n, many in enumerate(words)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def plan(*options: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["plan", "run.yaml", "--quick", *options, "--json"])
    return result.exit_code, json.loads(result.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    "options",
    [(), ("--set", "data.too_long=error"), ("--set", "hardware.gpu=h100")],
    ids=["N14", "N14-error", "N14-gpu"],
)
def test_no_row_remains(options: tuple[str, ...]) -> None:
    write_rows(*range(200, 230))
    code, error = plan(*options)
    assert (code, error["error"], error["code"], error["field"]) == (2, "DataError", "E8701", "data.max_length")
    longest = int(error["help"].partition(" to ")[2].split()[0])
    assert plan("--set", f"data.max_length={longest}")[0] == 0, "the help's number is enough"


@pytest.mark.parametrize("search", [("--optimize",), ("--compare", "h100,4090")], ids=["N14-optimize", "N14-compare"])
def test_nothing_is_searched_for_no_row(search: tuple[str, ...]) -> None:
    write_rows(*range(200, 230))
    result = CliRunner().invoke(app, ["plan", "run.yaml", *search, "--json"])
    assert (result.exit_code, json.loads(result.stdout)["code"]) == (2, "E8701")


def test_python_raises_it() -> None:
    write_rows(*range(200, 230))
    with pytest.raises(DataError) as error:
        surefit.plan("run.yaml", quick=True)
    assert error.value.code == "E8701"


def test_one_short_row_among_many_is_enough() -> None:
    write_rows(*[300] * 700, 3, *[300] * 700)
    code, planned = plan()
    assert (code, planned["estimate"]["length"]) == (0, 64)
    assert planned["estimate"]["longest_row"] > 300


def test_documents_that_are_cut_remain() -> None:
    rows = [{"document": f"{n} " + "word " * 300, "summary": "yes"} for n in range(30)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    more = ["recipe=long_summarization", "data.too_long=truncate", "data.max_length=512"]
    assert plan(*(part for each in more for part in ("--set", each)))[0] == 0
