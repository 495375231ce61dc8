"""A full disk makes a run wait; it never ends it, and never damages a checkpoint.

Before anything large is written, the free space is compared with what it needs. Where there is too little, first what
the retention allows is deleted, then the run pauses: it says what it needs and where, looks again every few seconds,
and goes on by itself. A write that meets a full disk all the same (another process was quicker; a quota, which no free
space tells of) left nothing behind, and is tried again in the same way.
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
"""Left free besides: lines of the logs until the next checkpoint, and what a file system takes for itself."""
LOOK_SECONDS = 2.0
"""Between two looks at the free space. A write that a quota refuses is tried as often."""
T = TypeVar("T")


def free_bytes(directory: Path) -> int:
    """What this process may still write there; the directory need not exist yet."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


@dataclass
class DiskGuard:
    """Stands before every large write of a run.

    Attributes:
        directory: where is written.
        on_note: called with a sentence when the run pauses and when it goes on.
        stopped: the name of the stop signal that has come, or None; asked all the while.
        left_behind: what the user should know who stops a paused run: which checkpoint is complete.
        free, sleep, clock: of the machine; a test brings its own.
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
        """Carry out a write as soon as there is room for it.

        Args:
            what: is written, for the message.
            needed: bytes.
            write: leaves nothing behind where it meets a full disk.
            prune: deletes what is not needed any more.

        Raises:
            Interrupted: a stop signal came during the pause.
        """
        began = None
        while True:
            refused = False
            if self._short(needed):
                prune()
            if not self._short(needed):
                try:
                    result = write()
                except (MachineError, OSError) as error:
                    if not is_full(error):
                        raise
                    refused = True
                    prune()
                else:
                    self._went_on(what, began)
                    return result
            if began is None:
                began = self.clock()
                self._announce(what, needed, refused)
            self._wait(what)

    def require(self, weights: int, checkpoint: int, copies: int, result: int) -> None:
        """Compare, before the run, what it will write with what is free.

        Args:
            weights: bytes of what is trained, the least that a checkpoint holds.
            checkpoint: bytes of one at most: how small an optimizer's state is shows only once it has one.
            copies: how many are on the disk together at most.
            result: bytes of the trained adapter or model.

        Raises:
            MachineError: there is no room for even one checkpoint beside the result.
        """
        free, least, whole = self.free(self.directory), weights + result + RESERVE, copies * checkpoint + result
        sizes = f"{copies} checkpoints of {bytes_text(checkpoint)} at a time and a result of {bytes_text(result)}"
        if free < least:
            raise MachineError(
                f"the run will write {sizes}, and {bytes_text(free)} are free",
                code="E5001",
                path=self.directory,
                field="output_dir",
                help="free some space, or choose an output_dir on another disk",
            )
        if free < whole + RESERVE:
            self.on_note(
                f"the disk is too small for all the run may write, {sizes}: {bytes_text(free)} are free in "
                f"{self.directory}. It will delete old checkpoints early, and pause where that is not enough"
            )

    def _short(self, needed: int) -> bool:
        return self.free(self.directory) < needed + RESERVE

    def _announce(self, what: str, needed: int, refused: bool) -> None:
        free = bytes_text(self.free(self.directory))
        found = f"the system refused it with {free} free (a quota?)" if refused else f"{free} are free"
        self.on_note(
            f"PAUSED: {what} needs {bytes_text(needed + RESERVE)} in {self.directory}, and {found}. Delete something "
            f"on that disk, other runs for example: this one goes on by itself. Ctrl-C leaves it; {self.left_behind()}"
        )

    def _went_on(self, what: str, began: float | None) -> None:
        if began is not None:
            seconds = self.clock() - began
            self.paused_seconds += seconds
            self.on_note(f"there is room again after {duration_text(seconds)}: {what} is written")

    def _wait(self, what: str) -> None:
        name = self.stopped()
        if name is None:
            self.sleep(LOOK_SECONDS)
            name = self.stopped()
        if name is not None:
            raise Interrupted(
                f"stopped by {name} while waiting for room to write {what}; {self.left_behind()}",
                code="E5002",
                path=self.directory,
                help="free some space, then continue with --resume",
            )
