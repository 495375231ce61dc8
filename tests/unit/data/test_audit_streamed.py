"""An audit of streamed rows finds what one of rows in memory finds, however little of them is in memory at a time."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from surefit import recipes
from surefit.cli.app import app
from surefit.core.errors import MachineError
from surefit.data.audit import near_duplicates, whole
from surefit.data.audit.chunk import AuditJob
from surefit.data.audit.lengths import LengthCounts
from surefit.data.audit.passport import build_passport
from surefit.data.audit.streamed import StreamedRows
from surefit.data.audit.whole import AuditableRows, audit_rows
from surefit.data.read import disk_columns
from surefit.data.read.load import load_rows

QUESTION = AuditJob(source="", columns=(), recipe=partial(recipes.get_recipe, "chat"), recipe_name="chat")


def made() -> Iterator[dict[str, Any]]:
    """2,600 rows: every tenth twice, every eleventh nearly so, some of them without an answer."""
    draw = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for n in range(2_600):
        words = " ".join(f"w{w}" for w in draw.integers(0, 10**6, draw.integers(5, 40)))
        one = {"prompt": f"{words} {n}", "completion": f"It is {words[::-1]}."}
        if n and n % 10 == 0:
            one = rows[int(draw.integers(0, n))]
        elif n and n % 11 == 0:
            one = dict(rows[int(draw.integers(0, n))])
            one["prompt"] = f"{one['prompt']} truly"
        if n % 500 == 499:
            one = {**one, "completion": ""}
        rows.append(one)
    yield from rows


@pytest.fixture
def files(tmp_path: Path) -> Path:
    rows = list(made())
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows[:1_500]))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows[1_500:]))
    return tmp_path


def found(rows: AuditableRows, **options: Any) -> dict[str, Any]:
    return build_passport(audit_rows(rows, QUESTION, **options), rows, [], {})


def test_streamed_rows_give_the_same_passport(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = {"data.eval": load_rows(str(files / "b.jsonl")).sample(100)}
    loaded = found(load_rows(str(files)), scored=scored)
    seen = loaded["observations"]
    assert seen["duplicate"]["rows"] > 200
    assert seen["near_duplicate"]["rows"] > 150
    assert loaded["scored"]["data.eval"]["leak_exact"] > 90
    for name, small in (("ROWS_AT_ONCE", 300), ("BUCKETS", 5), ("BLOCK", 64)):
        monkeypatch.setattr(disk_columns, name, small)
    monkeypatch.setattr(near_duplicates, "HELD", 500)
    monkeypatch.setattr(whole, "CHUNK", 170)
    streamed = found(StreamedRows(str(files)), scored=scored)
    columns = streamed.pop("columns"), loaded.pop("columns")
    assert columns[0].keys() == columns[1].keys(), "counted in a sample, which need not be the same rows"
    assert streamed == loaded


def test_the_first_of_equal_and_of_similar_rows_is_the_one_that_is_named(files: Path) -> None:
    rows = list(made())
    observations = found(StreamedRows(str(files)))["observations"]
    contents = [json.dumps(one, sort_keys=True) for one in rows]
    repeated = [n for n, content in enumerate(contents) if content in contents[:n]]
    assert observations["duplicate"]["rows"] == len(repeated)
    first = contents.index(contents[repeated[0]])
    place = [f"{files / 'a.jsonl'}:{n + 1}" for n in (repeated[0], first)]
    assert observations["duplicate"]["examples"][0] == f"{place[0]}: the same as {place[1]}"


def test_places_of_every_kind_come_back(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{"text": f"row number {n} says {n * n}"} for n in range(30)] * 2)
    parquet.write_table(table, tmp_path / "a.parquet")
    seen = found(StreamedRows(str(tmp_path / "a.parquet")))["observations"]["duplicate"]
    file = tmp_path / "a.parquet"
    assert seen["examples"][0] == f"{file} row 31: the same as {file} row 1"


def test_a_sample_of_a_stream_is_spread_over_all_of_it(files: Path) -> None:
    rows = StreamedRows(str(files))
    assert (len(rows), rows.columns) == (2_600, ["prompt", "completion"])
    assert rows.sha256 == load_rows(str(files)).sha256
    few = [rows.sample(500).where(n) for n in (0, 499)]
    assert few[0] == f"{files / 'a.jsonl'}:1"
    assert int(few[1].rpartition(":")[2]) > 1_090, "of 1,100 lines in the second file"
    every = rows.sample(2_000)
    assert [every.where(n) for n in (1, 1_999)] == [load_rows(str(files)).sample(2_000).where(n) for n in (1, 1_999)]


@pytest.mark.parametrize("count", [1, 2, 7, 1_000])
def test_quantiles_are_those_of_all_lengths(count: int) -> None:
    values = np.random.default_rng(count).integers(0, 50, count)
    lengths = LengthCounts(values[: count // 2])
    lengths.add(values[count // 2 :])
    for share in (0, 0.5, 0.95, 0.99, 1):
        assert lengths.quantile(share) == np.quantile(values, share, method="higher")
    assert (len(lengths), lengths.total) == (count, values.sum())
    assert lengths.over(25) == ((values > 25).sum(), values[values > 25].sum(), values.max())


def test_a_full_temporary_directory_is_said(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(column: disk_columns.Column, values: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rows = StreamedRows(str(files))
    monkeypatch.setattr(disk_columns.Column, "append", full)
    with pytest.raises(MachineError, match="no disk space for the temporary files") as caught:
        audit_rows(rows, QUESTION)
    assert "surefit-audit-" in str(caught.value.path)
    assert "TMPDIR" in str(caught.value.help)


@pytest.mark.parametrize("limit", [7, 1_999, 2_600, 9_999])
def test_a_limit_takes_the_rows_that_a_run_takes(files: Path, limit: int) -> None:
    streamed, loaded = StreamedRows(str(files), limit=limit), load_rows(str(files)).sample(limit)
    assert [one.row for one in streamed.placed()] == list(loaded)
    assert (len(streamed), streamed.sha256) == (len(loaded), loaded.sha256)


def test_the_rows_of_a_config_are_streamed(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefit.data.read.quick_sample.WHOLE_BYTES", 1_000)
    monkeypatch.setattr("surefit.data.read.load._kept", lambda parts: pytest.fail("rows are loaded"))
    config = tmp_path / "run.yaml"
    config.write_text(
        "recipe: chat\nmodel: {name_or_path: surefit/nano}\n"
        f"data: {{train: {files / 'a.jsonl'}, eval: {files / 'b.jsonl'}, max_length: 512, limit: 1000}}\n"
        f"output_dir: {tmp_path / 'run'}\n"
    )
    assert CliRunner().invoke(app, ["audit", str(config), "--workers", "1"]).exit_code == 1, "rows of b are in a"
    passport_of = json.loads((tmp_path / "run" / "passport.json").read_text())
    assert (passport_of["rows"], passport_of["unit"]) == (1_000, "tokens")
    assert passport_of["scored"]["data.eval"]["leak_exact"] > 50
    config.write_text(config.read_text().replace("b.jsonl", "a.jsonl"))
    assert CliRunner().invoke(app, ["audit", str(config), "--workers", "1"]).exit_code == 1
    findings = json.loads((tmp_path / "run" / "passport.json").read_text())["findings"]
    assert any("the same rows as data.train" in one["message"] for one in findings)
