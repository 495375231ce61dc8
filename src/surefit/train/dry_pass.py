"""The dry pass: the fullest batch, a measurement and a checkpoint, run before the first step without leaving a trace.

A fault that would stop a run hours later stops it now: too little memory for the longest rows, a loss that is not
finite, a disk that cannot be written to or returns other bytes than were written.
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
from surefit.config.schema import SureFitConfig, decided
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
from surefit.train.step import CROSS_ENTROPY, Objective, measure, train_step


@dataclass(frozen=True)
class DryPassResult:
    """Memory, seconds and bytes that the worst case needed.

    Attributes:
        tokens: tokens of the fullest micro batch, padding not counted.
        micro_batches: number of times it was run before the update: 2 if a step accumulates gradients over micro
            batches, because the gradients stay in memory while the next micro batch runs; otherwise 1.
        loss: mean loss of the batch, in nats.
        step_seconds: forward, backward and update, warm-up of the kernels included.
        eval_tokens, eval_seconds: tokens and seconds of the fullest held-out batch; 0 without held-out rows.
        eval_batches: number of held-out batches of one measurement, per process.
        save_seconds, load_seconds, checkpoint_bytes: figures of one checkpoint.
        phases: memory of each phase, as in telemetry/memory.py; with several processes, of the one that used most.
        rank: the rank of that process; None with a single process.
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
        """Write the result into dry_pass.json and events.jsonl."""
        write_json(run.dry_pass, asdict(self))
        run.note("train", "dry pass", **asdict(self))

    def text(self, planned: Mapping[str, Any] | None = None) -> str:
        """Return the result as one line; `planned` is the content of plan.json."""
        memory = self._memory((planned or {}).get("estimate") or {})
        return (
            f"dry pass OK: the largest batch ({self.tokens:,} tokens) took {memory}"
            f"{'' if self.rank is None else f' in the process with the highest memory use, rank {self.rank}'}, "
            f"{duration_text(self.step_seconds)}; a checkpoint takes {duration_text(self.save_seconds)} and "
            f"{bytes_text(self.checkpoint_bytes)}"
        )

    def _memory(self, estimate: Mapping[str, Any]) -> str:
        """Describe the measured memory beside the planned: on a GPU tensors against the planned first step, on a CPU
        the process against the planned range."""
        memory = self.phases["dry step"]
        low, high = planned_range(estimate, "allocated" in memory)
        if "allocated" in memory:
            plan_clause = f" of {bytes_text(high)} planned" if high else ""
            return f"{bytes_text(memory['allocated'])}{plan_clause}"
        plan_clause = f" ({bytes_text(low)} to {bytes_text(high)} planned)" if low and high else ""
        return f"{bytes_text(memory['resident'])} of RAM{plan_clause}"

    def against(self, planned: Mapping[str, Any] | None) -> str | None:
        """Return "above" or "below" if the worst case used more or less memory than planned; None if it is as
        planned, or if there is no plan. Batches with fewer tokens than planned use less memory, which does not count
        as "below"."""
        memory, estimate = self.phases["dry step"], (planned or {}).get("estimate") or {}
        on_gpu = "allocated" in memory
        low, high = planned_range(estimate, on_gpu)
        if low is None or high is None:
            return None
        used = memory["allocated" if on_gpu else "resident"]
        margin = GPU_MARGIN if on_gpu else 0.0
        if used > high * (1 + margin):
            return "above"
        full = self.tokens >= NEARLY * estimate.get("tokens", 0)
        return "below" if full and used < low * (1 - margin) else None

    def warning(self, planned: Mapping[str, Any] | None) -> str | None:
        """Return the warning that the memory plan was wrong; None if it was right."""
        deviation = self.against(planned)
        if deviation is None:
            return None
        advice = " The run may run out of memory." if deviation == "above" else ""
        return (
            f"WARNING: the dry pass used {'more' if deviation == 'above' else 'less'} memory than planned "
            f"({self._memory((planned or {}).get('estimate') or {})}): the plan is wrong for this model.{advice} "
            "Please report plan.json and dry_pass.json"
        )


NEARLY = 0.9
"""Share of the planned tokens from which on a batch counts as full."""
GPU_MARGIN = 0.03
"""Relative error that a simulated plan may have for tensors on a GPU (`plan.memory_interval.MARGIN`)."""


