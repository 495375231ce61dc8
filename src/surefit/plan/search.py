"""The fastest way to run the same optimisation within a device's memory, and how far one setting can go.

Every candidate keeps the global batch, the adapter, the lengths and the dtype: what is learnt is the same. The closed
form judges all of them in milliseconds; the few that matter are simulated before anything is said of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, get_args

from surefit.config.capabilities import conflict_with_trait, conflicts, traits
from surefit.config.memory import RECOMPUTED
from surefit.config.modes import ZERO
from surefit.config.optimizers import OPTIMIZERS
from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import Config
from surefit.config.world import count_accumulation_steps, count_processes, examples_per_data_rank, require_shareable
from surefit.core.errors import ConfigError, ModelError
from surefit.facts.activations import has_closed_form
from surefit.facts.hardware import HardwareFacts
from surefit.facts.model import ModelFacts, catalogue, model_facts
from surefit.facts.sharding import sharing_obstacle
from surefit.facts.vocabulary import with_new_tokens
from surefit.plan.memory_interval import MemoryEstimate, Verdict, build_memory_estimate, judge_fit, require_plannable
from surefit.plan.planner import Planner
from surefit.plan.process import process_overhead_bytes

if TYPE_CHECKING:
    from surefit.plan.time import StepTime

SolvableField = Literal["max_length", "batch", "rank", "model"]
FIELDS: tuple[SolvableField, ...] = get_args(SolvableField)
SIMULATED = 3
"""How many of the fastest candidates are simulated, the fastest first, until one fits."""
RESOLUTION = 0.01
"""The share of a step's time below which two estimates tell nothing apart: the config then stays as it is."""
LENGTH_STEP = 64
"""Tokens between two lengths that `find_largest` tells apart."""
LONGEST = 2**20
"""Tokens up to which a length is looked for where the model states no context length."""


@dataclass(frozen=True)
class DeviceConfig:
    """A device, and the config with every "auto" decided for it."""

    hardware: HardwareFacts
    resolved: ResolvedConfig


@dataclass(frozen=True)
class Candidate:
    """One way to run it.

    Attributes:
        need: memory; by the closed form until it was simulated.
        step: seconds of an optimizer step; None on a device whose speed is not known.
    """

    place: DeviceConfig
    need: MemoryEstimate
    verdict: Verdict
    step: StepTime | None

    @property
    def micro_batch(self) -> int:
        size = self.place.resolved.config.train.per_device_train_batch_size
        assert isinstance(size, int)
        return size

    @property
    def accumulation(self) -> int:
        return self.place.resolved.gradient_accumulation_steps

    @property
    def checkpointing(self) -> Any:
        """False, "selective", True or "offload"."""
        return self.place.resolved.config.train.gradient_checkpointing

    @property
    def tiled(self) -> bool:
        return self.place.resolved.config.speed.tiled_mlp is True

    @property
    def packed(self) -> bool:
        return self.place.resolved.config.data.packing is True

    @property
    def sharing(self) -> dict[str, Any]:
        """What of the section `parallel` says how the processes share it."""
        parallel = self.place.resolved.config.parallel
        named = {name: getattr(parallel, name) for name in ("tp", "cp", "pp", "dp_replicate")}
        return {"mode": parallel.mode} | {name: value for name, value in named.items() if value > 1}

    @property
    def processes(self) -> int:
        return count_processes(self.place.resolved.config)

    @property
    def speed(self) -> tuple[float, int, bool, int]:
        """What candidates are sorted by, fastest first; those without a known time come last, in a likely order."""
        seconds = self.step.seconds if self.step else math.inf
        return (seconds, RECOMPUTED.index(self.checkpointing), self.tiled, self.accumulation)


@dataclass(frozen=True)
class SearchResult:
    """What the search found.

    Attributes:
        best: the fastest candidate that fits, by simulation; None where none does, and `given` where that fits and the
            fastest is not faster by more than `RESOLUTION`.
        given: the config as it was, judged in the same way.
        considered: candidates that were judged.
        fitting: those of them that fit by the closed form.
        simulated: those that were simulated, in the order they were.
    """

    best: Candidate | None
    given: Candidate
    considered: int
    fitting: int
    simulated: tuple[Candidate, ...]


