"""The worst case first: the fullest batch, a measurement and a checkpoint, before the first step, leaving no trace.

What would stop a run hours later stops it now: too little memory for the longest rows, a loss that is not finite, a
disk that cannot be written to or gives back something else.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from surefit.checkpoint import manager
from surefit.checkpoint.shards import CheckpointShard
from surefit.checkpoint.snapshot import build_checkpoint_state
from surefit.config.schema import Config
from surefit.core.errors import GateError, MachineError
from surefit.core.rundir import RunDir, machine_errors, write_json
from surefit.core.units import bytes_text, duration_text
from surefit.data.tokens.collate import count_batch_tokens
from surefit.model.finite import explain_non_finite
from surefit.parallel.engine import SINGLE, Engine
from surefit.parallel.process_group import World, all_gather, barrier, run_on_rank0
from surefit.parallel.shard_ranges import LazyTensors, read_flat_range
from surefit.telemetry.memory import PhaseMemory
from surefit.train.batches import MicroBatcher
from surefit.train.optim import MasterOptimizer
from surefit.train.scaling import LossScale
from surefit.train.step import mean_loss, train_step


@dataclass(frozen=True)
class DryPassResult:
    """What the worst case took.

    Attributes:
        tokens: of the fullest micro batch, padding not counted.
        micro_batches: how often it was run before the update: twice where gradients stay while the next one runs.
        loss: of it, in nats.
        step_seconds: forward, backward and update, with all that a first time costs.
        eval_tokens, eval_seconds: of the fullest held-out batch; 0 where there is none.
        eval_batches: how many a measurement has.
        save_seconds, load_seconds, checkpoint_bytes: of one checkpoint.
        phases: the memory of each part, as telemetry/memory.py has it; of several processes, of the fullest.
        rank: the fullest process's; None where there is one.
    """

    tokens: int
    micro_batches: int
    loss: float
    step_seconds: float
    eval_tokens: int
    eval_seconds: float
    eval_batches: int
    save_seconds: float
    load_seconds: float
    checkpoint_bytes: int
    phases: dict[str, dict[str, int]]
    rank: int | None = None

    def write(self, run: RunDir) -> None:
        """Into dry_pass.json and events.jsonl."""
        write_json(run.dry_pass, asdict(self))
        run.note("train", "dry pass", **asdict(self))

    def text(self, planned: Mapping[str, Any] | None = None) -> str:
        """One line; `planned` is the content of plan.json."""
        return (
            f"dry pass: worst batch {self.tokens:,} tokens, {self._memory((planned or {}).get('estimate') or {})}"
            f"{'' if self.rank is None else f' in the fullest process, rank {self.rank}'}, "
            f"{duration_text(self.step_seconds)}; a checkpoint takes {duration_text(self.save_seconds)} and "
            f"{bytes_text(self.checkpoint_bytes)}"
        )

    def _memory(self, estimate: Mapping[str, Any]) -> str:
        """On a GPU tensors against the planned first step; on a CPU the whole process against the planned range."""
        measured = self.phases["dry step"]
        low, high = planned_range(estimate, "allocated" in measured)
        if "allocated" in measured:
            said = f" of {bytes_text(high)} planned" if high else ""
            return f"{bytes_text(measured['allocated'])}{said}"
        said = f" ({bytes_text(low)} to {bytes_text(high)} planned)" if low and high else ""
        return f"{bytes_text(measured['resident'])} of RAM{said}"

    def against(self, planned: Mapping[str, Any] | None) -> str | None:
        """Return "above" or "below" where the worst case took more or less than the plan says; None where it is as
        planned, or nothing is. Rows that are shorter than the plan could know take less and say nothing about it."""
        measured, estimate = self.phases["dry step"], (planned or {}).get("estimate") or {}
        on_gpu = "allocated" in measured
        low, high = planned_range(estimate, on_gpu)
        if low is None or high is None:
            return None
        took = measured["allocated" if on_gpu else "resident"]
        margin = GPU_MARGIN if on_gpu else 0.0
        if took > high * (1 + margin):
            return "above"
        full = self.tokens >= NEARLY * estimate.get("tokens", 0)
        return "below" if full and took < low * (1 - margin) else None

    def warning(self, planned: Mapping[str, Any] | None) -> str | None:
        """Return what to say where the plan was wrong."""
        where = self.against(planned)
        if where is None:
            return None
        more = " If memory is short here, expect the run to end for want of it." if where == "above" else ""
        return (
            f"WARNING: the dry pass took {'more' if where == 'above' else 'less'} memory than the plan says "
            f"({self._memory((planned or {}).get('estimate') or {})}): the plan is wrong for this model.{more} "
            "Please report plan.json and dry_pass.json"
        )


NEARLY = 0.9
"""Of the planned tokens, from which on a batch is as full as planned."""
GPU_MARGIN = 0.03
"""How far the tensors on a GPU may be from a simulation (`plan.memory_interval.MARGIN`)."""


def planned_range(estimate: Mapping[str, Any], on_gpu: bool) -> tuple[int | None, int | None]:
    """Return what the plan says of the first step at least and at most, which is what a dry pass runs: tensors on a
    GPU, on a CPU the process; (None, None) where it says nothing. Later steps hold the optimizer's state beside it."""
    if on_gpu:
        steps = [phase["allocated_bytes"] for phase in estimate.get("phases", ()) if phase["name"] == "first step"]
        return (steps[0], steps[0]) if steps else (None, None)
    first = estimate.get("first_step") or {}
    return first.get("low_bytes"), first.get("high_bytes")