def planned_range(estimate: Mapping[str, Any], on_gpu: bool) -> tuple[int | None, int | None]:
    """Return the planned (lowest, highest) bytes of the first step, which is what a dry pass runs: tensors on a GPU,
    the process on a CPU; (None, None) without a plan. Later steps also hold the optimizer's state."""
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
    config: SureFitConfig,
    memory: PhaseMemory,
    checkpoints: Path,
    engine: Engine = SINGLE,
    objective: Objective = CROSS_ENTROPY,
) -> DryPassResult:
    """Run the fullest batch, the fullest held-out batch and a checkpoint once, and measure them.

    Weights, torch's random state and the files are afterwards as they were, bit for bit: the learning rate is 0, and
    the checkpoint is written under a temporary name. The optimizer's state changes: create a new optimizer afterwards.

    Args:
        model: in training mode, without gradients.
        optimizer: a fresh one over the model's trained parameters.
        batches: batches of the training rows.
        held_out: batches of the held-out rows; may be empty.
        config: resolved: no setting is "auto".
        memory: gets the phases "dry step", "dry eval", "dry save" and "dry load".
        checkpoints: the run's checkpoint directory; need not exist yet.
        engine: execution engine, which distributes a step over processes; each process runs the worst case.
        objective: what the loss is; its reference need not be known yet.

    Raises:
        GateError: the loss is not finite.
        MachineError: the disk cannot be written to, or returns other bytes than were written.
        torch.OutOfMemoryError, RuntimeError: there is not enough memory.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        tokens, repeated, loss, step_seconds = _step(model, optimizer, batches, config, memory, engine, objective)
        eval_figures = _evaluate(model, held_out, config, memory, engine, objective)
    state = build_checkpoint_state(engine, optimizer.parameters, optimizer.tensors(), {}, isinstance(model, PeftModel))
    save_figures = _save_and_load(state, memory, checkpoints, engine.world)
    phases = {name: figures for name, figures in memory.phases.items() if name.startswith("dry ")}
    rank, phases = _fullest(phases, engine)
    return DryPassResult(tokens, repeated, loss, step_seconds, *eval_figures, *save_figures, phases, rank)


def _fullest(phases: dict[str, dict[str, int]], engine: Engine) -> tuple[int | None, dict[str, dict[str, int]]]:
    """Return the rank that used the most memory in the step, and its phases; the rank is None with a single process."""
    phases_by_rank = all_gather(phases, engine.world)
    rank = max(range(len(phases_by_rank)), key=lambda number: max(phases_by_rank[number]["dry step"].values()))
    return (rank if len(phases_by_rank) > 1 else None), phases_by_rank[rank] | {
        name: figures for name, figures in phases.items() if name not in phases_by_rank[rank]
    }


def _step(
    model: torch.nn.Module,
    optimizer: MasterOptimizer,
    batches: MicroBatcher,
    config: SureFitConfig,
    memory: PhaseMemory,
    engine: Engine,
    objective: Objective,
) -> tuple[int, int, float, float]:
    train = config.train
    batch = batches.make(batches.fullest())
    repeated = 2 if decided(train.global_batch_size) > batches.size * engine.data_size else 1
    # A loss scale of 1 overflows only where every scale would, so that the update is measured, too.
    scaling = LossScale(1.0) if config.model.dtype == "float16" else None
    optimizer.learning_rate = 0.0
    start = time.perf_counter()
    with memory.during("dry step"):
        result = train_step(
            model, repeated * [batch], optimizer, train.max_grad_norm,
            chunked=config.speed.chunked_loss, scaling=scaling, engine=engine, objective=objective,
        )  # fmt: skip
    if not math.isfinite(result.loss):
        raise _not_finite("fullest batch", count_batch_tokens(batch), result.loss, model, config)
    return count_batch_tokens(batch), repeated, result.loss, time.perf_counter() - start


def _not_finite(what: str, tokens: int, loss: float, model: torch.nn.Module, config: SureFitConfig) -> GateError:
    why = explain_non_finite(model, config.model.dtype)
    problem = f"the loss of the {what} ({tokens:,} tokens) is {loss} before the first step: {why.message}"
    return GateError(problem, code="E5100", field=why.field, help=f"{why.help}; no step was taken")


def _evaluate(
    model: torch.nn.Module,
    held_out: MicroBatcher,
    config: SureFitConfig,
    memory: PhaseMemory,
    engine: Engine,
    objective: Objective,
) -> tuple[int, float, int]:
    """Measure the fullest held-out batch: return its tokens, seconds, and the number of batches per process."""
    micros = held_out.cut(range(held_out.examples))
    if not micros:
        return 0, 0.0, 0
    batch = held_out.make(micros[0])
    start = time.perf_counter()
    with memory.during("dry eval"):
        measured = measure(model, [batch], chunked=config.speed.chunked_loss, engine=engine, objective=objective)
    if measured is not None and not math.isfinite(measured.loss):
        raise _not_finite("largest held-out batch", count_batch_tokens(batch), measured.loss, model, config)
    return count_batch_tokens(batch), time.perf_counter() - start, -(-len(micros) // engine.data_size)


def _save_and_load(
    state: manager.CheckpointState, memory: PhaseMemory, checkpoints: Path, world: World
) -> tuple[float, float, int]:
    """Return (seconds to save, seconds to load, bytes) of a checkpoint; rank 0 writes it, or every process its part."""
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
        saved_at = time.perf_counter()
        with memory.during("dry load"):
            loaded = manager.load_checkpoint(path)
        seconds = time.perf_counter() - saved_at
        size = sum(file.stat().st_size for file in path.iterdir())
        _require_same(state, loaded, checkpoints)
    return saved_at - start, seconds, size


def _save_and_load_shards(
    state: manager.CheckpointState, part: CheckpointShard, memory: PhaseMemory, checkpoints: Path, world: World
) -> tuple[float, float, int]:
    with _scratch(checkpoints) if world.is_first else nullcontext() as directory:
        partial_directory = run_on_rank0(world, lambda: manager.begin_sharded_checkpoint(directory or checkpoints, 0))
        start = time.perf_counter()
        with memory.during("dry save"):
            manager.write_part(partial_directory, state)
            barrier(world)
            path = run_on_rank0(world, lambda: manager.commit_sharded_checkpoint(partial_directory, 0, state))
        saved_at = time.perf_counter()
        with memory.during("dry load"):
            loaded = manager.load_checkpoint(path)
        seconds = time.perf_counter() - saved_at
        size = sum(file.stat().st_size for file in path.iterdir())
        local_tensors = (
            _local_ranges(loaded.weights, state.weights, part),
            _local_ranges(loaded.optimizer, state.optimizer, part),
        )
        _require_same(state, manager.CheckpointState(*local_tensors, {}), checkpoints)
        barrier(world)
    return saved_at - start, seconds, size


def _local_ranges(
    read: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor], part: CheckpointShard
) -> LazyTensors:
    """Return the ranges of a sharded checkpoint's tensors that this process has written."""
    return LazyTensors(written, lambda name: read_flat_range(read, name, part.ranges[name][0], written[name].numel()))


