"""Several processes on this machine, one per device: the same command, with torchrun's environment variables.

Not torchrun itself, because a run that is asked to stop saves before it exits, with its own exit code: here a stop
signal is forwarded to every process, and all are waited for, while torchrun would kill all of them once the first has
exited. If a process fails, the others notice (their connections close); those that do not are killed. The verb decides
whether they are then restarted (cli/processes.py).
"""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from surefit.core import env
from surefit.core.errors import EXIT_INTERRUPTED, EXIT_LOST, EXIT_OK, EXIT_SHORT, Interrupted, MachineError
from surefit.core.processes import own_command

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
GRACE_SECONDS = 10.0
"""Seconds that the others have to end by themselves after one has failed."""
SAVING_SECONDS = 600.0
"""Seconds that the others have after one has saved and exited: rank 0 may still be writing."""
LOOK_SECONDS = 0.05
STDERR = 2


def launch_processes(
    arguments: Sequence[str],
    processes: int,
    resume_command: str,
    where: str = "from the last checkpoint",
    *,
    adapted: Mapping[str, Any] | None = None,
    aside: bool = False,
) -> int:
    """Run `surefit ARGUMENTS` in several processes, and return the exit code of the whole.

    It is `EXIT_SHORT` if they are to be restarted with less memory.

    Args:
        processes: number of processes.
        resume_command: continues the run, for the message.
        where: the point from which it continues.
        adapted: changes to their config, by dotted key (core/env.py).
        aside: redirect their stdout to stderr.

    Raises:
        MachineError: a process of rank > 0 has failed, or one was killed; with the exit code of that process.
        Interrupted: they are to be restarted, but also to stop.
    """
    group = LocalProcessGroup(own_command(*arguments), processes, adapted or {}, aside)
    with group.handing_on_signals():
        group.wait()
    code = _verdict(group.codes, group.ended_by_us, processes, resume_command, where)
    if code == EXIT_SHORT and group.stopped_by is not None:
        raise Interrupted(
            f"stopped by {group.stopped_by.name}, after memory had run out",
            code="E5008",
            help=f"continue with: {resume_command}",
        )
    return code


class LocalProcessGroup:
    """Processes that were started together.

    Attributes:
        codes: rank → exit code, negative for a signal, in the order in which they ended.
        ended_by_us: ranks that did not end by themselves.
        stopped_by: the signal that was last forwarded to them, or None.
    """

    def __init__(self, command: Sequence[str], processes: int, adapted: Mapping[str, Any], aside: bool) -> None:
        port = _free_port()
        # Sessions of their own: a Ctrl-C on the terminal reaches the launcher alone, which forwards it once.
        self.running = {
            rank: subprocess.Popen(
                command,
                env=env.child_env(rank, processes, port, adapted),
                stdin=subprocess.DEVNULL,
                stdout=STDERR if aside else None,
                start_new_session=True,
                preexec_fn=_stop_with_the_launcher if sys.platform == "linux" else None,
            )
            for rank in range(processes)
        }
        self.codes: dict[int, int] = {}
        self.ended_by_us: list[int] = []
        self.stopped_by: signal.Signals | None = None

    @contextmanager
    def handing_on_signals(self) -> Iterator[None]:
        # A signal that is ignored, as SIGHUP under nohup, stays ignored.
        forwarded = [number for number in FORWARDED_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        previous_handlers = {number: signal.signal(number, self._hand_on) for number in forwarded}
        try:
            yield
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

    def wait(self) -> None:
        """Wait for all processes; after a failure the others have `GRACE_SECONDS`, or `SAVING_SECONDS`."""
        limit = None
        while self.running:
            time.sleep(LOOK_SECONDS)
            for rank, process in list(self.running.items()):
                if process.poll() is not None:
                    self.codes[rank] = process.returncode
                    del self.running[rank]
            failed = [code for code in self.codes.values() if code != EXIT_OK]
            if failed and limit is None:
                only_saved = set(failed) == {EXIT_INTERRUPTED}
                limit = time.monotonic() + (SAVING_SECONDS if only_saved else GRACE_SECONDS)
            if limit is not None and time.monotonic() > limit:
                self._end()

    def _end(self) -> None:
        self.ended_by_us += self.running
        for process in self.running.values():
            process.kill()
            process.wait()

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self.stopped_by = signal.Signals(number)
        for process in self.running.values():
            process.send_signal(number)


def _verdict(
    codes: Mapping[int, int],
    ended_by_us: Sequence[int],
    processes: int,
    resume_command: str,
    where: str = "from the last checkpoint",
) -> int:
    """Return the exit code of the whole, from the ranks that failed by themselves and not by losing another rank."""
    failed = {rank: code for rank, code in codes.items() if code != EXIT_OK and rank not in ended_by_us}
    causes = {rank: code for rank, code in failed.items() if code not in (EXIT_INTERRUPTED, EXIT_LOST)}
    if next(iter(causes.values()), None) == EXIT_SHORT:
        return EXIT_SHORT
    primary = {rank: code for rank, code in causes.items() if code != EXIT_SHORT}
    help_text = f"fix the cause, then continue {where} with: {resume_command}"
    for rank, code in primary.items():
        if code < 0:
            name = signal.Signals(-code).name
            reason = ": the machine's memory may have run out" if name == "SIGKILL" else ""
            raise MachineError(
                f"rank {rank} of {processes} was killed by {name}{reason}; the others were stopped",
                code="E5009",
                help=help_text,
            )
    if 0 in primary:
        return primary[0]
    for rank, code in primary.items():
        error = MachineError(
            f"rank {rank} of {processes} failed, with the error above; the others were stopped",
            code="E5010",
            help=help_text,
        )
        error.exit_code = code
        raise error
    if EXIT_INTERRUPTED in failed.values():
        return EXIT_INTERRUPTED
    if failed and ended_by_us:
        hanging = " and ".join(map(str, ended_by_us))
        raise MachineError(
            f"rank {hanging} of {processes} did not respond or exit; all processes were stopped",
            code="E5011",
            field="parallel.timeout_minutes",
            help=f"if it is only slow, raise parallel.timeout_minutes; {help_text}",
        )
    if failed:
        raise MachineError(
            f"the {processes} processes lost their connection, and none reported an error", code="E5012", help=help_text
        )
    return EXIT_OK


def _free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _stop_with_the_launcher() -> None:
    """Let the kernel send this process SIGTERM when the launcher ends: it saves, and frees the GPU."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
