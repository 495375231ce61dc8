"""The run that the page starts on this machine: `surefit run` in a process of its own, one at a time.

The process holds the lock of a file in the workspace (`STATE/run.json`): it inherits the file's descriptor, which the
kernel closes when the process ends, however that happens. So a reloaded page, a restarted server and a second server
all see the same run, it cannot be started twice, and its process number is never another's.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.exceptions import HTTPException

from surefit.core.env import redact
from surefit.core.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_OK, EXIT_UNDECIDED, MachineError
from surefit.core.lock import LOOK_AGAIN_SECONDS, lock_holder
from surefit.core.rundir import machine_errors
from surefit.core.units import printable
from surefit.ui.workspace import STATE, Workspace

RECORD, OUTPUT = "run.json", "run.txt"
TAIL_BYTES, TAIL_LINES = 16_384, 30
"""Most that a page shows of the output."""
ENDS = {
    EXIT_OK: "finished",
    EXIT_FINDINGS: "ended with findings, or with a gate that was not passed",
    EXIT_UNDECIDED: "ended with a gate that cannot tell",
    EXIT_INTERRUPTED: "stopped; the work is saved",
    130: "interrupted",
}
"""Exit code → what it means; any other is an error."""


@dataclass(frozen=True)
class JobRecord:
    """The run that was started last.

    Attributes:
        run: its directory, as a request names it.
        command: the command, as one writes it in a terminal.
        pid: its process, which leads a group of its own; 0 while it is being started.
        running: whether the process is there.
        exit_code: None while it runs, and after the server was restarted.
    """

    run: str
    command: str
    pid: int
    running: bool = False
    exit_code: int | None = None

    @property
    def state_text(self) -> str:
        """Return what the run does, in words."""
        if self.running:
            return f"is running, process {self.pid}"
        if self.exit_code is None:
            return "ended"
        return ENDS.get(self.exit_code, f"ended with an error (exit code {self.exit_code})")


@dataclass
class JobRunner:
    """Starts and stops the run of a workspace."""

    workspace: Workspace
    process: subprocess.Popen[bytes] | None = None
    mutex: threading.Lock = field(default_factory=threading.Lock)

    def start(self, command: Sequence[str], run: str, shown: str) -> JobRecord:
        """Start a command, which then holds the lock of the record.

        Args:
            command: the program and its arguments.
            run: the run's directory, as a request names it.
            shown: the command as one writes it in a terminal.

        Raises:
            HTTPException: 409 if the last one is still running.
            MachineError: it cannot be started, or the file system has no locks.
        """
        folder = self.workspace.state_folder()
        with self.mutex, machine_errors(folder):
            descriptor = _open(folder / RECORD, os.O_RDWR | os.O_CREAT)
            try:
                _lock(descriptor)
                record = JobRecord(run, shown, 0)
                _write(descriptor, record)
                output = _open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                try:
                    # A session of its own: Ctrl-C on the server's terminal does not reach it.
                    self.process = subprocess.Popen(
                        command, cwd=self.workspace.root, stdin=subprocess.DEVNULL, stdout=output,
                        stderr=subprocess.STDOUT, start_new_session=True, pass_fds=(descriptor,),
                    )  # fmt: skip
                finally:
                    os.close(output)
                record = JobRecord(run, shown, self.process.pid, running=True)
                _write(descriptor, record)
            finally:
                os.close(descriptor)
        return record

    def last(self) -> JobRecord | None:
        """Return the run that was started last, by this server or an earlier one; None if there was none."""
        with self.mutex:
            code = self.process.poll() if self.process else None  # also frees its entry in the process table
            folder = self.workspace.root / STATE
            if folder.is_symlink():
                return None
            running = lock_holder(folder / RECORD) is not None
            try:
                descriptor = _open(folder / RECORD, os.O_RDONLY)
                try:
                    values = json.loads(os.pread(descriptor, TAIL_BYTES, 0))
                finally:
                    os.close(descriptor)
                run, command, pid = str(values["run"]), str(values["command"]), int(values["pid"])
            except (OSError, ValueError, TypeError, KeyError):
                return None
        is_child = self.process is not None and self.process.pid == pid
        return JobRecord(run, command, pid, running, code if is_child else None)

    def stop(self, run: str) -> JobRecord:
        """Send a run what Ctrl-C sends: the first ends it after the step and saves, the second ends it at once.

        Args:
            run: the run's directory, as a request names it.

        Raises:
            HTTPException: 409 if none is running, or another one.
        """
        record = self.last()
        if record is None or not record.running or record.pid <= 1:
            raise HTTPException(409, "No run that this page has started is running.")
        if record.run != run:
            raise HTTPException(409, f"{run} has ended; {record.run} is running, and was not stopped.")
        try:
            os.killpg(record.pid, signal.SIGINT)
        except ProcessLookupError:
            raise HTTPException(409, "The run has just ended.") from None
        return record

    def output_tail(self) -> list[str]:
        """Return the last lines that the run has printed."""
        return file_tail(self.workspace.root / STATE / OUTPUT)


def file_tail(path: Path) -> list[str]:
    """Return the last lines of a text file, without secrets and control characters; none if it cannot be read."""
    try:
        descriptor = _open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            data = os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES))
        finally:
            os.close(descriptor)
    except OSError:
        return []
    if size > TAIL_BYTES:
        data = data.partition(b"\n")[2]
    lines = [line.rpartition("\r")[2] for line in data.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")]
    return [printable(redact(line)).rstrip() for line in lines if line.strip()][-TAIL_LINES:]


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def _lock(descriptor: int) -> None:
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # maybe only by `lock_holder`, for a moment
            time.sleep(LOOK_AGAIN_SECONDS)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HTTPException(409, "A run is going on already; one at a time: wait for its end, or stop it.") from None
    except OSError as error:
        raise MachineError(
            f"the workspace's file system has no locks ({error.strerror}), so a run could be started twice",
            code="E1075",
            help="start it on the command line: `surefit run CONFIG`",
        ) from error


def _write(descriptor: int, record: JobRecord) -> None:
    values = {"run": record.run, "command": record.command, "pid": record.pid}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(values).encode(), 0)
