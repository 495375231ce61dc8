"""Estimates of memory and time for one model: simulated, or calculated where simulation would take minutes.

Torch is imported only where something is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from surefit.config.resolve import ResolvedConfig, count_due_steps
from surefit.config.schema import decided
from surefit.config.world import count_processes
from surefit.core.gc_pause import pause_gc
from surefit.core.malloc import SMALL
from surefit.facts.activations import TILE, has_closed_form
from surefit.facts.disk import copies_at_once, disk_terms
from surefit.facts.hardware import HardwareFacts
from surefit.facts.memory_per_rank import fullest_stage
from surefit.facts.model import ModelFacts
from surefit.facts.sharding import sharing_of
from surefit.facts.step_shape import micro_batch_shape, shared_tokens, usual_shape
from surefit.plan.communication import distributed_step_time
from surefit.plan.loading import import_libraries
from surefit.plan.memory_interval import MemoryEstimate, build_memory_estimate, closed_form_estimate
from surefit.plan.process import process_overhead_bytes
from surefit.plan.rank_summary import as_single_process, simulation_obstacle
from surefit.plan.step_time_cache import StepTimeCache

if TYPE_CHECKING:
    from surefit.plan.simulate import PhasePeak, SimulatedMemory
    from surefit.plan.time import RunTime, StepTime

MOST_TILES = 16
"""Largest number of tiles of a micro batch with which a step is simulated."""


@dataclass(frozen=True)
class ExampleLengths:
    """Lengths of the examples in tokens, as far as they are known.

    Attributes:
        longest: the length that memory is planned for; None: `data.max_length`.
        mean: the length that time is planned for; None: the longest.
        source: the origin of these lengths, in words.
        known: "all" where `longest` is of all rows, "sample" where it is of some, the largest among them, "text" where
            it is an upper bound by the text of these, because the tokenizer is not on this machine, "none" where
            nothing is known and rows are assumed to be as long as they may be.
        supervised: the share of all tokens that the loss counts; for time, not for memory.
        shortest: the shortest of the rows that were tokenized; None where it is not known.
        left_out: the share of the rows that is longer than `data.max_length` and left out of training.
        held_out: the longest row of a file of held-out rows; None where they are split from the training rows, or not
            known.
        rows: the number of rows that were read for these lengths; None where none was.
        shared: the share of the tokens of pairs that sharing prompts saves.
    """

    longest: int | None = None
    mean: float | None = None
    source: str = "data.max_length: the rows are not on this machine"
    supervised: float = 1.0
    known: Literal["all", "sample", "text", "none"] = "none"
    shortest: int | None = None
    left_out: float = 0.0
    held_out: int | None = None
    rows: int | None = None
    shared: float = 0.0


@dataclass
class Planner:
    """Estimates of memory and time for one model.

    Attributes:
        stored: whether a simulation of memory is taken from an earlier process, or else stored for a later one.
    """

    model: ModelFacts
    lengths: ExampleLengths = ExampleLengths()
    stored: bool = False

    def __post_init__(self) -> None:
        self._pace = StepTimeCache(self.model)

    def length(self, resolved: ResolvedConfig) -> int:
        """Return the tokens of the longest training row."""
        max_length = resolved.config.data.max_length
        return min(max_length, self.lengths.longest or max_length)

    def eval_length(self, resolved: ResolvedConfig) -> int | None:
        """Return the tokens of the longest held-out row, or None where it is not longer than the training rows."""
        held_out = min(resolved.config.data.max_length, self.lengths.held_out or 0)
        return held_out if held_out > self.length(resolved) else None

    def closed_form(self, resolved: ResolvedConfig, hardware: HardwareFacts) -> MemoryEstimate | None:
        """Return the memory by arithmetic, in a fraction of a millisecond, as if training had rows as long as the
        longest held-out one; None where the model's layers are not known."""
        return closed_form_estimate(resolved, self.model, hardware, self.eval_length(resolved) or self.length(resolved))

    def too_long(self, resolved: ResolvedConfig) -> str | None:
        """Return why a step is calculated and not simulated, or None: simulating many tiles takes minutes, DeepSpeed
        reads the values of tensors, and a deep pipeline's stages are not alike."""
        sharing = sharing_of(resolved.config)
        if sharing is not None and (obstacle := simulation_obstacle(sharing, self.model)):
            return obstacle
        tokens = micro_batch_shape(resolved, self.length(resolved)).tokens // resolved.config.parallel.cp
        tiles = -(-tokens // TILE) if resolved.config.speed.tiled_mlp is True else 1
        if not has_closed_form(self.model) or tiles <= MOST_TILES:
            return None
        return f"{tokens:,} tokens in {tiles} tiles would take minutes"

    def memory(self, resolved: ResolvedConfig, hardware: HardwareFacts) -> SimulatedMemory:
        """Return the memory by simulation, which takes seconds.

        Raises:
            Exception: any error of the model's own code on tensors without data.
        """
        with pause_gc():
            import_libraries()
            from surefit.plan.simulate import simulate_memory_cached
            from surefit.plan.step_config import build_step_config

            length, eval_length = self.length(resolved), self.eval_length(resolved)
            setting = build_step_config(resolved, self.model, hardware, length=length, eval_length=eval_length)
            # The third micro batch of a step needs the same memory as the second: the gradients exist by then.
            setting = replace(setting, micro_batches=min(2, setting.micro_batches))
            if setting.sharing is not None and setting.sharing.mode == "pp":
                rank = fullest_stage(resolved, self.model, self.length(resolved))
                setting = replace(setting, sharing=replace(setting.sharing, rank=rank))
            if self.stored:
                from surefit.plan.simulation_cache import simulate_or_load

                return simulate_or_load(setting)
            return simulate_memory_cached(setting.known)

    def simulated(self, resolved: ResolvedConfig, hardware: HardwareFacts) -> MemoryEstimate:
        """Return the memory by simulation, or by arithmetic where a simulation would take minutes."""
        if self.too_long(resolved) and (closed := self.closed_form(resolved, hardware)):
            return closed
        return estimates_from_simulation(self.memory(resolved, hardware), hardware, resolved).whole

    def typical(self, resolved: ResolvedConfig) -> int:
        """Return the tokens of the rows that time is planned for: the mean, as if rows were not padded beyond it."""
        longest = self.length(resolved)
        return min(longest, math.ceil(self.lengths.mean or longest))

    def step(self, resolved: ResolvedConfig, hardware: HardwareFacts, *, near: bool = False) -> StepTime | None:
        """Return the time of an optimizer step; see `StepTimeCache.step` and, for several processes,
        `communication.distributed_step_time`."""
        length = self.typical(resolved)
        rows = usual_shape(resolved, length).rows
        step = self._pace.step(
            as_single_process(resolved), hardware, length, self.lengths.supervised, rows=rows, near=near
        )
        return distributed_step_time(step, resolved, self.model, hardware, length) if step else None

    def run(self, resolved: ResolvedConfig, step: StepTime, rows: int | None) -> RunTime | None:
        """Return the time of the whole run; None where the number of steps is not known.

        Args:
            resolved: the config without "auto".
            step: the time of its step.
            rows: training rows before any is held out; where they are not counted, the held-out loss is left out.
        """
        from surefit.plan.time import run_time

        if resolved.total_steps is None:
            return None
        config, length = resolved.config, self.typical(resolved)
        save_steps, eval_steps = config.checkpoint.save_steps, config.train.eval_steps
        assert isinstance(save_steps, int)
        saves = count_due_steps(resolved.total_steps, save_steps)
        share = config.data.share or 0.0
        checkpoints = [term.bytes for term in disk_terms(resolved, self.model) if term.term == "checkpoints"]
        per_example = length * config.objective.answers_per_example - shared_tokens(resolved, length)
        batch, held_out = decided(config.train.global_batch_size), share * (rows or 0)
        trained = min(resolved.total_steps * batch, math.ceil(rows - held_out) if rows else math.inf)
        return run_time(
            step,
            resolved.total_steps,
            tokens_per_step=batch * per_example,
            weight_bytes=self.model.weight_bytes or 0,
            evaluations=0
            if config.data.holds_nothing_out
            else count_due_steps(resolved.total_steps, save_steps, eval_steps),
            evaluation_tokens=held_out * per_example,
            reference_tokens=(trained + held_out) * per_example if config.objective.has_reference else 0.0,
            saves=saves,
            save_bytes=sum(checkpoints) // copies_at_once(resolved),
        )


def pytorch_peak_bytes(memory: SimulatedMemory) -> int:
    """Return the bytes that PyTorch holds of the device: malloc's resident memory, or on a GPU the allocator's
    segments."""
    return max(memory.allocated, memory.reserved)


@dataclass(frozen=True)
class MemoryEstimates:
    """Memory intervals of a simulated run.

    Attributes:
        memory: the simulation, with the phases under this run's malloc settings.
        whole: interval of the fullest process, including the one that merges.
        training: interval of the process that trains.
        first_step: interval of that process up to its first step, which a dry pass runs.
        kept: whether malloc keeps freed memory, on a CPU where the process is planned to stay small.
    """

    memory: SimulatedMemory
    whole: MemoryEstimate
    training: MemoryEstimate
    first_step: MemoryEstimate
    kept: bool = False


def estimates_from_simulation(
    memory: SimulatedMemory, hardware: HardwareFacts, resolved: ResolvedConfig
) -> MemoryEstimates:
    """Return the intervals around a simulation; on a CPU beside the measured memory of this process."""
    sharing = sharing_of(resolved.config)
    if resolved.total_steps == 1:  # no second step, which has the optimizer's state from its beginning
        memory = replace(memory, phases=_one_step(memory.phases), kept=_one_step(memory.kept))
    if hardware.kind != "cpu":
        around = partial(build_memory_estimate, kind=hardware.kind, how="simulation", sharing=sharing)
        return MemoryEstimates(memory, *_estimate_each_process(memory, around))
    around = partial(
        build_memory_estimate, kind="cpu", how="simulation", sharing=sharing, process=process_overhead_bytes()
    )
    if memory.kept:
        small = replace(memory, phases=memory.kept)
        estimates = MemoryEstimates(small, *_estimate_each_process(small, partial(around, kept=True)), kept=True)
        if estimates.training.high <= SMALL:
            return estimates
    return MemoryEstimates(memory, *_estimate_each_process(memory, around))


def _estimate_each_process(
    memory: SimulatedMemory, around: Callable[[int], MemoryEstimate]
) -> tuple[MemoryEstimate, MemoryEstimate, MemoryEstimate]:
    return around(pytorch_peak_bytes(memory)), around(training_peak_bytes(memory)), around(_first_step(memory))


def _one_step(phases: tuple[PhasePeak, ...]) -> tuple[PhasePeak, ...]:
    return tuple(phase for phase in phases if phase.name != "step")


def _first_step(memory: SimulatedMemory) -> int:
    """Return the peak bytes up to the first step."""
    return max(max(phase.allocated, phase.reserved) for phase in memory.phases if phase.name in ("load", "first step"))


def memory_per_process(resolved: ResolvedConfig, hardware: HardwareFacts) -> int | None:
    """Return the bytes that one process has: a GPU of its own, or on a CPU its part of the RAM that all processes of a
    machine share."""
    if hardware.memory_bytes is None or hardware.kind != "cpu":
        return hardware.memory_bytes
    return hardware.memory_bytes // max(1, count_processes(resolved.config) // resolved.config.hardware.nodes)


def training_peak_bytes(memory: SimulatedMemory) -> int:
    """Return the bytes that PyTorch holds of the device in the process that trains; merging has its own process."""
    return max(max(phase.allocated, phase.reserved) for phase in memory.phases if phase.name != "merge")