def enumerate_candidates(
    planner: Planner, places: Sequence[DeviceConfig], allowed: Sequence[str] = ()
) -> list[Candidate]:
    """Every device × way in which several processes share the run × micro batch that divides the global batch × what is
    recomputed × tiles × packing, and what is allowed, judged by the closed form.

    Examples that a config packs are not padded for a candidate: that is never faster.

    Args:
        planner: of the model.
        places: devices, each with the config.
        allowed: values of `model.quantization` and `train.optim` to try as well: what is learnt is not the same.

    Raises:
        ModelError: the model's layers are not known.
    """
    return [
        _estimate_candidate(
            planner, DeviceConfig(place.hardware, _with_batch_settings(changed, micro, checkpointing, tiled))
        )
        for place in places
        for changed in _variants(place, planner.model, allowed)
        for micro in _divisors(place.resolved.config.train.global_batch_size)
        if micro <= examples_per_data_rank(changed.config)
        for checkpointing in RECOMPUTED
        for tiled in (False, True)
    ]


def _variants(place: DeviceConfig, model: ModelFacts, allowed: Sequence[str]) -> Iterator[ResolvedConfig]:
    """The config in ways that have nothing to do with how its batch is cut."""
    deepspeed = place.hardware.is_another_machine or find_spec("deepspeed") is not None
    for changed in _unshared_variants(place.resolved, model, allowed):
        yield from shared_variants(changed, model, deepspeed)


def shared_variants(resolved: ResolvedConfig, model: ModelFacts, deepspeed: bool) -> Iterator[ResolvedConfig]:
    """The config with each way in which its processes can share it; as it is where there is one. `deepspeed`: whether
    its modes are among them."""
    config, count = resolved.config, count_processes(resolved.config)
    if count == 1:
        yield resolved
        return
    nodes = config.hardware.nodes
    none = {"mode": "ddp", "tp": 1, "cp": 1, "pp": 1, "dp_replicate": 1, "offload": False}
    ways = [none, none | {"mode": "fsdp"}]
    ways += [none | {"mode": "fsdp", "dp_replicate": nodes}] if nodes > 1 else []
    ways += [none | {"mode": mode} for mode in ZERO if deepspeed]
    ways += [none | {"mode": mode, "cp": size} for mode in ("cp", "fsdp") for size in _divisors(count)[1:]]
    ways += [none | {"mode": "tp", "tp": count}]
    given = config.parallel.model_dump()
    mine = {name: given[name] for name in none}
    if mine not in ways:
        ways.insert(0, mine)
    for way in ways:
        changed = _with_sections(resolved, parallel=way)
        if conflict_with_trait(changed.config, "fused LoRA"):
            changed = _with_sections(changed, speed={"fused_lora": False})
        if conflict_with_trait(changed.config, "fused kernels"):
            changed = _with_sections(changed, speed={"kernels": False})
        if changed.config.parallel.cp > 1:
            changed = _with_sections(changed, speed={"attention": "torch_varlen"})
        if _possible(changed, model):
            yield changed


def _possible(resolved: ResolvedConfig, model: ModelFacts) -> bool:
    """Whether `train` takes this way of sharing."""
    config = resolved.config
    if conflicts(traits(config)) or sharing_obstacle(config, model):
        return False
    with contextlib.suppress(ConfigError):
        require_shareable(config)
        return config.parallel.mode != "tp" or has_closed_form(model)
    return False


def _unshared_variants(resolved: ResolvedConfig, model: ModelFacts, allowed: Sequence[str]) -> Iterator[ResolvedConfig]:
    config = resolved.config
    packings = [config.data.packing]
    if config.data.packing is False and model.packing_obstacle is None:
        packings.append(True)
    quantizations = [config.model.quantization]
    if config.train.method == "lora":
        quantizations += [kind for kind in ("nf4", "fp8") if kind in allowed and kind not in quantizations]
    optimizers = [config.train.optim, *(name for name in allowed if name in OPTIMIZERS)]
    for packing, quantization, optimizer in product(packings, quantizations, dict.fromkeys(optimizers)):
        yield _with_sections(
            resolved,
            data={"packing": packing},
            model={"quantization": quantization},
            train={"optim": optimizer},
            speed={} if packing == config.data.packing else {"attention": "torch_varlen"},
        )


def find_fastest(
    planner: Planner, places: Sequence[DeviceConfig], given: DeviceConfig, allowed: Sequence[str] = ()
) -> SearchResult:
    """The fastest candidate that fits on any of the places.

    Args:
        planner: of the model.
        places: where to look.
        given: the config as it is.
        allowed: as `enumerate_candidates` takes it.

    Raises:
        ModelError: the model's layers are not known.
        MachineError, ConfigError: no plan can be made.
    """
    for place in places:
        require_plannable(place.resolved, planner.model, place.hardware)
    every = enumerate_candidates(planner, places, allowed)
    # A candidate that the closed form finds too close to call may fit by the narrower interval of a simulation.
    hopeful = sorted((one for one in every if one.verdict != "does not fit"), key=lambda one: one.speed)
    simulated: list[Candidate] = []
    best = None
    for candidate in hopeful:
        if len(simulated) == SIMULATED and candidate.verdict != "fits":
            continue
        simulated.append(_simulate(planner, candidate))
        if simulated[-1].verdict in ("fits", "unknown"):
            best = simulated[-1]
            break
        if len(simulated) == 2 * SIMULATED:
            break
    fitting = sum(one.verdict == "fits" for one in every)
    mine = _simulate(planner, _estimate_candidate(planner, given))
    if best and mine.verdict == best.verdict and given.hardware in [place.hardware for place in places]:
        best = best if _faster(best, mine) else mine
    return SearchResult(best, mine, len(every), fitting, tuple(simulated))


