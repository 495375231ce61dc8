"""Every file format, and every way in which a file can be broken: the message names file, line and column."""

from __future__ import annotations

import csv
import gzip
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from surefit.core.errors import DataError
from surefit.data.read import columnar, readers
from surefit.data.read.load import load_rows
from surefit.data.read.readers import MAX_DEPTH

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d\u2028e"}]
GOOD = '{"prompt": "a", "completion": "b"}'


def refused(path) -> DataError:
    with pytest.raises(DataError) as caught:
        load_rows(str(path))
    return caught.value


def test_json_lines_with_mark_crlf_blank_lines_and_no_final_newline(write):
    text = "\ufeff" + json.dumps(ROWS[0]) + "\r\n\r\n   \r\n" + json.dumps(ROWS[1], ensure_ascii=False)
    path = write("a.jsonl", text.encode())
    rows = load_rows(str(path))
    assert list(rows) == ROWS, "U+2028 is no line break"
    assert [rows.where(i) for i in range(2)] == [f"{path}:1", f"{path}:4"]
    assert rows[-1] == ROWS[1]
    assert rows[0:2] == ROWS


@pytest.mark.parametrize("text", [json.dumps(ROWS), json.dumps(ROWS, indent=2), "\n ".join(map(json.dumps, ROWS))])
def test_json_as_array_or_as_lines(write, text):
    path = write("a.json", text)
    rows = load_rows(str(path))
    assert list(rows) == ROWS
    assert rows.where(1) == (f"{path} row 2" if text.startswith("[") else f"{path}:2")


def test_json_holding_one_pretty_printed_object_is_one_row(write):
    assert list(load_rows(str(write("a.json", json.dumps(ROWS[0], indent=2))))) == ROWS[:1]


def test_csv_with_quotes_line_breaks_and_long_values(write):
    long = "x" * 200_000
    csv.field_size_limit(1000)
    path = write("a.csv", '\ufeffprompt,completion\r\n"a, ""b""\nc",d\r\n\r\n' + f"{long},e\r\n")
    rows = load_rows(str(path))
    assert list(rows) == [{"prompt": 'a, "b"\nc', "completion": "d"}, {"prompt": long, "completion": "e"}]
    assert [rows.where(i) for i in range(2)] == [f"{path}:2", f"{path}:5"]
    assert csv.field_size_limit(131_072) == 1000, "the process's own limit is put back"


def test_parquet(tmp_path):
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    rows = load_rows(str(tmp_path / "a.parquet"))
    assert list(rows) == ROWS
    assert rows.where(1) == f"{tmp_path / 'a.parquet'} row 2"


TOOLS = [
    {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
]
CALLS = [{"function": {"name": "add", "arguments": {"a": 1}}}, {"function": {"name": "weather", "arguments": {}}}]
TOOL_ROW = {
    "messages": [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "content": "3", "name": "add"},
    ],
    "tools": TOOLS,
}


def test_tools_with_different_arguments_stay_apart(write, tmp_path):
    """Arrow gives every tool every other tool's arguments, as nulls: none may reach the model."""
    table = pa.Table.from_pylist([TOOL_ROW])
    assert table.to_pylist()[0]["tools"][0]["parameters"]["properties"]["city"] is None, "the fault is there"
    parquet.write_table(table, tmp_path / "a.parquet")
    assert load_rows(str(tmp_path / "a.parquet"))[0] == TOOL_ROW
    assert load_rows(str(write("a.jsonl", [TOOL_ROW])))[0] == TOOL_ROW


def test_a_null_in_json_is_kept(write):
    row = {"tools": [{"name": "f", "default": None}], "note": None}
    assert load_rows(str(write("a.jsonl", [row])))[0] == row


