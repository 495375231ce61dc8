"""Guard against a full disk: it makes a run wait, but never ends it and never damages a checkpoint.

Before anything large is written, the free space is compared with the bytes it needs. Where there is too little, first
the checkpoints that retention does not keep are deleted; then the run pauses: it reports how many bytes it needs and
where, checks again every few seconds, and continues by itself. A write that meets a full disk all the same (another
process was quicker; a quota, which free space does not show) left nothing behind, and is repeated in the same way.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from surefit.core.errors import Interrupted, MachineError
from surefit.core.rundir import is_full
from surefit.core.units import MIB, bytes_text, duration_text

RESERVE = MIB
"""Bytes left free besides: log lines until the next checkpoint, and the file system's own needs."""
LOOK_SECONDS = 2.0
"""Interval between two checks of the free space, and between two tries of a write that a quota denied."""
T = TypeVar("T")


def free_bytes(directory: Path) -> int:
    """Return the bytes that this process may still write to the directory, which need not exist yet."""
    ancestor = directory.absolute()
    while not ancestor.exists():
        ancestor = ancestor.parent
    return shutil.disk_usage(ancestor).free


@dataclass
class DiskGuard:
    """Check of the free space before every large write of a run.

    Attributes:
        directory: directory that is written to.
        on_note: called with a sentence when the run pauses and when it continues.
        stopped: returns the name of the stop signal that has arrived, or None; polled during a pause.
        left_behind: returns which checkpoint is complete, for the user who stops a paused run.
        free, sleep, clock: functions of the machine; tests replace them.
    """

    directory: Path
    on_note: Callable[[str], None]
    stopped: Callable[[], str | None] = lambda: None
    left_behind: Callable[[], str] = lambda: "no checkpoint is complete"
    free: Callable[[Path], int] = free_bytes
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    paused_seconds: float = field(default=0.0, init=False)

    def write(self, what: str, needed: int, write: Callable[[], T], prune: Callable[[], object] = lambda: None) -> T:
        """Carry out a write as soon as the disk has space for it.

        Args:
            what: name of what is written, for the message.
            needed: bytes to write.
            write: must leave nothing behind when the disk is full.
            prune: deletes what is no longer needed.

        Raises:
            Interrupted: a stop signal came during the pause.
        """
        pause_start = None
        while True:
            write_failed = False
            if self._short(needed):
                prune()
            if not self._short(needed):
                try:
                    result = write()
                except (MachineError, OSError) as error:
                    if not is_full(error):
                        raise
                    write_failed = True
                    prune()
                else:
                    self._went_on(what, pause_start)
                    return result
            if pause_start is None:
                pause_start = self.clock()
                self._announce(what, needed, write_failed)
            self._wait(what)

    def require(self, weights: int, checkpoint: int, copies: int, result: int) -> None:
        """Compare, before the run, the bytes that it will write with the free bytes.

        Args:
            weights: bytes of the trained weights, the least that a checkpoint holds.
            checkpoint: upper bound of one checkpoint's bytes: an optimizer's state shows how small it is only once it
                exists.
            copies: largest number of checkpoints on the disk at the same time.
            result: bytes of the trained adapter or model.

        Raises:
            MachineError: the free space does not suffice for even one checkpoint beside the result.
        """
        free, minimum_bytes, total_bytes = (
            self.free(self.directory),
            weights + result + RESERVE,
            copies * checkpoint + result,
        )
        sizes = f"{copies} checkpoints of {bytes_text(checkpoint)} at a time and a result of {bytes_text(result)}"
        if free < minimum_bytes:
            raise MachineError(
                f"the run will write {sizes}, but only {bytes_text(free)} are free",
                code="E5001",
                path=self.directory,
                field="output_dir",
                help="free some space, or choose an output_dir on another disk",
            )
        if free < total_bytes + RESERVE:
            self.on_note(
                f"the disk is too small for everything the run may write, {sizes}: {bytes_text(free)} are free in "
                f"{self.directory}. It will delete old checkpoints early, and pause where that is not enough"
            )

    def _short(self, needed: int) -> bool:
        return self.free(self.directory) < needed + RESERVE

    def _announce(self, what: str, needed: int, refused: bool) -> None:
        free = bytes_text(self.free(self.directory))
        reason = f"the system denied it with {free} free (a quota?)" if refused else f"{free} are free"
        self.on_note(
            f"PAUSED: {what} needs {bytes_text(needed + RESERVE)} in {self.directory}, and {reason}. Delete something "
            f"on that disk, other runs for example: this one then continues. Ctrl-C stops it; {self.left_behind()}"
        )

    def _went_on(self, what: str, began: float | None) -> None:
        if began is not None:
            seconds = self.clock() - began
            self.paused_seconds += seconds
            self.on_note(f"space is available again after {duration_text(seconds)}: writing {what}")

    def _wait(self, what: str) -> None:
        name = self.stopped()
        if name is None:
            self.sleep(LOOK_SECONDS)
            name = self.stopped()
        if name is not None:
            raise Interrupted(
                f"stopped by {name} while waiting for space to write {what}; {self.left_behind()}",
                code="E5002",
                path=self.directory,
                help="free some space, then continue with --resume",
            )
