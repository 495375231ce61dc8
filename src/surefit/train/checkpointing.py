"""Checkpoints of a run: writing them, keeping the right ones, finding the one to go on from.

A checkpoint is copied into the host's memory between two steps and written by a thread while training goes on. There is
one such thread at a time: the next checkpoint, the end of the run and a stop signal wait for it.
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
"""Of a result besides its weights: tokenizer and settings, rounded up."""
T = TypeVar("T")
P = ParamSpec("P")


def _run_method_on_rank0(
    method: Callable[Concatenate[CheckpointWriter, P], T],
) -> Callable[Concatenate[CheckpointWriter, P], T]:
    """Let the first of several processes do it, once all are here and what they write together is complete; the others
    wait, and get what it returned."""

    @wraps(method)
    def call(saving: CheckpointWriter, /, *args: P.args, **kwargs: P.kwargs) -> T:
        barrier_with_timeout(saving.world)
        saving.together.finish()
        return run_on_rank0(saving.world, lambda: method(saving, *args, **kwargs))

    return call


class CheckpointWriter:
    """The checkpoints of one run.

    Of several processes all call the same methods, and only the first reads and writes, but for a checkpoint in parts,
    of which each writes its own (train/sharded_checkpoint.py): so a disk that is full makes all of them wait.

    Args:
        run: where they are.
        section: nothing in it is "auto".
        memory: told when a checkpoint is being taken.
        log: metrics.jsonl: on the disk before the checkpoint of the same step is.
        measured: the held-out lines of the log; the caller adds each that comes.
        on_note: called with a sentence when something unusual happened, in the thread that trains.
        world: the processes of the run.

    Attributes:
        guard: stands before every large write.
        last_good: the step of the checkpoint that this run would go on from; None as long as there is none.
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
        """Hold the run directory for this process; whatever ends the run, what is being written is finished first.

        Only a second Ctrl-C does not wait: the next run clears away what it leaves.

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
        """Compare what a run will write with what is free, before its first step.

        Args:
            parameters: those that are trained.

        Raises:
            MachineError: there is not even room for one checkpoint and the result.
        """
        weights = sum(p.nbytes for p in parameters.values())
        # AdamW's two moments, and a master of whatever is not float32 already.
        states = sum(p.numel() * (8 if p.dtype == torch.float32 else 12) for p in parameters.values())
        checkpoint = manager.estimate_checkpoint_bytes(manager.CheckpointState(parameters, {}, {})) + states
        kept = self.section.save_total_limit + (
            self.section.best_total_limit if self.section.metric_for_best_model else 0
        )
        self.guard.require(weights, checkpoint, kept + 1, weights + RESULT_FILES)

    @_run_method_on_rank0
    def await_room(self) -> None:
        """Wait until a run that is resumed has room for another checkpoint like its newest."""
        for _, path in manager.list_steps(self.run.checkpoints)[-1:]:
            needed = sum(file.stat().st_size for file in path.glob("*"))
            self.guard.write("a checkpoint", needed, lambda: None)

    def save(self, step: int, state: manager.CheckpointState) -> None:
        """Take a checkpoint; it is complete when the next call of `save` or `wait` returns.

        Args:
            state: of one in parts, this process's; else what the first process has counts.

        Raises:
            Interrupted: a stop signal came while the disk was full.
            MachineError: it cannot be written for another reason.
        """
        if state.part is None:
            self._save(step, state)
            return
        self.wait()
        with self.memory.during("save"):
            taken = self._snapshot.take(state)
        self.together.start(step, taken)

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
        """Return when the checkpoint that is being written is complete; raises as `save` does."""
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
        """Write what the run was for, once its last checkpoint is complete and there is room."""
        self._wait()
        needed = sum(p.nbytes for p in parameters.values()) + RESULT_FILES
        result = self.guard.write("the result", needed, write, self._make_room)
        self.guard.write(BEST, KIB, self._tidy)
        self._note_stuck()
        return result

    def _note_stuck(self) -> None:
        for path in self._stuck:
            self.on_note(f"{path} should be gone and cannot be deleted: the disk may fill up")
        self._stuck = []

    def _write_noting_errors(self) -> None:
        try:
            self._write()
        except BaseException as error:  # raised again by whoever waits
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
        """Delete what is not to be kept any more, and write down what the rest scored."""
        if self.last_good is None:
            return
        best_steps = [score.step for score in self._best()]
        self._stuck += manager.delete_old_checkpoints(
            self.run.checkpoints, self.section.save_total_limit, self.last_good, best_steps
        )
        metric = self.section.metric_for_best_model
        if metric is not None:
            found = best.eval_points(self._measured, metric)
            write_json(
                self.run.checkpoints / BEST,
                {
                    "metric": metric,
                    "lower_is_better": best.lower_is_better(metric),
                    "best": best_steps,
                    "scores": {str(score.step): score.value for score in found},
                },
            )

    def _make_room(self) -> None:
        """Delete all checkpoints but the last good one and the best."""
        if self.last_good is not None:
            kept = [score.step for score in self._best()[:1]]
            self._stuck += manager.delete_old_checkpoints(self.run.checkpoints, 1, self.last_good, kept)

    def _require_whole_log(self) -> None:
        """A resumed run reads its past in the log, so a checkpoint without its lines is not a whole one."""
        if self.log.flush():
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise MachineError("its lines wait for room", code="E5113", path=self.log.path) from full

    def _best(self) -> list[best.EvalPoint]:
        """The measurements whose checkpoints are kept for their score, the best first."""
        metric = self.section.metric_for_best_model
        if metric is None:
            return []
        return best.rank_checkpoints(best.eval_points(self._measured, metric), metric)[: self.section.best_total_limit]

    @_run_method_on_rank0
    def best_complete(self) -> tuple[best.EvalPoint, Path] | None:
        """The best-scored checkpoint, hashes checked; damaged ones are named and passed over. None without
        metric_for_best_model, and where nothing has a score."""
        metric = self.section.metric_for_best_model
        self._wait()
        for score in best.rank_checkpoints(best.eval_points(self._measured, metric), metric) if metric else []:
            path = self.run.checkpoints / f"step-{score.step}"
            fault = manager.find_checkpoint_damage(path, hashes=True) if path.exists() else None
            if fault is not None:
                self.on_note(f"{path.name} has the best {metric}, but it is damaged and was passed over: {fault}")
            elif path.exists():
                return score, path
        return None

    @_run_method_on_rank0
    def newest(self) -> Path | None:
        """The checkpoint that this run would go on from, once it is written."""
        self._wait()
        return None if self.last_good is None else self.run.checkpoints / f"step-{self.last_good}"

    def _left_behind(self) -> str:
        steps = [
            step
            for step, path in manager.list_steps(self.run.checkpoints)
            if not manager.find_checkpoint_damage(path, False)
        ]
        newest = self.last_good or max(steps, default=None)
        return f"the newest complete checkpoint is step-{newest}" if newest else "no checkpoint is complete yet"

    @_run_method_on_rank0
    def require_none(self) -> None:
        """Refuse to start a run where there is one.

        Raises:
            ConfigError: there are checkpoints.
        """
        if steps := manager.list_steps(self.run.checkpoints):
            raise ConfigError(
                f"there is a run here already: its newest checkpoint is step {steps[-1][0]}",
                code="E5114",
                path=self.run.path,
                field="output_dir",
                help="--resume continues it, --overwrite deletes it first, or choose another output_dir",
            )

    @_run_method_on_rank0
    def latest(self) -> manager.LatestCheckpoint:
        """The newest complete checkpoint; damaged ones are named and passed over.

        Raises:
            ModelError: there are only damaged ones.
        """
        latest = manager.latest_complete(self.run.checkpoints)
        for path, fault in latest.skipped:
            self.on_note(f"{path.name} is damaged and was skipped: {fault}")
        if latest.path is None and latest.skipped:
            raise ModelError(
                f"all {len(latest.skipped)} checkpoints are damaged: {latest.skipped[0][1]}",
                code="E5115",
                path=self.run.checkpoints,
                help="--overwrite starts anew; if the disk is failing, choose another output_dir",
            )
        self.last_good = latest.step if latest.path is not None else None
        return latest
