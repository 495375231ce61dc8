"""Checkpoints of a run: writing them, deleting old ones, finding the one to resume from.

A checkpoint is copied into host memory between two steps and written by a thread while training continues. Only one
such thread runs at a time: the next checkpoint, the end of the run and a stop signal wait for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from threading import Thread
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from surefit.checkpoint import best, manager
from surefit.checkpoint.disk_guard import DiskGuard
from surefit.checkpoint.files import find_checkpoint_damage, list_steps
from surefit.checkpoint.snapshot import Snapshot
from surefit.config.schema import CheckpointSection
from surefit.core.errors import ConfigError, MachineError, ModelError
from surefit.core.rundir import RunDir, is_full, remove_leftovers, write_json
from surefit.core.units import KIB, MIB
from surefit.parallel.process_group import World, barrier_with_timeout, run_on_rank0
from surefit.telemetry.jsonl import MetricsLog
from surefit.telemetry.memory import PhaseMemory
from surefit.train.progress import OnNote
from surefit.train.sharded_checkpoint import ShardedCheckpointWriter
from surefit.train.signals import StopRequest

BEST = "best.json"
RESULT_FILES = 8 * MIB
"""Bytes of the result's files besides its weights: tokenizer and settings, rounded up."""
T = TypeVar("T")
P = ParamSpec("P")


def _run_method_on_rank0(
    method: Callable[Concatenate[CheckpointWriter, P], T],
) -> Callable[Concatenate[CheckpointWriter, P], T]:
    """Run the method on rank 0 only, after all processes have arrived and their sharded checkpoint is complete; the
    other ranks wait, and get the value that it returned."""

    @wraps(method)
    def call(saving: CheckpointWriter, /, *args: P.args, **kwargs: P.kwargs) -> T:
        barrier_with_timeout(saving.world)
        saving.together.finish()
        return run_on_rank0(saving.world, lambda: method(saving, *args, **kwargs))

    return call