def _faster(one: Candidate, other: Candidate) -> bool:
    """Whether it is, by more than the estimates may be off beside each other."""
    if one.step is None or other.step is None:
        return one.speed < other.speed
    return one.step.seconds < (1 - RESOLUTION) * other.step.seconds


def simulate_on_devices(planner: Planner, places: Sequence[DeviceConfig]) -> list[Candidate]:
    """The config on each device as it would run there, simulated."""
    for place in places:
        require_plannable(place.resolved, planner.model, place.hardware)
    return [_simulate(planner, _estimate_candidate(planner, place)) for place in places]


@dataclass(frozen=True)
class SolveResult:
    """How far one setting can go.

    Attributes:
        value: the largest that fits; None where not even the smallest does.
        need: of that value, simulated.
        beyond: the next value, and what it needs; None where `value` is the last there is.
        beyond_need: of `beyond`, simulated.
        limit: why there is no `beyond`.
        simulations: how many were run.
    """

    field: SolvableField
    value: int | str | None
    need: MemoryEstimate | None
    beyond: int | str | None
    beyond_need: MemoryEstimate | None
    limit: str
    simulations: int


def find_largest(field: SolvableField, planner: Planner, place: DeviceConfig) -> SolveResult:
    """The largest value of one setting that fits, everything else as it is.

    The closed form is bisected; its answer and the value one step beyond are simulated, and the answer is moved until
    the one fits and the other does not.

    Args:
        field: max_length (in steps of 64 tokens, up to the model's context), batch (the micro batch, a divisor of the
            global batch), rank (of the LoRA) or model (of the catalogue).
        planner: of the model; its known lengths are not used where the length is asked for.
        place: the device and the config.

    Raises:
        ConfigError: there is no such field, or it means nothing for this config; the device's memory is not known.
    """
    require_plannable(place.resolved, planner.model, place.hardware)
    if place.hardware.memory_bytes is None:
        raise ConfigError(
            f"the memory of {place.hardware.name} is not known",
            code="E8006",
            field="hardware.gpu",
            help="name a GPU: --gpu h100",
        )
    scale = _scale(field, planner, place)
    needs: dict[int, MemoryEstimate] = {}
    process = process_overhead_bytes()

    def fits(index: int) -> bool:
        if index not in needs:
            needs[index] = scale.simulated(index)
        return judge_fit(needs[index], place.hardware.memory_bytes) == "fits"

    def about(index: int, ratio: float) -> bool:
        estimate = round(scale.closed_form(index).bytes * ratio)
        needed = build_memory_estimate(estimate, place.hardware.kind, "simulation", process=process)
        return judge_fit(needed, place.hardware.memory_bytes) == "fits"

    first = max(0, largest_fitting_index(lambda index: about(index, 1.0), scale.count))
    fits(first)
    ratio = needs[first].bytes / scale.closed_form(first).bytes
    found = _refine_guess(
        fits, max(0, largest_fitting_index(lambda index: about(index, ratio), scale.count)), scale.count
    )
    after = found + 1 if found + 1 < scale.count else None
    return SolveResult(
        field,
        scale.value(found) if found >= 0 else None,
        needs.get(found),
        scale.value(after) if after is not None else None,
        needs.get(after) if after is not None else None,
        "" if after is not None else scale.limit,
        len(needs),
    )


@dataclass(frozen=True)
class _Scale:
    """The values of a setting by index, from the least demanding on, and what each needs."""

    count: int
    value: Callable[[int], int | str]
    closed_form: Callable[[int], MemoryEstimate]
    simulated: Callable[[int], MemoryEstimate]
    limit: str


