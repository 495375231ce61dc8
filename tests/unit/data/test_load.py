"""What a name in the config means, and the directories and samples behind it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from surefit import samples
from surefit.core.errors import DataError
from surefit.data.read.load import load_rows
from surefit.data.read.sources import is_local, resolve_source


def refused(text) -> DataError:
    with pytest.raises(DataError) as caught:
        load_rows(str(text))
    return caught.value


def test_kinds_of_sources(write, tmp_path, monkeypatch):
    path = write("a.jsonl", [{"text": "x"}])
    monkeypatch.chdir(tmp_path)
    name = next(iter(samples.list_samples()))
    kinds = {"a.jsonl": "file", str(path): "file", ".": "directory", name: "sample", "owner/name": "hub"}
    kinds |= {"owner/name:config": "hub", "owner/na.me@test": "hub"}
    assert {text: resolve_source(text).kind for text in kinds} == kinds
    assert [text for text in kinds if not is_local(text)] == ["owner/name", "owner/name:config", "owner/na.me@test"]


def test_a_missing_file_is_not_taken_for_a_hub_id(write, tmp_path, monkeypatch):
    write("data/train.jsonl", [{"text": "x"}])
    monkeypatch.chdir(tmp_path)
    for text in ("data/trian.jsonl", "data/trian", "nowhere.jsonl", "nowhere/x/y.jsonl"):
        assert is_local(text)
        error = refused(text)
        assert "no such" in error.message
        assert error.path == text
    assert "did you mean 'data/train.jsonl'" in refused("data/trian.jsonl").message
    assert "there is no directory nowhere" in refused("nowhere/x.jsonl").message
    assert "relative paths start at the current directory" in refused("nowhere/x.jsonl").help
    assert "no data is named" in refused("  ").message
    assert "no such" in refused("x\0y").message


def test_an_unknown_sample_names_the_known_ones():
    error = refused("surefit/function-caling-train")
    assert "did you mean 'surefit/function-calling-train'" in error.message
    assert "surefit/function-calling-eval" in error.help


def test_a_directory_is_read_in_the_order_of_names(write, tmp_path):
    write("d/b.jsonl", [{"text": "2"}])
    write("d/a.csv", "text\n1\n")
    for other in ("README.json", "readme.csv", ".hidden.jsonl", "LICENSE", "notes.txt"):
        write(f"d/{other}", "not data")
    rows = load_rows(str(tmp_path / "d"))
    assert [row["text"] for row in rows] == ["1", "2"]
    assert [path.name for path in rows.files] == ["a.csv", "b.jsonl"]
    assert rows.where(1) == f"{tmp_path / 'd' / 'b.jsonl'}:1"


def test_directories_that_cannot_be_meant(write, tmp_path):
    write("empty/notes.txt", "x")
    error = refused(tmp_path / "empty")
    assert "no data file" in error.message
    assert "notes.txt" in error.message
    write("mixed/train-0.jsonl", [{"text": "1"}])
    write("mixed/train-1.jsonl", [{"text": "1"}])
    assert len(load_rows(str(tmp_path / "mixed"))) == 2
    write("mixed/test.jsonl", [{"text": "2"}])
    assert "different splits: test.jsonl, train-0.jsonl" in refused(tmp_path / "mixed").message
    write("saved/state.json", "{}")
    write("saved/dataset_info.json", "{}")
    assert "Dataset.save_to_disk" in refused(tmp_path / "saved").message


def test_unknown_endings_and_special_files(write, tmp_path):
    assert "'.xlsx'" in refused(write("a.xlsx", "x")).message
    assert "no extension" in refused(write("a", "x")).message
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "not a regular file" in refused(tmp_path / "pipe.jsonl").message


def test_a_file_that_may_not_be_read(write, monkeypatch):
    path = write("a.jsonl", [{"text": "x"}])
    real = open

    def denied(file, *args, **kwargs):
        if str(file) == str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", denied)
    error = refused(path)
    assert (error.path, error.message) == (str(path), "cannot be read: Permission denied")


def test_a_sample_is_spread_evenly_and_knows_its_lines(write):
    path = write("a.jsonl", [{"text": str(n)} for n in range(10)])
    rows = load_rows(str(path))
    sample = rows.sample(4)
    assert [row["text"] for row in sample] == ["0", "2", "5", "7"]
    assert sample.where(3) == f"{path}:8"
    assert sample.sha256 == rows.sha256
    assert list(rows.sample(10)) == list(rows.sample(99)) == list(rows)


def test_the_hash_is_that_of_the_bytes(write, tmp_path):
    path = write("d/a.jsonl", [{"text": "x"}])
    alone = load_rows(str(path)).sha256
    assert alone == hashlib.sha256(path.read_bytes()).hexdigest()
    assert load_rows(str(tmp_path / "d")).sha256 == alone
    write("d/b.jsonl", [{"text": "y"}])
    assert load_rows(str(tmp_path / "d")).sha256 != alone


def test_reading_rows_imports_nothing_heavy(write):
    path = write("a.jsonl", [{"text": "x"}])
    code = (
        f"import sys; from surefit.data.read.load import load_rows; load_rows({str(path)!r});"
        "import surefit.data.rows.layouts;"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_rows_of_a_sample_are_known_by_its_name_and_not_by_where_the_package_is():
    rows = load_rows("surefit/function-calling-eval")
    assert rows.where(2) == "surefit/function-calling-eval:3"