def run_dry_pass(
    model: torch.nn.Module,
    optimizer: MasterOptimizer,
    batches: MicroBatcher,
    held_out: MicroBatcher,
    config: Config,
    memory: PhaseMemory,
    checkpoints: Path,
    engine: Engine = SINGLE,
) -> DryPassResult:
    """Run the worst case once.

    Weights, torch's random numbers and the files are afterwards as they were, bit for bit: the learning rate is 0, and
    the checkpoint is made under a temporary name. The optimizer is not: take a new one.

    Args:
        model: in training mode, its gradients clear.
        optimizer: over its trained parameters, fresh.
        batches: of the training rows.
        held_out: of the held-out rows; may be empty.
        config: nothing in it is "auto".
        memory: gets the phases "dry step", "dry eval", "dry save" and "dry load".
        checkpoints: the run's; may not be there yet.
        engine: how several processes share a step; each runs the worst case.

    Raises:
        GateError: the loss is not finite.
        MachineError: the disk cannot be written to, or gives back something else than was written.
        torch.OutOfMemoryError, RuntimeError: there is not enough memory.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        tokens, repeated, loss, step_seconds = _step(model, optimizer, batches, config, memory, engine)
        evaluated = _evaluate(model, held_out, config, memory, engine)
    state = build_checkpoint_state(engine, optimizer.parameters, optimizer.tensors(), {}, isinstance(model, PeftModel))
    saved = _save_and_load(state, memory, checkpoints, engine.world)
    phases = {name: figures for name, figures in memory.phases.items() if name.startswith("dry ")}
    rank, phases = _fullest(phases, engine)
    return DryPassResult(tokens, repeated, loss, step_seconds, *evaluated, *saved, phases, rank)


def _fullest(phases: dict[str, dict[str, int]], engine: Engine) -> tuple[int | None, dict[str, dict[str, int]]]:
    """The phases of the process that had the most memory in the step, and its rank; None where there is one process."""
    of_all = all_gather(phases, engine.world)
    rank = max(range(len(of_all)), key=lambda number: max(of_all[number]["dry step"].values()))
    return (rank if len(of_all) > 1 else None), of_all[rank] | {
        name: figures for name, figures in phases.items() if name not in of_all[rank]
    }


def _step(
    model: torch.nn.Module,
    optimizer: MasterOptimizer,
    batches: MicroBatcher,
    config: Config,
    memory: PhaseMemory,
    engine: Engine,
) -> tuple[int, int, float, float]:
    train = config.train
    batch = batches.make(batches.fullest())
    repeated = 2 if train.global_batch_size > batches.size * engine.data_size else 1
    # At 1 nothing overflows that would not overflow at any scale, so that the update is measured, too.
    scaling = LossScale(1.0) if config.model.dtype == "float16" else None
    optimizer.learning_rate = 0.0
    start = time.perf_counter()
    with memory.during("dry step"):
        result = train_step(
            model, repeated * [batch], optimizer, train.max_grad_norm,
            chunked=config.speed.chunked_loss, scaling=scaling, engine=engine,
        )  # fmt: skip
    if not math.isfinite(result.loss):
        raise _not_finite("fullest batch", count_batch_tokens(batch), result.loss, model, config)
    return count_batch_tokens(batch), repeated, result.loss, time.perf_counter() - start


def _not_finite(what: str, tokens: int, loss: float, model: torch.nn.Module, config: Config) -> GateError:
    why = explain_non_finite(model, config.model.dtype)
    problem = f"the loss of the {what} ({tokens:,} tokens) is {loss} before anything was trained: {why.message}"
    return GateError(problem, code="E5100", field=why.field, help=f"{why.help}; no step was taken")


def _evaluate(
    model: torch.nn.Module, held_out: MicroBatcher, config: Config, memory: PhaseMemory, engine: Engine
) -> tuple[int, float, int]:
    """(tokens, seconds) of the fullest held-out batch, and how many there are for each process."""
    micros = held_out.cut(range(len(held_out.rows)))
    if not micros:
        return 0, 0.0, 0
    batch = held_out.make(micros[0])
    start = time.perf_counter()
    with memory.during("dry eval"):
        measured = mean_loss(model, [batch], chunked=config.speed.chunked_loss, engine=engine)
    if measured is not None and not math.isfinite(measured[0]):
        raise _not_finite("fullest held-out batch", count_batch_tokens(batch), measured[0], model, config)
    return count_batch_tokens(batch), time.perf_counter() - start, -(-len(micros) // engine.data_size)


def _save_and_load(
    state: manager.CheckpointState, memory: PhaseMemory, checkpoints: Path, world: World
) -> tuple[float, float, int]:
    """(seconds to save, seconds to load, bytes) of a checkpoint; the first process makes it, or each its part."""
    if state.part is None:
        return run_on_rank0(world, lambda: _save_and_load_whole(state, memory, checkpoints))
    return _save_and_load_shards(state, state.part, memory, checkpoints, world)


def _save_and_load_whole(
    state: manager.CheckpointState, memory: PhaseMemory, checkpoints: Path
) -> tuple[float, float, int]:
    with _scratch(checkpoints) as directory:
        start = time.perf_counter()
        with memory.during("dry save"):
            path = manager.save_checkpoint(directory, 0, state)
        saved = time.perf_counter()
        with memory.during("dry load"):
            loaded = manager.load_checkpoint(path)
        seconds = time.perf_counter() - saved
        size = sum(file.stat().st_size for file in path.iterdir())
        _require_same(state, loaded, checkpoints)
    return saved - start, seconds, size


def _save_and_load_shards(
    state: manager.CheckpointState, part: CheckpointShard, memory: PhaseMemory, checkpoints: Path, world: World
) -> tuple[float, float, int]:
    with _scratch(checkpoints) if world.is_first else nullcontext() as directory:
        place = run_on_rank0(world, lambda: manager.begin_sharded_checkpoint(directory or checkpoints, 0))
        start = time.perf_counter()
        with memory.during("dry save"):
            manager.write_part(place, state)
            barrier(world)
            path = run_on_rank0(world, lambda: manager.commit_sharded_checkpoint(place, 0, state))
        saved = time.perf_counter()
        with memory.during("dry load"):
            loaded = manager.load_checkpoint(path)
        seconds = time.perf_counter() - saved
        size = sum(file.stat().st_size for file in path.iterdir())
        own = (
            _local_ranges(loaded.weights, state.weights, part),
            _local_ranges(loaded.optimizer, state.optimizer, part),
        )
        _require_same(state, manager.CheckpointState(*own, {}), checkpoints)
        barrier(world)
    return saved - start, seconds, size


def _local_ranges(
    read: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor], part: CheckpointShard
) -> LazyTensors:
    """Of the tensors of a checkpoint in parts, the ranges that this process has written."""
    return LazyTensors(written, lambda name: read_flat_range(read, name, part.ranges[name][0], written[name].numel()))


def _require_same(written: manager.CheckpointState, read: manager.CheckpointState, checkpoints: Path) -> None:
    for before, after in ((written.weights, read.weights), (written.optimizer, read.optimizer)):
        if unlike := sorted(name for name in before.keys() | after.keys() if not _same(before, after, name)):
            raise MachineError(
                f"{len(unlike)} tensors of a checkpoint came back other than they were written: {unlike[0]}",
                code="E5101",
                path=checkpoints,
                help="the disk cannot be trusted; choose another output_dir",
            )


def _same(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], name: str) -> bool:
    """Whether both have the tensor, in the same bytes."""
    if name not in before or name not in after:
        return False
    one, other = (tensors[name].detach().cpu().contiguous() for tensors in (before, after))
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@contextlib.contextmanager
def _scratch(checkpoints: Path) -> Iterator[Path]:
    """A directory inside `checkpoints` to write into; it and every folder made for it are gone afterwards.

    Its name is one that `core.rundir.sweep` clears away after a kill.
    """
    path = checkpoints / f".dry-pass.{os.getpid()}.tmp"
    missing = [folder for folder in (checkpoints, *checkpoints.parents) if not folder.exists()]
    try:
        with machine_errors(path):
            path.mkdir(parents=True)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