def _scale(field: SolvableField, planner: Planner, place: DeviceConfig) -> _Scale:
    resolved, hardware = place.resolved, place.hardware
    values, limit = _values(field, planner.model, resolved.config)

    def at(index: int) -> tuple[Planner, ResolvedConfig]:
        value = values[index]
        match field:
            case "max_length":
                return replace(planner, lengths=replace(planner.lengths, longest=None)), _with_sections(
                    resolved, data={"max_length": value}
                )
            case "batch":
                return planner, _with_batch_settings(resolved, int(value))
            case "rank":
                return planner, _with_sections(resolved, lora={"r": value})
            case "model":
                other = with_new_tokens(model_facts(str(value)), resolved.config.model.add_tokens, None)
                return Planner(other, planner.lengths), resolved

    def closed(index: int) -> MemoryEstimate:
        one, changed = at(index)
        return _closed_form_or_error(one, changed, hardware)

    def simulated(index: int) -> MemoryEstimate:
        one, changed = at(index)
        return one.simulated(changed, hardware)

    return _Scale(len(values), lambda index: values[index], closed, simulated, limit)


def _values(field: SolvableField, model: ModelFacts, config: Config) -> tuple[Sequence[int] | Sequence[str], str]:
    """The values to look among, least demanding first, and why they end."""
    match field:
        case "max_length":
            context = model.max_position_embeddings or LONGEST
            return range(LENGTH_STEP, context + 1, LENGTH_STEP), f"the context of {model.name} ends there"
        case "batch":
            return _divisors(config.train.global_batch_size), "it is the whole global batch"
        case "rank":
            if config.train.method != "lora":
                raise ConfigError(
                    "there is no rank: all weights are trained", code="E8007", field="train.method", help="use lora"
                )
            return range(1, model.hidden_size + 1), "it is the model's hidden size"
        case "model":
            names = sorted(catalogue(), key=lambda name: (model_facts(name).parameters or 0, name))
            return names, "it is the largest model of the catalogue"
        case _:
            raise ConfigError(f"{field!r} cannot be solved for", code="E8008", help=f"one of {', '.join(FIELDS)}")


def largest_fitting_index(fits: Callable[[int], bool], count: int) -> int:
    """The largest index below `count` that fits, -1 where none does; whatever fits, all before it do."""
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _refine_guess(fits: Callable[[int], bool], guess: int, count: int) -> int:
    """The same, from a guess near it: steps that double until the answer is bracketed, then bisection.

    >>> [_refine_guess(lambda index: index < 40, guess, 100) for guess in (0, 39, 40, 99)]
    [39, 39, 39, 39]
    """
    low, high, stride, probe = -1, count, max(1, guess // 64), guess
    while high - low > 1:
        low, high = (probe, high) if fits(probe) else (low, probe)
        if low >= 0 and high < count:
            probe = (low + high) // 2
        else:
            probe = min(low + stride, count - 1) if low >= 0 else max(high - stride, 0)
        stride *= 2
    return low


def _estimate_candidate(planner: Planner, place: DeviceConfig) -> Candidate:
    """By the closed form; the time only of what may fit, and near enough to sort by."""
    needed = _closed_form_or_error(planner, place.resolved, place.hardware)
    said = judge_fit(needed, place.hardware.memory_bytes)
    step = None if said == "does not fit" else planner.step(place.resolved, place.hardware, near=True)
    return Candidate(place, needed, said, step)


def _closed_form_or_error(planner: Planner, resolved: ResolvedConfig, hardware: HardwareFacts) -> MemoryEstimate:
    found = planner.closed_form(resolved, hardware)
    if found is None:
        raise ModelError(
            f"the layers of {planner.model.name} are not known, so nothing can be searched",
            code="E8009",
            field="model.name_or_path",
            help="`surefit plan CONFIG` simulates it as it is",
        )
    return found


def _simulate(planner: Planner, candidate: Candidate) -> Candidate:
    place = candidate.place
    needed = planner.simulated(place.resolved, place.hardware)
    step = planner.step(place.resolved, place.hardware)
    return replace(candidate, need=needed, verdict=judge_fit(needed, place.hardware.memory_bytes), step=step)


def _divisors(whole: int) -> list[int]:
    return [size for size in range(1, whole + 1) if whole % size == 0]


def _with_batch_settings(
    resolved: ResolvedConfig, micro: int, checkpointing: Any = None, tiled: bool | None = None
) -> ResolvedConfig:
    """The same optimisation in other parts; None leaves what there is."""
    train, speed = resolved.config.train, resolved.config.speed
    changed = _with_sections(
        resolved,
        train={
            "per_device_train_batch_size": micro,
            "gradient_checkpointing": train.gradient_checkpointing if checkpointing is None else checkpointing,
        },
        speed={"tiled_mlp": speed.tiled_mlp if tiled is None else tiled},
    )
    return replace(changed, gradient_accumulation_steps=count_accumulation_steps(changed.config))


def _with_sections(resolved: ResolvedConfig, **sections: dict[str, Any]) -> ResolvedConfig:
    config = resolved.config
    changes = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return replace(resolved, config=config.model_copy(update=changes))