@pytest.mark.parametrize(
    ("content", "line", "column", "message"),
    [
        (GOOD + '\n{"prompt": "a", "completion" "b"}\n', 2, 30, "expecting ':' delimiter"),
        (GOOD + "\n" + GOOD + "\n" + GOOD[:20] + "\n", 3, 17, "unterminated string"),
        ('{"prompt": "a",\n "completion": "b"}\n', 1, 16, "double quotes"),
        (GOOD + GOOD + "\n", 1, 35, "extra data"),
        ("{'prompt': 'a'}\n", 1, 2, "double quotes"),
        (GOOD + "\n\n[1]\n", 3, None, "must be a JSON object, not a list"),
        (GOOD + "\nnull\n", 2, None, "must be a JSON object, not null"),
        ('{"prompt": NaN}\n', 1, None, "NaN is not JSON"),
        ('{"prompt": ' + "9" * 5000 + "}\n", 1, None, "thousands of digits"),
        ('{"prompt": "\\ud83d"}\n', 1, None, "half of a surrogate pair"),
        ('{"prompt": ' + "[" * 200_000 + "]" * 200_000 + "}\n", 1, None, f"nested more than {MAX_DEPTH}"),
        ('{"prompt": ' + "[" * 120 + "]" * 120 + "}\n", 1, None, f"nested more than {MAX_DEPTH}"),
        (GOOD.encode() + b'\n{"prompt": "\xff"}\n', 2, 13, "byte 0xff"),
        (GOOD.encode() + b'\n{"prompt": "gr\xc3', 2, 15, "byte 0xc3"),
    ],
)
def test_broken_json_lines(write, content, line, column, message):
    path = write("a.jsonl", content)
    error = refused(path)
    assert error.path == str(path)
    assert error.line == line
    assert message in error.message
    assert (f"(column {column})" in error.message) == (column is not None), error.message


def test_a_file_that_ends_inside_a_character_says_so(write):
    assert "complete" in refused(write("a.jsonl", b'{"a": "gr\xc3')).help
    assert "save the file as UTF-8" in refused(write("b.jsonl", b'{"a": "gr\xc3"}\n')).help


def test_surrogate_pairs_and_depth_within_the_limit_are_fine(write):
    row = {"prompt": "\U0001f600", "deep": None}
    for _ in range(MAX_DEPTH - 2):
        row["deep"] = [row["deep"]]
    assert load_rows(str(write("a.jsonl", [row])))[0] == row


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ('[\n {"a": 1},\n {"a": 2,}\n]', 3, "double quotes"),
        ('[{"a": 1}, 7]', None, "row must be a JSON object, not a number"),
        ('{"a": 1}\n{"a": \n', 2, "expecting value"),
        ("7", None, "row must be a JSON object, not a number"),
        ("hello", 1, "expecting value"),
        ('[{"a": Infinity}]', None, "Infinity is not JSON"),
        ("[" * 100_000, None, "nested more than"),
        (b'[{"a": "x"},\n {"a": "\xe4"}]', 2, "byte 0xe4 (column 9)"),
        ("[]", None, "holds no rows"),
    ],
)
def test_broken_json(write, content, line, message):
    path = write("a.json", content)
    error = refused(path)
    assert error.path.startswith(str(path))
    assert error.line == line
    assert message in error.message


def test_an_array_row_is_named_by_its_number(write):
    assert refused(write("a.json", '[{"a": 1}, 7]')).path.endswith("a.json row 2")


def test_a_json_array_with_the_wrong_ending_is_told_the_right_one(write):
    assert "extension .json" in refused(write("a.jsonl", json.dumps(ROWS))).help
    assert "extension .json" in refused(write("b.jsonl", json.dumps(ROWS, indent=2))).help


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("a,b\n1,2\n1\n", 3, "1 values where the header names 2 columns"),
        ("a,b\n1,2,3\n", 2, "3 values where the header names 2 columns"),
        ('a,b\n1,"2\n3,4\n', 2, "unexpected end of data"),
        ('a,b\n"1"x,2\n', 2, "expected after"),
        ("a;b\n1;2\n", 1, "separated by semicolons"),
        ("a,a\n1,2\n", 1, "names the column 'a' twice"),
        (b"a,b\n1,2\n3,\xe4\n", 3, "byte 0xe4 (column 3)"),
        ("a,b\n", None, "holds no rows"),
    ],
)
def test_broken_csv(write, content, line, message):
    path = write("a.csv", content)
    error = refused(path)
    assert (error.path, error.line) == (str(path), line)
    assert message in error.message


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(GOOD.encode(), mtime=0), "compressed with gzip"),
        (b"PK\x03\x04rest", "a ZIP archive"),
        (b"PAR1rest", "a Parquet file"),
        (GOOD.encode("utf-16"), "UTF-16"),
        (b"\x7fELF\0\0\0", "binary data"),
        (b"", "the file is empty"),
    ],
)
def test_other_kinds_of_files(write, name, content, message):
    path = write(name, content)
    error = refused(path)
    assert error.path == str(path)
    assert message in error.message