class CheckpointWriter:
    """Writer of the checkpoints of one run.

    With several processes, all call the same methods and only rank 0 reads and writes, so a full disk makes all of them
    wait. Of a sharded checkpoint each process writes its own part (train/sharded_checkpoint.py).

    Args:
        run: the run directory.
        section: `checkpoint` of the config, resolved: no setting is "auto".
        memory: gets the phase "save" while a checkpoint is copied.
        log: metrics.jsonl; it is on the disk before the checkpoint of the same step.
        measured: the held-out lines of the log; the caller appends every new one.
        on_note: called with a sentence when something unusual happened, in the training thread.
        world: the processes of the run.

    Attributes:
        guard: checks the free disk space before every large write.
        last_good: the step of the checkpoint that this run would resume from; None if there is none yet.
    """

    def __init__(
        self,
        run: RunDir,
        section: CheckpointSection,
        memory: PhaseMemory,
        log: MetricsLog,
        measured: Sequence[Mapping[str, Any]],
        on_note: OnNote,
        world: World | None = None,
    ) -> None:
        self.world = world or World()
        self.run, self.section, self.memory, self.log, self.on_note = run, section, memory, log, on_note
        self.guard = DiskGuard(run.path, on_note, left_behind=self._left_behind)
        self.last_good: int | None = None
        self._measured = measured
        self._snapshot = Snapshot(self.world.local_size)
        self._writing: Thread | None = None
        self._pending: tuple[int, manager.CheckpointState] | None = None
        self._error: BaseException | None = None
        self._stuck: list[Path] = []
        self.together = ShardedCheckpointWriter(
            self.world, run.checkpoints, self.guard, self._make_room, self._require_whole_log, self._complete
        )

    @contextlib.contextmanager
    def open(self, stop: StopRequest) -> Iterator[None]:
        """Hold the run directory for this process; however the run ends, the checkpoint in progress is finished first.

        Only a second Ctrl-C does not wait: the next run deletes the incomplete files.

        Raises:
            MachineError: another process is at work in the run directory.
        """
        if not self.world.is_first:
            with self._writing_finished():
                yield
            return
        self.guard.stopped = lambda: stop.signal_name
        with self.run.locked("train", self.on_note):
            remove_leftovers(self.run.checkpoints)
            try:
                with self._writing_finished():
                    yield
                    self._wait()
            finally:
                self.log.flush()

    @contextlib.contextmanager
    def _writing_finished(self) -> Iterator[None]:
        try:
            yield
        finally:
            if not isinstance(sys.exception(), KeyboardInterrupt):
                self.together.end()
                if self._writing is not None:
                    self._writing.join()

    @_run_method_on_rank0
    def require_room(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Check before the first step that the disk has enough free space for what the run will write.

        Args:
            parameters: the trained parameters.

        Raises:
            MachineError: one checkpoint and the result do not fit on the disk.
        """
        weights = sum(p.nbytes for p in parameters.values())
        # AdamW's two moments, and a float32 master of every parameter in another dtype.
        states = sum(p.numel() * (8 if p.dtype == torch.float32 else 12) for p in parameters.values())
        checkpoint = manager.estimate_checkpoint_bytes(manager.CheckpointState(parameters, {}, {})) + states
        kept_checkpoints = self.section.save_total_limit + (
            self.section.best_total_limit if self.section.metric_for_best_model else 0
        )
        self.guard.require(weights, checkpoint, kept_checkpoints + 1, weights + RESULT_FILES)

    @_run_method_on_rank0
    def await_room(self) -> None:
        """Wait until the disk has space for another checkpoint of the size of the newest one, before a resume."""
        for _, path in list_steps(self.run.checkpoints)[-1:]:
            needed = sum(file.stat().st_size for file in path.glob("*"))
            self.guard.write("a checkpoint", needed, lambda: None)

    def save(self, step: int, state: manager.CheckpointState) -> None:
        """Start to write a checkpoint; it is complete when the next call of `save` or `wait` returns.

        Args:
            state: this process's part of a sharded checkpoint; otherwise only rank 0's state is written.

        Raises:
            Interrupted: a stop signal came while the disk was full.
            MachineError: the checkpoint cannot be written for another reason.
        """
        if state.part is None:
            self._save(step, state)
            return
        self.wait()
        with self.memory.during("save"):
            snapshot = self._snapshot.take(state)
        self.together.start(step, snapshot)

    @_run_method_on_rank0
    def _save(self, step: int, state: manager.CheckpointState) -> None:
        self._wait()
        with self.memory.during("save"):
            self._pending = (step, self._snapshot.take(state))
        self.guard.write(
            f"step-{step}", manager.estimate_checkpoint_bytes(state), self._require_whole_log, self._make_room
        )
        self._writing = Thread(target=self._write_noting_errors, name=f"step-{step}", daemon=True)
        self._writing.start()

    @_run_method_on_rank0
    def wait(self) -> None:
        """Wait until the checkpoint in progress is complete; raises as `save` does."""
        self._wait()

    def _wait(self) -> None:
        if self._writing is None:
            return
        self._writing.join()
        self._writing, error, self._error = None, self._error, None
        if error is not None:
            if not is_full(error):
                raise error
            assert self._pending is not None
            step, state = self._pending
            self.guard.write(f"step-{step}", manager.estimate_checkpoint_bytes(state), self._write, self._make_room)
        self._note_stuck()

    @_run_method_on_rank0
    def write_result(self, parameters: Mapping[str, torch.nn.Parameter], write: Callable[[], T]) -> T:
        """Write the trained adapter or model with `write`, after the last checkpoint is complete and when it fits on
        the disk."""
        self._wait()
        needed = sum(p.nbytes for p in parameters.values()) + RESULT_FILES
        result = self.guard.write("the result", needed, write, self._make_room)
        self.guard.write(BEST, KIB, self._tidy)
        self._note_stuck()
        return result

    def _note_stuck(self) -> None:
        for path in self._stuck:
            self.on_note(f"{path} cannot be deleted: the disk may fill up")
        self._stuck = []

    def _write_noting_errors(self) -> None:
        try:
            self._write()
        except BaseException as error:  # raised again by `_wait`
            self._error = error

    def _write(self) -> None:
        assert self._pending is not None
        step, state = self._pending
        self._complete(step, lambda: manager.save_checkpoint(self.run.checkpoints, step, state))

    def _complete(self, step: int, write: Callable[[], object]) -> None:
        self.log.sync()
        write()
        self.last_good = step
        self._tidy()

    def _tidy(self) -> None:
        """Delete the checkpoints that are not to be kept, and write the scores of the others into best.json."""
        if self.last_good is None:
            return
        best_steps = [score.step for score in self._best()]
        self._stuck += manager.delete_old_checkpoints(
            self.run.checkpoints, self.section.save_total_limit, self.last_good, best_steps
        )
        metric = self.section.metric_for_best_model
        if metric is not None:
            points = best.eval_points(self._measured, metric)
            write_json(
                self.run.checkpoints / BEST,
                {
                    "metric": metric,
                    "lower_is_better": best.lower_is_better(metric),
                    "best": best_steps,
                    "scores": {str(score.step): score.value for score in points},
                },
            )

    def _make_room(self) -> None:
        """Delete all checkpoints except the last good one and the best."""
        if self.last_good is not None:
            best_steps = [score.step for score in self._best()[:1]]
            self._stuck += manager.delete_old_checkpoints(self.run.checkpoints, 1, self.last_good, best_steps)

    def _require_whole_log(self) -> None:
        """Raise if lines of metrics.jsonl are not on the disk yet: a resumed run reads its history there, so a
        checkpoint without its lines is incomplete."""
        if self.log.flush():
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise MachineError("its lines are kept until there is space", code="E5113", path=self.log.path) from full

    def _best(self) -> list[best.EvalPoint]:
        """Return the measurements for which a checkpoint is kept because of its score, the best first."""
        metric = self.section.metric_for_best_model
        if metric is None:
            return []
        return best.rank_checkpoints(best.eval_points(self._measured, metric), metric)[: self.section.best_total_limit]

    @_run_method_on_rank0
    def best_complete(self) -> tuple[best.EvalPoint, Path] | None:
        """Return the best-scored checkpoint with correct hashes; damaged ones are reported and skipped. None without
        metric_for_best_model, and where no checkpoint has a score."""
        metric = self.section.metric_for_best_model
        self._wait()
        for score in best.rank_checkpoints(best.eval_points(self._measured, metric), metric) if metric else []:
            path = self.run.checkpoints / f"step-{score.step}"
            fault = find_checkpoint_damage(path, hashes=True) if path.exists() else None
            if fault is not None:
                self.on_note(f"{path.name} has the best {metric}, but it is damaged and was skipped: {fault}")
            elif path.exists():
                return score, path
        return None

    @_run_method_on_rank0
    def newest(self) -> Path | None:
        """Return the checkpoint that this run would resume from, after it is written; None if there is none."""
        self._wait()
        return None if self.last_good is None else self.run.checkpoints / f"step-{self.last_good}"

    def _left_behind(self) -> str:
        steps = [step for step, path in list_steps(self.run.checkpoints) if not find_checkpoint_damage(path, False)]
        newest = self.last_good or max(steps, default=None)
        return f"the newest complete checkpoint is step-{newest}" if newest else "no checkpoint is complete yet"

    @_run_method_on_rank0
    def require_none(self) -> None:
        """Raise if the run directory already has checkpoints.

        Raises:
            ConfigError: there are checkpoints of an earlier run.
        """
        if steps := list_steps(self.run.checkpoints):
            raise ConfigError(
                f"the directory already contains a run: its newest checkpoint is step {steps[-1][0]}",
                code="E5114",
                path=self.run.path,
                field="output_dir",
                help="--resume continues it, --overwrite deletes it first, or choose another output_dir",
            )

    @_run_method_on_rank0
    def latest(self) -> manager.LatestCheckpoint:
        """Return the newest complete checkpoint; damaged ones are reported and skipped.

        Raises:
            ModelError: all checkpoints are damaged.
        """
        latest = manager.latest_complete(self.run.checkpoints)
        for path, fault in latest.skipped:
            self.on_note(f"{path.name} is damaged and was skipped: {fault}")
        if latest.path is None and latest.skipped:
            raise ModelError(
                f"all {len(latest.skipped)} checkpoints are damaged: {latest.skipped[0][1]}",
                code="E5115",
                path=self.run.checkpoints,
                help="--overwrite starts over; if the disk is failing, choose another output_dir",
            )
        self.last_good = latest.step if latest.path is not None else None
        return latest
