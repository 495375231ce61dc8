"""Where rows may lie: compressed, in many files, behind a URL, as `datasets` saved them; and what can be wrong."""

from __future__ import annotations

import gzip
import http.server
import json
import sys
import threading
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict, Features, Json, List
from pyarrow import parquet

from surefit.core.errors import DataError, MachineError
from surefit.data.read import file_io
from surefit.data.read.load import load_rows
from surefit.data.read.stream import split_into_ranges, stream_rows

ROWS = [{"text": f"row {n}: {'word ' * (n % 9)}"} for n in range(2_000)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


def rows_of(source: object) -> list[dict]:
    return [placed.row for placed in stream_rows(str(source))]


def refused(source: object, kind: type[Exception] = DataError) -> DataError:
    with pytest.raises(kind) as caught:
        rows_of(source)
    assert type(caught.value) is kind
    return caught.value


# Compressed


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("zst", zstd)])
def test_compressed_lines_and_cells(write, ending, pack):
    path = write(f"a.jsonl.{ending}", pack(LINES[:50_000]) + pack(LINES[50_000:]))
    assert rows_of(path) == ROWS
    assert [one.line for one in stream_rows(str(path))][-1] == 2_000
    assert split_into_ranges(str(path), range_bytes=1_000) == split_into_ranges(str(path)), "not divided"
    assert list(load_rows(str(path))) == ROWS
    assert rows_of(write(f"b.csv.{ending}", pack(b"text\nx\n"))) == [{"text": "x"}]
    assert rows_of(write(f"c.json.{ending}", pack(json.dumps(ROWS[:3]).encode()))) == ROWS[:3]


def test_gzip_damaged_in_the_middle_says_how_far_it_came(write):
    data = bytearray(gzip.compress(LINES, mtime=0))
    middle = len(data) // 2
    data[middle : middle + 40] = b"\xff" * 40
    error = refused(path := write("a.jsonl.gz", bytes(data)))
    assert error.path == str(path)
    assert "damaged: it cannot be decompressed after the first" in error.message
    assert "bytes of compressed data" in error.message
    assert "gzip -t" in error.help


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("zst", zstd)])
def test_a_truncated_file_gives_no_shorter_data_set(write, ending, pack):
    data = pack(LINES)
    error = refused(path := write(f"a.jsonl.{ending}", data[: len(data) * 2 // 3]))
    assert error.path == str(path)
    assert f"it ends in the middle of the first {len(data) * 2 // 3:,} bytes" in error.message


def test_a_plain_file_named_gz_and_an_empty_one(write):
    assert "cannot be decompressed" in refused(write("a.jsonl.gz", LINES)).message
    assert "the file is empty" in refused(write("b.jsonl.gz", b"")).message
    assert "no rows" in refused(write("c.jsonl.gz", gzip.compress(b""))).message
    assert "compressed internally" in refused(write("d.parquet.gz", gzip.compress(b"PAR1"))).message


@pytest.mark.slow
@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress], ids=["plain", "gz"])
def test_a_row_of_100_megabytes_is_refused_by_its_line_without_being_read(write, pack):
    name = "a.jsonl" if pack(b"") == b"" else "a.jsonl.gz"
    error = refused(path := write(name, pack(LINES + b'{"text": "' + b"x" * 100_000_000 + b'"}\n')))
    assert (error.path, error.line) == (str(path), 2_001)
    assert "a row of more than 8.0 MiB" in error.message
    cells = refused(write("a.csv", b'text\nx\n"' + b"y\n" * 5_000_000 + b'"\n'))
    assert cells.line == 3
    assert "larger than field limit" in cells.message


# Plain text


def test_text_is_a_document_a_line(write):
    path = write("a.txt", "# A title\n\n  Once upon a time.\r\nThe end.\n")
    assert rows_of(path) == [{"text": "# A title"}, {"text": "  Once upon a time."}, {"text": "The end."}]
    assert [one.line for one in stream_rows(str(path))] == [1, 3, 4]
    assert [one.first for one in split_into_ranges(str(path), range_bytes=1)] == [1, 2, 3, 4]
    graphs = write("amr.txt", "# ::snt The boy sleeps.\n(s / sleep-01)\n")
    assert rows_of(graphs) == [{"sentence": "The boy sleeps.", "graph": "(s / sleep-01)"}]
    assert len(split_into_ranges(str(graphs), range_bytes=1)) == 1


# Many files


def test_patterns(write, tmp_path):
    write("d/b.jsonl", [{"text": "2"}])
    write("d/a.jsonl", [{"text": "1"}])
    write("d/deep/er/c.jsonl.gz", gzip.compress(b'{"text": "3"}\n'))
    for other in ("d/README.json", "d/notes.txt", "d/deep/run.log"):
        write(other, "not data")
    assert rows_of(tmp_path / "d" / "*.jsonl") == [{"text": "1"}, {"text": "2"}]
    assert [row["text"] for row in rows_of(tmp_path / "d" / "**" / "*")] == ["1", "2", "3"]
    assert rows_of(tmp_path / "d" / "*.txt") == [{"text": "not data"}]
    assert [path.name for path in load_rows(str(tmp_path / "d" / "*.jsonl")).files] == ["a.jsonl", "b.jsonl"]
    assert "matches no file" in refused(tmp_path / "d" / "*.csv").message
    assert "none of them a data file" in refused(tmp_path / "d" / "deep" / "*.log").message
    write("s/train-0.jsonl", [{"text": "1"}])
    write("s/test-0.jsonl", [{"text": "1"}])
    assert "different splits" in refused(tmp_path / "s" / "*.jsonl").message


def test_an_empty_member_of_a_directory_is_named(write, tmp_path):
    write("d/a.jsonl", [{"text": "1"}])
    empty = write("d/b.jsonl", b"")
    error = refused(tmp_path / "d")
    assert (error.path, error.message) == (str(empty), "the file is empty")
    blank = write("d/b.jsonl", b"\n\n")
    error = refused(tmp_path / "d")
    assert (error.path, error.message) == (str(blank), "the file holds no rows")


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"text": ["x"], "score": ["high"]}, "'score' is text here and number there"),
        ({"text": ["x"]}, "'score' is missing here and number there"),
        ({"text": ["x"], "score": [1.0], "more": [True]}, "'more' is bool here and missing there"),
    ],
)
def test_parquet_whose_schema_changes_between_files(tmp_path, second, said):
    parquet.write_table(pa.table({"text": ["x"], "score": [1]}), tmp_path / "a.parquet")
    parquet.write_table(pa.table(second), tmp_path / "b.parquet")
    error = refused(tmp_path)
    assert error.path == str(tmp_path / "b.parquet")
    assert said in error.message
    assert str(tmp_path / "a.parquet") in error.message


