"""Ranges of a source: together they are its rows with their places, however they are cut."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from surefit.core.errors import DataError
from surefit.data.read.load import load_rows
from surefit.data.read.stream import RowRange, read_range, split_into_ranges, stream_rows


def lines(count: int) -> str:
    return "".join(json.dumps({"text": f"{n} {'ä' * (n % 37)}"}, ensure_ascii=False) + "\n" for n in range(count))


def read(source: object, **options: int) -> list:
    return [placed for one in split_into_ranges(str(source), **options) for placed in read_range(one)]


@pytest.mark.parametrize("size", [1, 17, 60, 1000, 5_000, 10**9])
@pytest.mark.parametrize("end", ["", "\n", "\n\n\n", "{}"])
def test_ranges_of_lines_are_all_lines_once_with_their_numbers(write, size, end):
    path = write("a.jsonl", lines(300) + end)
    whole = list(stream_rows(str(path)))
    cut = split_into_ranges(str(path), range_bytes=size)
    assert [one for part in cut for one in read_range(part)] == whole
    assert [one.line for one in whole] == list(range(1, len(whole) + 1))
    data = path.read_bytes()
    if len(cut) > 1:
        assert [one.start for one in cut[1:]] == [one.stop for one in cut[:-1]]
        assert cut[-1].stop == len(data)
        assert all(data[one.start - 1 : one.start] == b"\n" for one in cut[1:])
        assert [one.first for one in cut] == [1 + data[: one.start].count(b"\n") for one in cut]
        assert all(one.stop - one.start >= size for one in cut[:-1])


def test_a_block_border_changes_nothing(write, monkeypatch):
    """Line ends are looked for block by block: here every block is smaller than a line."""
    path = write("a.jsonl", lines(200))
    expected = split_into_ranges(str(path), range_bytes=500)
    monkeypatch.setattr("surefit.data.read.stream.MIB", 7)
    assert split_into_ranges(str(path), range_bytes=500) == expected


def test_ranges_of_parquet_are_row_groups(tmp_path):
    table = pa.Table.from_pylist([{"text": str(n)} for n in range(100)])
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path, row_group_size=7)
    cut = split_into_ranges(str(path), range_bytes=1)
    assert [(one.start, one.stop, one.first) for one in cut[:2]] == [(0, 1, 1), (1, 2, 8)]
    assert len(cut) == 15
    assert [one for part in cut for one in read_range(part)] == list(stream_rows(str(path)))
    assert read_range(cut[-1]).__next__().path == f"{path} row 99"
    assert split_into_ranges(str(path), range_bytes=sys.maxsize) == [RowRange(str(path))]


def test_memory_stays_flat(tmp_path, write):
    """Rows are not kept: what Python holds while it reads 20 MB is a few rows and a buffer."""
    import tracemalloc

    path = write("a.jsonl", (json.dumps({"text": "x" * 2_000}) + "\n") * 10_000)
    tracemalloc.start()
    count = sum(1 for _ in stream_rows(str(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 10_000
    assert peak < 4_000_000


def test_samples_keep_their_name():
    (one,) = split_into_ranges("surefit/function-calling-eval")
    assert Path(one.file).is_file()
    assert next(read_range(one)).path == "surefit/function-calling-eval"


def test_load_rows_refuses_what_does_not_fit(write, monkeypatch):
    monkeypatch.setattr("surefit.data.read.load.available_row_bytes", lambda: 100_000)
    path = write("a.jsonl", lines(1_000))
    with pytest.raises(DataError) as caught:
        load_rows(str(path))
    assert "its first 302 rows take 97.7 KiB" in caught.value.message  # 250 + 60 and some 20 characters each
    assert "surefit prepare" in caught.value.help
    assert caught.value.line == 302
    assert sum(1 for _ in stream_rows(str(path))) == 1_000
