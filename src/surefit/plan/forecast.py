"""What plan.json holds: the static terms, the memory by simulation or closed form, the verdict, and the time.

Torch is imported only where something is simulated; `quick` leaves that out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from surefit.config.memory import WORDS
from surefit.config.resolve import Resolved
from surefit.config.world import processes
from surefit.core.units import bytes_text, plural
from surefit.facts.activations import TILE, covered
from surefit.facts.budget import ACTIVATIONS_LEFT_OUT, LEFT_OUT, disagreement, micro_batch_shape
from surefit.facts.disk import copies_at_once, disk_terms
from surefit.facts.hardware import HardwareFacts
from surefit.facts.memory_per_rank import fullest_stage
from surefit.facts.model import ModelFacts
from surefit.facts.sharding import sharing_of
from surefit.plan.communication import shared_step
from surefit.plan.host import host_plan
from surefit.plan.loading import import_libraries, uncollected
from surefit.plan.rank_summary import alone, not_simulated, of_ranks
from surefit.plan.static import static_plan
from surefit.plan.step_time_cache import Pace
from surefit.plan.verdict import Need, calculated, need, require_plannable, verdict

if TYPE_CHECKING:
    from surefit.plan.simulate import Memory
    from surefit.plan.time import RunTime, StepTime

MOST_TILES = 16
"""Of a micro batch, up to which a step is simulated."""
NOT_COUNTED = (
    "the memory of generating answers when the model is scored",
    "other processes on the device",
)


@dataclass(frozen=True)
class Lengths:
    """Tokens of the examples, as far as they are known.

    Attributes:
        longest: what memory is planned for; None: `data.max_length`.
        mean: what time is planned for; None: the longest.
        source: where that is from, in words.
        supervised: the share of all tokens that the loss counts; for time, not for memory.
    """

    longest: int | None = None
    mean: float | None = None
    source: str = "data.max_length: `surefit audit` first, to plan with the real rows'"
    supervised: float = 1.0


@dataclass
class Planner:
    """Estimates for one model; a simulation is run once for settings that need the same memory."""

    model: ModelFacts
    lengths: Lengths = Lengths()
    _seen: dict[tuple[Any, ...], Memory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pace = Pace(self.model)

    def length(self, resolved: Resolved) -> int:
        """Tokens of the longest row that is trained on."""
        allowed = resolved.config.data.max_length
        return min(allowed, self.lengths.longest or allowed)

    def closed_form(self, resolved: Resolved, hardware: HardwareFacts) -> Need | None:
        """The need by arithmetic, in a fraction of a millisecond; None where the model's layers are not known."""
        return calculated(resolved, self.model, hardware, self.length(resolved))

    def too_long(self, resolved: Resolved) -> str | None:
        """Why a step is calculated and not simulated: every tile would be, for minutes, DeepSpeed reads
        the values of tensors, and a deep pipeline's stages are not alike."""
        sharing = sharing_of(resolved.config)
        if sharing is not None and (why := not_simulated(sharing, self.model)):
            return why
        tokens = micro_batch_shape(resolved, self.length(resolved)).tokens // resolved.config.parallel.cp
        tiles = -(-tokens // TILE) if resolved.config.speed.tiled_mlp is True else 1
        if not covered(self.model) or tiles <= MOST_TILES:
            return None
        return f"{tokens:,} tokens in {tiles} tiles would take minutes"

    def memory(self, resolved: Resolved, hardware: HardwareFacts) -> Memory:
        """The memory by simulation, in seconds.

        Raises:
            Exception: whatever the model's own code raises on tensors without data.
        """
        with uncollected():
            import_libraries()
            from surefit.plan.setting import setting_of
            from surefit.plan.simulate import simulate

            setting = setting_of(resolved, self.model, hardware, length=self.length(resolved))
            # The third micro batch of a step needs what the second did: the gradients are there already.
            setting = replace(setting, micro_batches=min(2, setting.micro_batches))
            if setting.sharing is not None and setting.sharing.mode == "pp":
                rank = fullest_stage(resolved, self.model, self.length(resolved))
                setting = replace(setting, sharing=replace(setting.sharing, rank=rank))
            key = (self.model.name, *(repr(value) for name, value in vars(setting).items() if name != "config"))
            if key not in self._seen:
                self._seen[key] = simulate(setting)
            return self._seen[key]

    def simulated(self, resolved: Resolved, hardware: HardwareFacts) -> Need:
        """The need by simulation, or where that would take minutes by arithmetic."""
        if self.too_long(resolved) and (closed := self.closed_form(resolved, hardware)):
            return closed
        memory = self.memory(resolved, hardware)
        return need(held(memory), hardware.kind, "simulation", sharing_of(resolved.config))

    def typical(self, resolved: Resolved) -> int:
        """Tokens of the rows that time is planned for: the mean, as if rows were padded to nothing longer."""
        longest = self.length(resolved)
        return min(longest, math.ceil(self.lengths.mean or longest))

    def step(self, resolved: Resolved, hardware: HardwareFacts, *, near: bool = False) -> StepTime | None:
        """The time of an optimizer step; see `Pace.step` and, for several processes, `exchange.shared_step`."""
        length = self.typical(resolved)
        step = self._pace.step(alone(resolved), hardware, length, self.lengths.supervised, near=near)
        return shared_step(step, resolved, self.model, hardware, length) if step else None

    def run(self, resolved: Resolved, step: StepTime, rows: int | None) -> RunTime | None:
        """The time of the whole run; None where the number of steps is not known.

        Args:
            resolved: the config without "auto".
            step: the time of its step.
            rows: training rows before any is held out; where they are not counted, the held-out loss is left out.
        """
        from surefit.plan.time import run_time

        if resolved.total_steps is None:
            return None
        config, length = resolved.config, self.typical(resolved)
        every = config.checkpoint.every
        assert isinstance(every, int)
        saves = math.ceil(resolved.total_steps / every)
        share = config.data.eval if isinstance(config.data.eval, float) else 0.0
        checkpoints = [term.bytes for term in disk_terms(resolved, self.model) if term.term == "checkpoints"]
        return run_time(
            step,
            resolved.total_steps,
            tokens_per_step=config.train.global_batch_size * length,
            weight_bytes=self.model.weight_bytes or 0,
            evaluations=saves,
            evaluation_tokens=share * (rows or 0) * length,
            saves=saves,
            save_bytes=sum(checkpoints) // copies_at_once(resolved),
        )


def held(memory: Memory) -> int:
    """Bytes that PyTorch holds of the device: what malloc has of the system, or on a GPU the allocator's segments."""
    return max(memory.allocated, memory.reserved)


def share_of_memory(resolved: Resolved, hardware: HardwareFacts) -> int | None:
    """What one process has: a GPU of its own, or its part of the RAM that all of a machine's share on a CPU."""
    if hardware.memory_bytes is None or hardware.kind != "cpu":
        return hardware.memory_bytes
    return hardware.memory_bytes // max(1, processes(resolved.config) // resolved.config.hardware.nodes)


def training_alone(memory: Memory) -> int:
    """The same of the process that trains; merging is one of its own."""
    return max(max(phase.allocated, phase.reserved) for phase in memory.phases if phase.name != "merge")


def planned(
    resolved: Resolved,
    model: ModelFacts,
    hardware: HardwareFacts,
    rows: int | None = None,
    *,
    quick: bool = False,
    lengths: Lengths | None = None,
    planner: Planner | None = None,
) -> dict[str, Any]:
    """The content of plan.json; docs/plan.md explains the keys.

    Args:
        resolved: the config without "auto".
        model: facts about the base model.
        hardware: the device.
        rows: training rows, None where they are not counted yet.
        quick: arithmetic only.
        lengths: what is known about the rows' lengths.
        planner: one that may have simulated this already.

    Raises:
        MachineError, ConfigError: no plan can be made for these inputs.
    """
    require_plannable(resolved, model, hardware)
    planner = planner or Planner(model, lengths or Lengths())
    document = static_plan(resolved, model, hardware, rows)
    estimate = _estimate(planner, resolved, hardware, quick)
    time = None if quick else _time(planner, resolved, hardware, rows)
    document["estimate"], document["time"] = estimate, time
    document["host"] = host_plan(resolved, model, hardware, planner.length(resolved))
    if estimate:
        document["does_not_fit"] = _does_not_fit(document["does_not_fit"], estimate, hardware)
    document["left_out"] = _left_out(document["left_out"], estimate, time, quick)
    if resolved.config.speed.compile:
        document["left_out"].append("what compiling changes: the plan is that of the same layers uncompiled")
    document["ranks"] = of_ranks(resolved, model, hardware, planner.typical(resolved))
    return document


def _estimate(planner: Planner, resolved: Resolved, hardware: HardwareFacts, quick: bool) -> dict[str, Any] | None:
    why = "asked to be quick" if quick else planner.too_long(resolved)
    found: dict[str, Any] = {}
    if why is None:
        try:
            memory = planner.memory(resolved, hardware)
            found = _simulated(memory)
            needed = need(held(memory), hardware.kind, "simulation", sharing_of(resolved.config))
            training = need(training_alone(memory), hardware.kind, "simulation", sharing_of(resolved.config))
            found["disagreement"] = _disagreement(planner, resolved, hardware, memory)
        except Exception as error:  # a model's own code may do anything with tensors that hold no data
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    if why is not None:
        closed = planner.closed_form(resolved, hardware)
        if closed is None:
            return None
        needed = training = closed
        found = {
            "peak_bytes": closed.bytes, "phases": [], "peak": None, "layers_simulated": None, "disagreement": None
        }  # fmt: skip
    micro, length = resolved.config.train.per_device_train_batch_size, planner.length(resolved)
    return {
        "how": needed.how,
        "not_simulated": why,
        "setting": _setting(resolved),
        "micro_batch": micro,
        "length": length,
        "lengths": planner.lengths.source,
        **found,
        "low_bytes": needed.low,
        "high_bytes": needed.high,
        "training": {"likely_bytes": training.likely, "low_bytes": training.low, "high_bytes": training.high},
        "margin": needed.margin,
        "margin_above": needed.above,
        "spread": needed.spread,
        "beside": needed.beside,
        "capacity_bytes": share_of_memory(resolved, hardware),
        "verdict": verdict(needed, share_of_memory(resolved, hardware)),
    }


def _setting(resolved: Resolved) -> str:
    """What decides the memory beside the batch, in words."""
    config = resolved.config
    kind = "DoRA" if config.adapter.use_dora else "LoRA"
    what = f"{kind} r {config.adapter.r}" if config.adapter.kind == "lora" else "all weights"
    dtype: str = config.model.dtype
    if config.model.quantization != "none":
        dtype += f" over {config.model.quantization}"
    words = [f"{what} in {dtype}", "packed" if config.data.packing is True else "padded"]
    words += [] if config.train.optimizer == "adamw" else [config.train.optimizer]
    words += [] if config.speed.chunked_loss else ["all logits held"]
    words += ["MLPs in tiles"] if config.speed.tiled_mlp is True else []
    return ", ".join([*words, WORDS[config.train.gradient_checkpointing]])


def _disagreement(planner: Planner, resolved: Resolved, hardware: HardwareFacts, memory: Memory) -> str | None:
    """A sentence where closed form and simulation differ by more than they should; the closed form is a GPU's."""
    closed = planner.closed_form(resolved, hardware) if hardware.kind == "cuda" else None
    training = max(phase.allocated for phase in memory.phases if phase.name != "merge")
    return disagreement(closed.bytes, training) if closed else None


def _simulated(memory: Memory) -> dict[str, Any]:
    return {
        "peak_bytes": held(memory),
        "phases": [
            {"name": name, "allocated_bytes": phase.allocated, "reserved_bytes": phase.reserved}
            for name, phase in zip(_names(memory), memory.phases, strict=True)
        ],
        "peak": {
            "phase": memory.peak.phase,
            "bytes": sum(memory.terms.values()),
            "terms": [
                {"term": name, "bytes": size} for name, size in sorted(memory.terms.items(), key=lambda term: -term[1])
            ],
            "operator": memory.peak.op,
            "module": memory.peak.module,
            "shape": list(memory.peak.shape),
            "dtype": memory.peak.dtype,
            "made_bytes": memory.peak.bytes,
        },
        "layers_simulated": memory.layers_simulated,
    }


def _names(memory: Memory) -> Iterator[str]:
    """The phases' names; merging is a process of its own, which loads a second time."""
    seen: set[str] = set()
    for phase in memory.phases:
        yield f"merge: {phase.name}" if phase.name in seen else phase.name
        seen.add(phase.name)


def _time(planner: Planner, resolved: Resolved, hardware: HardwareFacts, rows: int | None) -> dict[str, Any] | None:
    step = planner.step(resolved, hardware)
    if step is None:
        return None
    run = planner.run(resolved, step, rows)
    return {
        "seconds_per_step": step.seconds,
        "seconds_per_step_low": step.low,
        "seconds_per_step_high": step.high,
        "total_seconds": run.seconds if run else None,
        "total_seconds_low": run.low if run else None,
        "total_seconds_high": run.high if run else None,
        "parts": run.parts if run else None,
        "tokens_per_second": step.tokens_per_second,
        "mfu": step.mfu,
        "limit": run.limit if run else step.limit,
        "length": planner.typical(resolved),
        "rates": step.source,
    }


def _does_not_fit(static: list[str], estimate: dict[str, Any], hardware: HardwareFacts) -> list[str]:
    """What does not fit, in words: of memory the estimate speaks, which knows more than the static terms."""
    others = [text for text in static if not text.startswith("memory:")]
    if estimate["verdict"] != "does not fit":
        return others
    assert hardware.memory_bytes is not None
    text = (
        f"memory: {bytes_text(estimate['low_bytes'])} to {bytes_text(estimate['high_bytes'])} are needed with "
        f"{plural(estimate['micro_batch'], 'row')} of {estimate['length']:,} tokens, and {hardware.name} has "
        f"{bytes_text(estimate['capacity_bytes'])}"
        f"{' for each process' if estimate['capacity_bytes'] != hardware.memory_bytes else ''}"
    )
    return [text, *others]


def _left_out(
    static: list[str], estimate: dict[str, Any] | None, time: dict[str, Any] | None, quick: bool
) -> list[str]:
    if estimate is None:
        return static
    left_out = [text for text in static if text not in (*LEFT_OUT, *ACTIVATIONS_LEFT_OUT)]
    if estimate["not_simulated"] and not quick:
        left_out.append(f"the simulation: {estimate['not_simulated']}")
    if time is None:
        unknown = "time: how fast this device is, is not known; `surefit calibrate` measures it"
        left_out.append("time" if quick else unknown)
    else:
        left_out.append("time of merging and scoring")
        if time["parts"] and not time["parts"]["evaluations"]:
            left_out.append("time of the held-out loss: its rows are not counted yet")
    return [*left_out, *NOT_COUNTED]
