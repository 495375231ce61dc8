"""RUN/log.txt: lines with times, appended, and never a reason to end anything."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from surefit.core.run_log import WAITING_BYTES, RunLog

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4}  "


def texts(path: Path) -> list[str]:
    return [re.sub(f"^{STAMP}", "", line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_what_was_said_before_the_run_was_known_comes_first(tmp_path: Path) -> None:
    log = RunLog()
    log.say("before")
    assert not list(tmp_path.iterdir())
    log.open(tmp_path / "log.txt")
    log.say("after")
    assert texts(tmp_path / "log.txt") == ["before", "after"]
    assert all(re.match(STAMP, line) for line in (tmp_path / "log.txt").read_text().splitlines())
    again = RunLog()
    again.say("a second command")
    again.open(tmp_path / "log.txt")
    assert texts(tmp_path / "log.txt") == ["before", "after", "a second command"]


def test_further_lines_are_indented(tmp_path: Path) -> None:
    log = RunLog()
    log.open(tmp_path / "log.txt")
    log.say("one\ntwo\n")
    log.say("  \n")
    first, second = (tmp_path / "log.txt").read_text().splitlines()
    assert second == " " * (len(first) - len("one")) + "two"


def test_a_full_disk_ends_nothing_and_loses_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, path = RunLog(), tmp_path / "log.txt"
    log.open(path)
    log.say("written")
    real, room = os.write, [3, 0]

    def full(file: int, data: bytes) -> int:
        left = room.pop(0) if room else 0
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data[:left])

    monkeypatch.setattr(os, "write", full)
    log.say("half")  # three bytes of it
    log.say("not at all")
    monkeypatch.setattr(os, "write", real)
    log.say("room again")
    assert texts(path) == ["written", "half", "not at all", "room again"]


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "gone"])
def test_what_is_no_file_ends_nothing(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "place" / "log.txt"
    make: dict[str, Any] = {
        "folder": lambda: path.mkdir(parents=True),
        "link": lambda: (path.parent.mkdir(), path.symlink_to(tmp_path / "elsewhere")),
        "pipe": lambda: (path.parent.mkdir(), os.mkfifo(path)),
        "gone": lambda: None,
    }
    make[kind]()
    log = RunLog()
    log.open(path)
    log.say("text")
    assert not (tmp_path / "elsewhere").exists()


def test_what_waits_is_bounded(tmp_path: Path) -> None:
    log = RunLog()
    for number in range(5_000):
        log.say(f"line {number}")
    log.open(tmp_path / "log.txt")
    lines = texts(tmp_path / "log.txt")
    assert lines[-1] == "line 4999"
    assert (tmp_path / "log.txt").stat().st_size <= WAITING_BYTES
    assert lines[0] == f"line {5_000 - len(lines)}"
