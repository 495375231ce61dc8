"""Artefacts are written whole or not at all, and the operating system's refusals become instructions."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from surefit.core import rundir
from surefit.core.errors import DataError, MachineError
from surefit.core.rundir import (
    RunDir,
    append_jsonl,
    directory_atomic,
    file_sha256,
    flush_jsonl,
    is_full,
    machine_errors,
    read_json,
    read_jsonl,
    remove_leftovers,
    write_atomic,
    write_json,
)


def test_write_atomic_replaces_whole_files_and_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.txt"
    write_atomic(path, "one")
    write_atomic(path, b"two")
    assert path.read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_atomic(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rundir.os, "fsync", full)
    with pytest.raises(MachineError, match="No space left") as caught:
        write_atomic(path, "new")
    assert "free some space" in str(caught.value)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_directory_atomic_replaces_or_leaves_alone(tmp_path: Path) -> None:
    target = tmp_path / "merged"
    with directory_atomic(target) as directory:
        (directory / "sub").mkdir()
        (directory / "sub" / "weights").write_text("1")

    def broken() -> None:
        with directory_atomic(target) as directory:
            (directory / "weights").write_text("2")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        broken()
    assert (target / "sub" / "weights").read_text() == "1"
    with directory_atomic(target) as directory:
        (directory / "weights").write_text("3")
    assert [p.name for p in target.iterdir()] == ["weights"]
    assert [p.name for p in tmp_path.iterdir()] == ["merged"]


def test_jsonl_survives_a_cut_last_line_but_not_a_damaged_middle(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    append_jsonl(path, {"step": 1})
    append_jsonl(path, {"step": 2, "note": "a\u2028b\x85c"})
    with open(path, "a") as file:
        file.write('{"step": 3, "lo')
    assert read_jsonl(path) == [{"step": 1}, {"step": 2, "note": "a\u2028b\x85c"}]
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(DataError) as caught:
        read_jsonl(path)
    assert caught.value.line == 2
    assert read_jsonl(tmp_path / "absent") == []


def test_json_artefacts(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"é": 1})
    assert read_json(tmp_path / "a.json") == {"é": 1}
    with pytest.raises(DataError, match="run the stage"):
        read_json(tmp_path / "b.json")
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "c.json", float("nan"))
    assert not (tmp_path / "c.json").exists()


def test_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="file"):
        RunDir(tmp_path / "file" / "run").create()
    with pytest.raises(MachineError):
        RunDir(tmp_path / "file").create()
    if os.geteuid() == 0:
        # Root ignores permission bits; /proc refuses everyone.
        with pytest.raises((MachineError, OSError)):
            RunDir(Path("/proc/surefit")).create()
    else:
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(MachineError, match="Permission denied"):
            RunDir(tmp_path / "locked" / "run").create()


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    for read in (read_json, read_jsonl):
        with pytest.raises(DataError, match="cannot be read: Is a directory"):
            read(tmp_path)


def test_a_log_cut_inside_a_character_and_one_with_an_odd_line_end(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes('{"a": "x\u2028y"}\n{"b": "é'.encode()[:-1])
    assert read_jsonl(path) == [{"a": "x\u2028y"}]


def test_file_sha256_is_what_sha256sum_prints(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    # FIPS 180-2, appendix B.1.
    assert file_sha256(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_full_disk_keeps_lines_back_whole_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    append_jsonl(path, {"step": 1})
    write = os.write

    def cut_short(descriptor: int, data: bytes) -> int:
        if len(data) <= 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:5])

    monkeypatch.setattr(rundir.os, "write", cut_short)
    append_jsonl(path, {"step": 2})
    append_jsonl(path, {"step": 3})
    assert path.read_bytes() == b'{"step": 1}\n', "no half line"
    assert flush_jsonl(path) == 2 * len('{"step": 2}\n')
    monkeypatch.undo()
    append_jsonl(path, {"step": 4})
    assert [record["step"] for record in read_jsonl(path)] == [1, 2, 3, 4]
    assert flush_jsonl(path) == 0


def test_another_fault_than_a_full_disk_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError) as caught:
        append_jsonl(tmp_path / "file" / "log.jsonl", {"step": 1})
    assert not is_full(caught.value)
    assert flush_jsonl(tmp_path / "file" / "log.jsonl") == 0


def test_a_line_cut_short_by_a_crash_does_not_damage_the_next(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    append_jsonl(path, {"step": 2})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_full_disk_is_the_machines_in_whatever_class_a_library_says_it(tmp_path: Path) -> None:
    """safetensors and tokenizers are written in Rust: only the words of their errors tell."""

    class SafetensorError(Exception):
        pass

    for error in (
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),
    ):
        with (
            pytest.raises(MachineError, match="cannot write: No space left") as caught,
            directory_atomic(tmp_path / "m"),
        ):
            raise error
        assert is_full(caught.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SafetensorError), machine_errors(tmp_path):
        raise SafetensorError("header too large")


def test_a_pipe_in_place_of_an_artefact_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "metrics.jsonl"
    os.mkfifo(pipe)
    for read in (read_json, read_jsonl):
        with pytest.raises(DataError, match="cannot be read: not a regular file"):
            read(pipe)
    with pytest.raises(MachineError, match="not a regular file"):
        append_jsonl(pipe, {"step": 1})
    with pytest.raises(OSError, match="not a regular file"):
        file_sha256(pipe)


def test_a_folder_in_place_of_a_log_is_the_machines_error(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(MachineError, match="cannot write: Is a directory") as caught:
        append_jsonl(tmp_path / "events.jsonl", {"stage": "report"})
    assert caught.value.path == str(tmp_path / "events.jsonl")


@pytest.mark.parametrize("text", ["[" * 5_000, "[" * 150 + "]" * 150, '{"a": ' * 30_000])
def test_deep_json_in_an_artefact_is_damage(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match="not valid JSON"):
        read_json(path)
    path.write_text(f"{text}\n{{}}\n")
    with pytest.raises(DataError, match="not valid JSON"):
        read_jsonl(path)


def test_a_name_that_is_not_utf8_can_be_written_and_read_again(tmp_path: Path) -> None:
    name = os.fsdecode(b"rows-\xff.jsonl")
    append_jsonl(tmp_path / "log.jsonl", {"file": name})
    write_json(tmp_path / "a.json", {"file": name})
    assert read_jsonl(tmp_path / "log.jsonl")[0]["file"] == read_json(tmp_path / "a.json")["file"] == name


def test_what_a_killed_export_left_goes_with_the_next_lock(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    left = run.exports / ".hub.999999.tmp"
    left.mkdir(parents=True)
    with run.locked("export"):
        assert not left.exists()
    elsewhere = tmp_path / ".out.999999.tmp"
    elsewhere.mkdir()
    assert remove_leftovers(tmp_path, of="out") == []
    assert elsewhere.exists(), "whoever writes there now is not disturbed"
    os.utime(elsewhere, (0, 0))
    remove_leftovers(tmp_path, of="other")
    assert elsewhere.exists()
    remove_leftovers(tmp_path, of="out")
    assert not elsewhere.exists()
