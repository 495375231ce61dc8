"""A look at large data: rows from everywhere, their number by estimate, and nothing that was not looked at claimed."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from surefit.core.errors import DataError
from surefit.data.read import quick_sample as module
from surefit.data.read.load import Rows, load_rows
from surefit.data.read.quick_sample import read_quick_sample

COUNT = 20_000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WHOLE_BYTES", 100_000)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    """Rows of very different lengths, the longer ones towards the end."""
    draw = random.Random(0)
    return [{"n": n, "text": "word " * draw.randint(1, 10 + n // 500)} for n in range(COUNT)]


def lines(rows: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def looked(source: object) -> Rows:
    def load() -> Rows:
        raise AssertionError("too large to be read whole")

    found = read_quick_sample(str(source), "train", load)
    assert found is not None
    return found


def error_of(rows: Rows) -> float:
    """What the estimate says of itself, as a share."""
    return float(rows.estimated.partition("± ")[2].partition("%")[0]) / 100


def test_lines_are_counted_by_a_sample_within_its_own_error(write, rows, tmp_path: Path) -> None:
    for number in range(4):
        write(f"d/{number}.jsonl", lines(rows[number * 5_000 : (number + 1) * 5_000]))
    found = looked(tmp_path / "d")
    assert 60 * 16 < len(found) <= 64 * 16
    assert found.total == pytest.approx(COUNT, rel=error_of(found))
    assert 0 < error_of(found) < 0.3
    numbers = [row["n"] for row in found]
    assert all(any(low <= n < low + 1_000 for n in numbers) for low in range(0, COUNT, 1_000)), "from everywhere"
    assert found.where(0) == f"{tmp_path}/d/0.jsonl:1"
    file, _, byte = found.where(700).rpartition(" byte ")
    with open(file, "rb") as stream:
        stream.seek(int(byte))
        assert json.loads(stream.readline()) == found[700], "the byte is where the row begins"
    assert found.sample(100).total == 100
    assert looked(tmp_path / "d").sha256 == found.sha256


def test_what_cannot_be_entered_in_the_middle_shows_its_beginning(write, rows, tmp_path: Path) -> None:
    packed = looked(write("a.jsonl.gz", gzip.compress(lines(rows[:5_000] * 6))))
    assert [row["n"] for row in packed] == list(range(1_024))
    assert packed.total == pytest.approx(30_000, rel=0.15)
    assert packed.estimated.endswith("rows (from the first 1,024)"), "of its error nothing is known"
    cells = looked(write("b.csv", b"n,text\n" + b'7,"two\nlines"\n' * COUNT))
    assert cells.total == pytest.approx(COUNT, rel=0.02)
    assert cells[3] == {"n": "7", "text": "two\nlines"}


def test_parquet_is_counted_by_its_footer(rows, tmp_path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=1_000)
    found = looked(tmp_path / "a.parquet")
    assert found.total == COUNT
    assert error_of(found) == 0
    assert len({row["n"] // 1_000 for row in found}) == 20, "from every row group"
    assert all(found.where(i) == f"{tmp_path}/a.parquet row {row['n'] + 1}" for i, row in enumerate(found))
    with (
        pa.OSFile(str(tmp_path / "b.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, pa.schema([("n", pa.int64())])) as out,
    ):
        out.write_table(pa.table({"n": range(COUNT)}), max_chunksize=1_000)
    assert looked(tmp_path / "b.arrow").total == COUNT


def test_json_is_sampled_where_it_has_lines_and_left_where_it_is_an_array(write, rows) -> None:
    assert looked(write("a.json", lines(rows))).total == pytest.approx(COUNT, rel=0.3)
    assert read_quick_sample(str(write("b.json", json.dumps(rows))), "train", lambda: pytest.fail("read")) is None


def test_what_is_small_is_read_whole(write, rows) -> None:
    path = str(write("a.jsonl", lines(rows[:500])))
    found = read_quick_sample(path, "train", lambda: load_rows(path))
    assert (len(found), found.total, found.estimated) == (500, 500, "")


def test_what_is_malformed_is_named_by_its_byte(write, rows) -> None:
    data = lines(rows)
    middle = data.index(b"\n", len(data) // 2) + 1
    path = write("a.jsonl", data[:middle] + b"{broken\n" * 3_000 + data[middle:])
    with pytest.raises(DataError, match="not valid JSON") as caught:
        looked(path)
    place, _, byte = str(caught.value.path).rpartition(" byte ")
    assert (place, caught.value.line) == (str(path), None)
    assert middle <= int(byte) < middle + 24_000
    with pytest.raises(DataError, match="a row of more than"):
        looked(write("b.jsonl", data + b'{"text": "' + b"x" * 20_000_000 + b'"}\n'))
