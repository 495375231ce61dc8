"""A checkpoint of which every process of a run writes a part, while training goes on.

Each process has a thread that writes what it holds into one directory, which has a temporary name. When all parts are
on the disk, the first process's thread renames it: the checkpoint is complete without anybody having waited.

No thread talks to another process but by files. What can fail or last (a full disk, a process that died) is settled in
the main threads, where all processes meet: at the next checkpoint, at the end, at a stop signal. There they tell each
other how it went. Whoever failed raises its error; the others notice that it is gone, as everywhere else.
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
"""Between two looks at whether all parts are there."""
SEEN_SECONDS = 180.0
"""How long a part that is on the disk may take to be seen by the first process: network file systems remember what was
not there."""
LAST_SECONDS = 5.0
"""How long the first process waits for the parts of others when the run ends with an error: they may have ended."""
FULL, FAILED = "full", "failed"


@dataclass
class _Job:
    """A checkpoint that is being written.

    Attributes:
        state: this process's part, which does not change.
        needed: bytes of all parts.
        place: the directory with the temporary name.
        error: what went wrong in this process.
        written: this process's part is on the disk, or failed.
        given_up: nobody waits for the parts any more.
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
    """The checkpoints in parts of one run: one is written at a time.

    All processes call `start` and `finish` at the same places; each may call `end` by itself.

    Args:
        world: the processes.
        checkpoints: their directory, which all processes see.
        guard: stands before every write, in the first process.
        make_room: deletes what is not needed any more; called by the first process.
        ready: called by the first process before parts are written; what it raises, a checkpoint would raise.
        complete: called by the first process, mostly in its thread, with a step and what makes its checkpoint complete.
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
        """Begin to write a checkpoint as soon as there is room for all of it.

        Args:
            state: this process's part; it must not change until `finish` returns.

        Raises:
            Interrupted: a stop signal came while the disk was full.
            MachineError: it cannot be written for another reason.
        """
        assert self._job is None
        needed = sum(all_gather(manager.estimate_checkpoint_bytes(state), self._world))
        place = run_on_rank0(
            self._world,
            lambda: self._guard.write(f"step-{step}", needed, lambda: self._begin(step), self._make_room),
        )
        job = self._job = _Job(step, state, needed, place)
        job.thread = Thread(target=self._work, args=(job,), name=f"step-{step}", daemon=True)
        job.thread.start()

    def finish(self) -> None:
        """Return when the checkpoint that is being written is complete; where there is none, at once.

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
        """Finish what this process is writing, without the others: where all of them get that far, the checkpoint is
        complete all the same."""
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
        """The thread."""
        job.error = _error_of(lambda: manager.write_part(job.place, job.state))
        job.written.set()
        if self._world.is_first and job.error is None:
            job.error = _error_of(lambda: self._commit_when_whole(job))

    def _commit_when_whole(self, job: _Job) -> None:
        while not shards.has_all_records(job.place, self._world.size):
            if job.given_up.is_set():
                shutil.rmtree(job.place, ignore_errors=True)
                raise MachineError(
                    f"not all parts of step-{job.step} can be seen by the first process",
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
        """After a full disk: all wait until there is room, and write while nobody trains."""
        if self._world.is_first:
            shutil.rmtree(job.place, ignore_errors=True)
            self._guard.write(f"step-{job.step}", job.needed, lambda: self._attempt(job), self._make_room)
            broadcast_from_rank0(None, self._world)
            return
        place: Path | None
        while (place := broadcast_from_rank0(None, self._world)) is not None:
            self._try(job, place)

    def _attempt(self, job: _Job) -> None:
        place = broadcast_from_rank0(self._begin(job.step), self._world)
        try:
            if self._try(job, place):
                full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                raise MachineError("cannot write: the disk is full", code="E5117", path=place) from full
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        self._commit(job, place)

    def _try(self, job: _Job, place: Path) -> bool:
        """Write all parts; whether the disk was too full for one of them."""
        error = _error_of(lambda: manager.write_part(place, job.state))
        faults = all_gather(_kind(error), self._world)
        if FAILED in faults:
            self._fail(error)
        return FULL in faults

    def _fail(self, error: BaseException | None) -> None:
        """Raise this process's error, or wait for the one that failed: that it has gone ends the others."""
        if error is not None and not is_full(error):
            raise error
        barrier(self._world)
        raise LostProcess(
            "another process could not write its part of a checkpoint", code="E5118", path=self._checkpoints
        )


def _error_of(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except BaseException as error:  # raised again by whoever waits
        return error
    return None


def _kind(error: BaseException | None) -> str | None:
    """What the others have to know of an error."""
    if error is None:
        return None
    return FULL if is_full(error) else FAILED
