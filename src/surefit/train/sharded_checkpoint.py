"""Sharded checkpoints: every process of a run writes its part while training continues.

Each process has a thread that writes its tensors into one directory with a temporary name. When all parts are on the
disk, rank 0's thread renames the directory: the checkpoint is complete, and no process had to wait.

The threads communicate with other processes through files only. Failures and delays (a full disk, a process that died)
are handled in the main threads, where all processes synchronize: at the next checkpoint, at the end, at a stop signal.
There they exchange their results. A process that failed raises its error; the others detect that it has ended, as
everywhere else.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

from surefit.checkpoint import manager, shards
from surefit.checkpoint.disk_guard import DiskGuard
from surefit.core.errors import LostProcess, MachineError
from surefit.core.rundir import is_full
from surefit.parallel.process_group import World, all_gather, barrier, broadcast_from_rank0, run_on_rank0

LOOK_SECONDS = 0.02
"""Seconds between two checks whether all parts exist."""
SEEN_SECONDS = 180.0
"""Seconds that a part on the disk may need to become visible to rank 0: network file systems cache the absence of a
file."""
LAST_SECONDS = 5.0
"""Seconds that rank 0 waits for the parts of other processes when the run ends with an error: they may have ended."""
FULL, FAILED = "full", "failed"


@dataclass
class _Job:
    """A sharded checkpoint that is being written.

    Attributes:
        state: this process's part; it must not change.
        needed: bytes of all parts.
        place: the directory with the temporary name.
        error: the exception in this process, if any.
        written: set when this process's part is on the disk, or has failed.
        given_up: set when no thread is to wait for the parts any longer.
    """

    step: int
    state: manager.CheckpointState
    needed: int
    place: Path
    error: BaseException | None = None
    written: Event = field(default_factory=Event)
    given_up: Event = field(default_factory=Event)
    thread: Thread = field(init=False)


class ShardedCheckpointWriter:
    """Writer of the sharded checkpoints of one run, one at a time.

    `start` and `finish` are collective: all processes call them in the same order. `end` is not.

    Args:
        world: the processes of the run.
        checkpoints: the checkpoint directory, which all processes see.
        guard: checks the free disk space before every write, in rank 0.
        make_room: deletes checkpoints that are not needed any more; called by rank 0.
        ready: called by rank 0 before parts are written; may raise to prevent the checkpoint.
        complete: called by rank 0, usually in its thread, with a step and the function that commits its checkpoint.
    """

    def __init__(
        self,
        world: World,
        checkpoints: Path,
        guard: DiskGuard,
        make_room: Callable[[], None],
        ready: Callable[[], None],
        complete: Callable[[int, Callable[[], object]], None],
    ) -> None:
        self._world, self._checkpoints, self._guard = world, checkpoints, guard
        self._make_room, self._ready, self._complete = make_room, ready, complete
        self._job: _Job | None = None

    def start(self, step: int, state: manager.CheckpointState) -> None:
        """Start to write a checkpoint as soon as the disk has space for all of it.

        Args:
            state: this process's part; it must not change until `finish` returns.

        Raises:
            Interrupted: a stop signal came while the disk was full.
            MachineError: the checkpoint cannot be written for another reason.
        """
        assert self._job is None
        needed = sum(all_gather(manager.estimate_checkpoint_bytes(state), self._world))
        directory = run_on_rank0(
            self._world,
            lambda: self._guard.write(f"step-{step}", needed, lambda: self._begin(step), self._make_room),
        )
        job = self._job = _Job(step, state, needed, directory)
        job.thread = Thread(target=self._work, args=(job,), name=f"step-{step}", daemon=True)
        job.thread.start()

    def finish(self) -> None:
        """Wait until the checkpoint in progress is complete; return at once if there is none.

        Raises:
            Interrupted, MachineError: as `start`.
        """
        job = self._job
        if job is None:
            return
        job.written.wait()
        error = job.error
        faults = all_gather(_kind(error), self._world)
        if not any(faults):
            job.thread.join(SEEN_SECONDS)
            job.given_up.set()
            job.thread.join()
            error = job.error
            faults = [broadcast_from_rank0(_kind(error), self._world)]
        job.given_up.set()
        self.end()
        if FAILED in faults:
            self._fail(error)
        if FULL in faults:
            self._again(job)

    def end(self) -> None:
        """Finish this process's part without waiting for the others; if all of them finish theirs, the checkpoint is
        complete nevertheless."""
        job, self._job = self._job, None
        if job is None:
            return
        job.written.wait()
        job.thread.join(0 if job.error else LAST_SECONDS)
        job.given_up.set()
        job.thread.join()

    def _begin(self, step: int) -> Path:
        self._ready()
        return manager.begin_sharded_checkpoint(self._checkpoints, step)

    def _work(self, job: _Job) -> None:
        """Write this process's part in its thread; rank 0 then commits the checkpoint."""
        job.error = _error_of(lambda: manager.write_part(job.place, job.state))
        job.written.set()
        if self._world.is_first and job.error is None:
            job.error = _error_of(lambda: self._commit_when_whole(job))

    def _commit_when_whole(self, job: _Job) -> None:
        while not shards.has_all_records(job.place, self._world.size):
            if job.given_up.is_set():
                shutil.rmtree(job.place, ignore_errors=True)
                raise MachineError(
                    f"the first process cannot see all parts of step-{job.step}",
                    code="E5116",
                    path=job.place,
                    help="all machines of a run must see the same output_dir",
                )
            time.sleep(LOOK_SECONDS)
        self._commit(job, job.place)

    def _commit(self, job: _Job, place: Path) -> None:
        try:
            self._complete(job.step, lambda: manager.commit_sharded_checkpoint(place, job.step, job.state))
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _again(self, job: _Job) -> None:
        """Retry after a full disk: all processes wait until there is space, and write while training is paused."""
        if self._world.is_first:
            shutil.rmtree(job.place, ignore_errors=True)
            self._guard.write(f"step-{job.step}", job.needed, lambda: self._attempt(job), self._make_room)
            broadcast_from_rank0(None, self._world)
            return
        place: Path | None
        while (place := broadcast_from_rank0(None, self._world)) is not None:
            self._try(job, place)

    def _attempt(self, job: _Job) -> None:
        directory = broadcast_from_rank0(self._begin(job.step), self._world)
        try:
            if self._try(job, directory):
                full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                raise MachineError("cannot write: the disk is full", code="E5117", path=directory) from full
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._commit(job, directory)

    def _try(self, job: _Job, place: Path) -> bool:
        """Write all parts; return whether the disk was too full for one of them."""
        error = _error_of(lambda: manager.write_part(place, job.state))
        faults = all_gather(_kind(error), self._world)
        if FAILED in faults:
            self._fail(error)
        return FULL in faults

    def _fail(self, error: BaseException | None) -> None:
        """Raise this process's error, or wait for the process that failed: its end also ends the others."""
        if error is not None and not is_full(error):
            raise error
        barrier(self._world)
        raise LostProcess(
            "another process could not write its part of a checkpoint", code="E5118", path=self._checkpoints
        )


def _error_of(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except BaseException as error:  # raised again by the thread that waits
        return error
    return None


def _kind(error: BaseException | None) -> str | None:
    """Return the kind of an error, which the other processes need to know; None without an error."""
    if error is None:
        return None
    return FULL if is_full(error) else FAILED