def test_parquet_may_differ_in_width_and_in_nulls(tmp_path):
    parquet.write_table(pa.table({"text": ["x"], "n": pa.array([1], pa.int32())}), tmp_path / "a.parquet")
    parquet.write_table(pa.table({"text": pa.array(["y"], pa.large_string()), "n": [2.5]}), tmp_path / "b.parquet")
    parquet.write_table(pa.table({"text": ["z"], "n": pa.nulls(1)}), tmp_path / "c.parquet")
    assert rows_of(tmp_path) == [{"text": "x", "n": 1}, {"text": "y", "n": 2.5}, {"text": "z", "n": None}]


# What `datasets` saved

TOOLS = [{"name": "f", "arguments": {"a": {}}}, {"name": "g", "arguments": {"b": None}}]


def test_a_saved_data_set_keeps_its_tools_apart(tmp_path):
    features = Features({"tools": List(Json())})
    Dataset.from_dict({"tools": [TOOLS] * 3}, features=features).save_to_disk(tmp_path / "saved", num_shards=2)
    assert rows_of(tmp_path / "saved") == [{"tools": TOOLS}] * 3, "of the type Json, with the null that is theirs"
    assert next(stream_rows(str(tmp_path / "saved"))).path.endswith("data-00000-of-00002.arrow row 1")
    Dataset.from_dict({"tools": [TOOLS]}, features=features).to_parquet(tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == [{"tools": TOOLS}]
    plain = Dataset.from_list([{"tools": TOOLS[:1]}, {"tools": [{"name": "g", "arguments": {"b": "x"}}]}])
    plain.save_to_disk(tmp_path / "plain")
    assert rows_of(tmp_path / "plain")[1] == {"tools": [{"name": "g", "arguments": {"b": "x"}}]}, "no filled nulls"


def test_a_saved_data_set_of_splits(tmp_path):
    splits = {name: Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert rows_of(tmp_path / "saved") == [{"text": "train"}]
    assert list(load_rows(str(tmp_path / "saved"), split="test")) == [{"text": "test"}]
    with pytest.raises(DataError, match="no split 'dev'; it has train, test"):
        load_rows(str(tmp_path / "saved"), split="dev")
    (tmp_path / "saved" / "train" / "data-00000-of-00001.arrow").unlink()
    assert "lacks data-00000-of-00001.arrow" in refused(tmp_path / "saved").message


def test_a_damaged_arrow_file(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:30_000])
    error = refused(tmp_path / "saved")
    assert error.path == str(file)
    assert "not a readable Arrow file" in error.message


# Behind a URL


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files with and without ranges, and servers in trouble."""

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        name = self.path.partition("?")[0]
        if name in ("/401.jsonl", "/403.jsonl", "/404.jsonl", "/500.jsonl"):
            self.send_error(int(name[1:4]))
        elif name == "/slow.jsonl":
            time.sleep(3)
        elif name == "/cut.jsonl":
            self.send_response(200)
            self.send_header("Content-Length", str(len(LINES)))
            self.end_headers()
            self.wfile.write(LINES[:30_000])
        elif name == "/ranged.parquet":
            self._ranged()
        else:
            super().do_GET()

    def _ranged(self) -> None:
        data = (self.server.directory / "a.parquet").read_bytes()  # type: ignore[attr-defined]
        first, _, last = self.headers.get("Range", f"bytes=0-{len(data) - 1}")[6:].partition("-")
        part = data[int(first) : int(last or len(data)) + 1]
        self.send_response(206)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def do_HEAD(self) -> None:
        if self.path == "/ranged.parquet":
            self.send_response(200)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header(
                "Content-Length",
                str((self.server.directory / "a.parquet").stat().st_size),  # type: ignore[attr-defined]
            )
            self.end_headers()
        elif self.path[1:4].isdigit() or self.path in ("/slow.jsonl", "/cut.jsonl"):
            self.do_GET()
        else:
            super().do_HEAD()


@pytest.fixture
def web(tmp_path) -> Iterator[str]:
    from functools import partial

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path)))
    server.directory = tmp_path  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_files_on_a_web_server(write, web, tmp_path):
    write("a.jsonl", LINES)
    write("b.jsonl.gz", gzip.compress(LINES))
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=500)
    assert rows_of(f"{web}/a.jsonl") == ROWS
    assert rows_of(f"{web}/b.jsonl.gz") == ROWS
    assert rows_of(f"{web}/ranged.parquet") == ROWS
    assert [one.start for one in split_into_ranges(f"{web}/ranged.parquet", range_bytes=1)] == [0, 1, 2, 3]
    rows = load_rows(f"{web}/a.jsonl?X-Amz-Signature=secret")
    assert rows.where(1) == f"{web}/a.jsonl:2", "a signature is written nowhere"
    assert rows.files == ()


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("404", DataError, "no such file (404)"),
        ("403", DataError, "access denied (403)"),
        ("401", DataError, "access denied (401)"),
        ("500", MachineError, "500"),
    ],
)
def test_what_a_web_server_answers_is_said(web, name, kind, said):
    error = refused(f"{web}/{name}.jsonl?token=secret", kind)
    assert error.path == f"{web}/{name}.jsonl"
    assert said in error.message
    assert "secret" not in str(error)
    assert error.help


def test_a_server_that_does_not_answer(web, monkeypatch):
    monkeypatch.setattr(file_io, "READ_SECONDS", 0.3)
    assert "timed out" in refused(f"{web}/slow.jsonl", MachineError).message
    assert "cannot be read" in refused("http://127.0.0.1:9/a.jsonl", MachineError).message


def test_an_answer_that_breaks_off_is_no_shorter_data_set(web):
    error = refused(f"{web}/cut.jsonl", MachineError)
    assert error.path == f"{web}/cut.jsonl"
    assert "received 30000 of 84855 bytes" in error.message


def test_other_file_systems(monkeypatch):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/d/b.jsonl", b'{"text": "2"}\n')
    memory.pipe("/d/a.jsonl", b'{"text": "1"}\n')
    assert [row["text"] for row in rows_of("memory://d/*.jsonl")] == ["1", "2"]
    assert [row["text"] for row in rows_of("memory://d")] == ["1", "2"]
    assert rows_of("memory://d/b.jsonl") == [{"text": "2"}]
    assert "no such file" in refused("memory://d/c.jsonl").message
    assert "nowhere:// is not supported" in refused("nowhere://a/b.jsonl").message
    monkeypatch.setitem(sys.modules, "s3fs", None)
    error = refused("s3://bucket/a.jsonl", MachineError)
    assert (error.path, error.help) == ("s3://bucket/a.jsonl", "pip install s3fs")
