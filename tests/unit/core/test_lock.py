"""One process at a time in a run directory, by the kernel's lock."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from surefit.core import lock
from surefit.core.errors import MachineError
from surefit.core.rundir import RunDir

HOLD = """
import sys, time
from pathlib import Path
from surefit.core.rundir import RunDir
with RunDir(Path(sys.argv[1])).locked("train"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds the lock of `tmp_path`."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_process_is_refused_and_told_who_the_first_is(
    tmp_path: Path, holder: "subprocess.Popen[str]"
) -> None:
    with pytest.raises(MachineError, match="in use by `surefit train`") as caught, RunDir(tmp_path).locked("merge"):
        pytest.fail("two processes held the lock")
    assert f"process {holder.pid} on {os.uname().nodename}" in caught.value.message
    assert caught.value.exit_code == 3
    assert caught.value.path == str(tmp_path)


def test_kill_9_releases_it(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with RunDir(tmp_path).locked("train"):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_stage_inside_another_of_the_same_process_goes_on(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "new")
    with run.locked("run"):
        with run.locked("train"):
            pass
        with pytest.raises(subprocess.CalledProcessError):
            subprocess.run([sys.executable, "-c", HOLD, str(run.path)], check=True, capture_output=True)
    with run.locked("train"):
        pass


def test_a_lock_that_is_shared_names_nobody_who_held_it_before(tmp_path: Path) -> None:
    with lock.hold_lock(tmp_path / ".lock", "prepare"):
        pass
    with open(tmp_path / ".lock", "r+") as file:
        lock._take(file.fileno(), tmp_path / ".lock", "prepare", print, fcntl.LOCK_SH)
        with (
            pytest.raises(MachineError, match="in use by another process"),
            lock.hold_lock(tmp_path / ".lock", "prepare"),
        ):
            pytest.fail("a shared lock was held alone")


def test_a_file_system_without_locks_is_noted_and_the_work_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", none)
    notes: list[str] = []
    with RunDir(tmp_path).locked("train", notes.append):
        pass
    assert "does not support file locks (No locks available): do not start a second process on it" in notes[0]


def test_a_lock_file_that_says_nothing_and_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(MachineError, match="in use by another process"), RunDir(tmp_path).locked("train"):
            pass
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot write"), RunDir(tmp_path / "file").locked("train"):
        pass


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    for name in (".adapter.123.tmp", ".merged.123.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("whole" if name.endswith("old") else "half")
    (tmp_path / ".resolved.yaml.77.tmp").write_text("half")
    (tmp_path / "adapter").mkdir()
    (tmp_path / ".adapter.9.old").mkdir()
    (tmp_path / ".mine").write_text("not ours")
    with RunDir(tmp_path).locked("train"):
        pass
    # merged/ had lost its name to .old and not yet got its new one: the old is whole, so it is put back.
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".mine", "adapter", "merged"]
    assert (tmp_path / "merged" / "weights").read_text() == "whole"