def _require_same(written: manager.CheckpointState, read: manager.CheckpointState, checkpoints: Path) -> None:
    for before, after in ((written.weights, read.weights), (written.optimizer, read.optimizer)):
        if differing := sorted(name for name in before.keys() | after.keys() if not _same(before, after, name)):
            raise MachineError(
                f"{len(differing)} tensors of a checkpoint differ after they were read back: {differing[0]}",
                code="E5101",
                path=checkpoints,
                help="the disk is unreliable; choose another output_dir",
            )


def _same(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], name: str) -> bool:
    """Return whether both mappings hold the tensor with the same dtype, shape and bytes."""
    if name not in before or name not in after:
        return False
    tensor_before, tensor_after = (tensors[name].detach().cpu().contiguous() for tensors in (before, after))
    if (tensor_before.dtype, tensor_before.shape) != (tensor_after.dtype, tensor_after.shape):
        return False
    return torch.equal(tensor_before.reshape(-1).view(torch.uint8), tensor_after.reshape(-1).view(torch.uint8))


@contextlib.contextmanager
def _scratch(checkpoints: Path) -> Iterator[Path]:
    """Yield a temporary directory inside `checkpoints`; it and every folder created for it are deleted afterwards.

    `core.rundir.remove_leftovers` recognizes its name and deletes it after a kill.
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