def test_blank_files_hold_no_rows(write):
    assert "no rows" in refused(write("a.jsonl", "\n  \n")).message


@pytest.mark.parametrize("keep", [4, 60])
def test_truncated_parquet(tmp_path, keep):
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data[:keep])
    error = refused(tmp_path / "a.parquet")
    assert error.path == str(tmp_path / "a.parquet")
    assert "not a readable Parquet file" in error.message


def test_values_that_python_cannot_hold_are_the_files_fault(tmp_path):
    """A date beyond the year 9999, and a text that is no UTF-8: Parquet takes both."""
    late = pa.array([2**63 - 1], pa.timestamp("us"))
    parquet.write_table(pa.table({"prompt": ["a"], "when": late}), tmp_path / "late.parquet")
    broken = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe"))
    parquet.write_table(pa.table({"prompt": broken}), tmp_path / "broken.parquet")
    for name, told in (("late", "date value out of range"), ("broken", "can't decode byte 0xff")):
        error = refused(tmp_path / f"{name}.parquet")
        assert error.path == str(tmp_path / f"{name}.parquet")
        assert told in error.message


def test_a_line_of_20_megabytes_is_refused_by_its_bytes(write, monkeypatch):
    """Tokenised, one such row took 8.3 GB."""
    path = write("a.jsonl", GOOD + "\n" + json.dumps({"prompt": "x" * 20_000_000, "completion": "b"}) + "\n")
    error = refused(path)
    assert (error.path, error.line) == (str(path), 2)
    assert "a row of more than 8.0 MiB" in error.message


def dictionary(text: str, rows: int) -> pa.Table:
    return pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), [text])})


def test_one_text_said_again_and_again_is_counted_before_it_is_unpacked(tmp_path, monkeypatch):
    """The formula's figure, 1,000,000 × (250 + 60 + 100) bytes, from a file of some kilobytes."""
    path = tmp_path / "bomb.parquet"
    parquet.write_table(dictionary("x" * 100, 1_000_000), path)
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(readers, "available_row_bytes", lambda: 400_000_000)
    monkeypatch.setattr(columnar, "count_characters", lambda row: pytest.fail("a row was unpacked"))
    error = refused(path)
    assert error.path == str(path)
    assert "its 1,000,000 rows take at least 391.0 MiB of memory once decoded" in error.message
    assert "only 381.5 MiB" in error.message
    monkeypatch.undo()
    parquet.write_table(dictionary("x" * 100, 1_000), path)
    assert len(load_rows(str(path))) == 1_000


def test_a_text_of_20_megabytes_is_refused_before_it_is_unpacked(tmp_path):
    """Unpacked at once, a thousand of them took more than 12 GiB."""
    path = tmp_path / "long.parquet"
    parquet.write_table(dictionary("y" * 20_000_000, 1_000), path)
    error = refused(path)
    assert "a row of more than 8.0 MiB" in error.message
    assert f"{path}, column 'text'" == error.path


def test_texts_inside_lists_and_structs_are_counted(tmp_path, monkeypatch):
    path = tmp_path / "nested.parquet"
    rows = [{"messages": [{"role": "user", "content": "z" * 1_000}] * 10}] * 100
    parquet.write_table(pa.Table.from_pylist(rows), path)
    (batch,) = parquet.ParquetFile(path, read_dictionary=columnar._leaves(parquet.read_metadata(path))).iter_batches()
    assert columnar._batch_bytes(batch, "") == 100 * 250 + 2_000 * 60 + 1_000 * (1_000 + len("user"))
