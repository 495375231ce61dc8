"""The search for the fastest way to run the same optimization within a device's memory, and for the largest value of
one setting that fits.

Every candidate keeps the global batch, the adapter, the lengths and the dtype: the model that is learned is the same.
The closed form judges all of them in milliseconds; the few that matter are simulated before anything is reported.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

from surefit.config.capabilities import conflict_with_trait, conflicts, traits
from surefit.config.memory import RECOMPUTED
from surefit.config.modes import ZERO
from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import SureFitConfig, decided
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
"""Number of the fastest candidates that are simulated, the fastest first, until one fits."""
RESOLUTION = 0.01
"""Share of a step's time below which two estimates count as equal: the config then stays as it is."""
LENGTH_STEP = 64
"""Tokens between two lengths that `find_largest` distinguishes."""
LONGEST = 2**20
"""Longest length that is tried, in tokens, where the model states no context length."""


@dataclass(frozen=True)
class DeviceConfig:
    """A device, and the config with every "auto" decided for it."""

    hardware: HardwareFacts
    resolved: ResolvedConfig


@dataclass(frozen=True)
class Candidate:
    """One way to run the training.

    Attributes:
        need: memory, by the closed form until it is simulated.
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
        """Mode of the section `parallel`, and its sizes above 1."""
        parallel = self.place.resolved.config.parallel
        sizes = {name: getattr(parallel, name) for name in ("tp", "cp", "pp", "dp_replicate")}
        return {"mode": parallel.mode} | {name: value for name, value in sizes.items() if value > 1}

    @property
    def processes(self) -> int:
        return count_processes(self.place.resolved.config)

    @property
    def speed(self) -> tuple[float, int, bool, int]:
        """Sort key of candidates, fastest first; those without a known time come last, in a likely order."""
        seconds = self.step.seconds if self.step else math.inf
        return (seconds, RECOMPUTED.index(self.checkpointing), self.tiled, self.accumulation)


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        best: the fastest candidate that fits, by simulation; None where none does, and `given` where that fits and the
            fastest is not faster by more than `RESOLUTION`.
        given: the config as it was, judged in the same way.
        considered: number of candidates that were judged.
        fitting: number of them that fit by the closed form.
        simulated: the candidates that were simulated, in that order.
    """

    best: Candidate | None
    given: Candidate
    considered: int
    fitting: int
    simulated: tuple[Candidate, ...]


def enumerate_candidates(planner: Planner, places: Sequence[DeviceConfig]) -> list[Candidate]:
    """Return all candidates, judged by the closed form: device × way in which several processes share the run × micro
    batch that divides the global batch × gradient checkpointing × MLP tiles × packing.

    Where a config packs its examples, no candidate pads them: that is never faster.

    Args:
        planner: estimates for the model.
        places: devices, each with the config.

    Raises:
        ModelError: the model's layers are not known.
    """
    return [
        _estimate_candidate(
            planner, DeviceConfig(place.hardware, _with_batch_settings(changed, micro, checkpointing, tiled))
        )
        for place in places
        for changed in _variants(place, planner.model)
        for micro in _divisors(decided(place.resolved.config.train.global_batch_size))
        if micro <= examples_per_data_rank(changed.config)
        for checkpointing in RECOMPUTED
        for tiled in (False, True)
    ]


def _variants(place: DeviceConfig, model: ModelFacts) -> Iterator[ResolvedConfig]:
    """Yield the variants of the config that do not concern how its batch is divided."""
    deepspeed = place.hardware.is_another_machine or find_spec("deepspeed") is not None
    variants = [place.resolved]
    if place.resolved.config.data.packing is False and model.packing_obstacle is None:
        packed = _with_sections(place.resolved, data={"packing": True}, speed={"attention": "torch_varlen"})
        variants.append(packed)
    for changed in variants:
        yield from shared_variants(changed, model, deepspeed)


def shared_variants(resolved: ResolvedConfig, model: ModelFacts, deepspeed: bool) -> Iterator[ResolvedConfig]:
    """Yield the config with each way in which its processes can share the run; unchanged where there is one process.
    `deepspeed`: whether DeepSpeed's modes are among them."""
    config, count = resolved.config, count_processes(resolved.config)
    if count == 1:
        yield resolved
        return
    nodes = config.hardware.nodes
    unshared = {"mode": "ddp", "tp": 1, "cp": 1, "pp": 1, "dp_replicate": 1, "offload": False}
    options = [unshared, unshared | {"mode": "fsdp"}]
    options += [unshared | {"mode": "fsdp", "dp_replicate": nodes}] if nodes > 1 else []
    options += [unshared | {"mode": mode} for mode in ZERO if deepspeed]
    options += [unshared | {"mode": mode, "cp": size} for mode in ("cp", "fsdp") for size in _divisors(count)[1:]]
    options += [unshared | {"mode": "tp", "tp": count}]
    section = config.parallel.model_dump()
    current = {name: section[name] for name in unshared}
    if current not in options:
        options.insert(0, current)
    for option in options:
        changed = _with_sections(resolved, parallel=option)
        if conflict_with_trait(changed.config, "fused LoRA"):
            changed = _with_sections(changed, speed={"fused_lora": False})
        if conflict_with_trait(changed.config, "fused kernels"):
            changed = _with_sections(changed, speed={"kernels": False})
        if changed.config.parallel.cp > 1:
            changed = _with_sections(changed, speed={"attention": "torch_varlen"})
        if _possible(changed, model):
            yield changed


def _possible(resolved: ResolvedConfig, model: ModelFacts) -> bool:
    """Return whether `train` supports this way of sharing."""
    config = resolved.config
    if conflicts(traits(config)) or sharing_obstacle(config, model):
        return False
    with contextlib.suppress(ConfigError):
        require_shareable(config)
        return config.parallel.mode != "tp" or has_closed_form(model)
    return False


def find_fastest(planner: Planner, places: Sequence[DeviceConfig], given: DeviceConfig) -> SearchResult:
    """Return the fastest candidate that fits on any of the devices.

    Args:
        planner: estimates for the model.
        places: devices to search, each with the config.
        given: the config as it is.

    Raises:
        ModelError: the model's layers are not known.
        MachineError, ConfigError: no plan can be made.
    """
    for place in places:
        require_plannable(place.resolved, planner.model, place.hardware)
    candidates = enumerate_candidates(planner, places)
    # A candidate that the closed form finds too close to call may fit by the narrower interval of a simulation.
    promising = sorted(
        (candidate for candidate in candidates if candidate.verdict != "does not fit"),
        key=lambda candidate: candidate.speed,
    )
    simulated: list[Candidate] = []
    best = None
    for candidate in promising:
        if len(simulated) == SIMULATED and candidate.verdict != "fits":
            continue
        simulated.append(_simulate(planner, candidate))
        if simulated[-1].verdict in ("fits", "unknown"):
            best = simulated[-1]
            break
        if len(simulated) == 2 * SIMULATED:
            break
    fitting = sum(candidate.verdict == "fits" for candidate in candidates)
    baseline = _simulate(planner, _estimate_candidate(planner, given))
    if best and baseline.verdict == best.verdict and given.hardware in [place.hardware for place in places]:
        best = best if _faster(best, baseline) else baseline
    return SearchResult(best, baseline, len(candidates), fitting, tuple(simulated))


def _faster(one: Candidate, other: Candidate) -> bool:
    """Return whether `one` is faster than `other` by more than the estimates may be off relative to each other."""
    if one.step is None or other.step is None:
        return one.speed < other.speed
    return one.step.seconds < (1 - RESOLUTION) * other.step.seconds


def simulate_on_devices(planner: Planner, places: Sequence[DeviceConfig]) -> list[Candidate]:
    """Return the config on each device, simulated as it would run there."""
    for place in places:
        require_plannable(place.resolved, planner.model, place.hardware)
    return [_simulate(planner, _estimate_candidate(planner, place)) for place in places]


@dataclass(frozen=True)
class SolveResult:
    """The largest value of one setting that fits, and the next one.

    Attributes:
        value: the largest value that fits; None where not even the smallest does.
        need: memory at `value`, simulated.
        beyond: the next value; None where `value` is the last.
        beyond_need: memory at `beyond`, simulated.
        limit: why there is no `beyond`.
        simulations: number of simulations that were run.
    """

    field: SolvableField
    value: int | str | None
    need: MemoryEstimate | None
    beyond: int | str | None
    beyond_need: MemoryEstimate | None
    limit: str
    simulations: int


def find_largest(field: SolvableField, planner: Planner, place: DeviceConfig) -> SolveResult:
    """Return the largest value of one setting that fits, with everything else as it is.

    The closed form is bisected; its answer and the value one step beyond are simulated, and the answer is moved until
    the one fits and the other does not.

    Args:
        field: max_length (in steps of 64 tokens, up to the model's context), batch (the micro batch, a divisor of the
            global batch), rank (of the LoRA) or model (of the catalogue).
        planner: estimates for the model; its known lengths are not used where `field` is the length.
        place: the device and the config.

    Raises:
        ConfigError: there is no such field, or it means nothing for this config; the device's memory is not known.
    """
    require_plannable(place.resolved, planner.model, place.hardware)
    if place.hardware.memory_bytes is None:
        raise ConfigError(
            f"the memory of {place.hardware.name} is unknown",
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

    def fits_by_estimate(index: int, ratio: float) -> bool:
        estimate = round(scale.closed_form(index).bytes * ratio)
        needed = build_memory_estimate(estimate, place.hardware.kind, "simulation", process=process)
        return judge_fit(needed, place.hardware.memory_bytes) == "fits"

    first = max(0, largest_fitting_index(lambda index: fits_by_estimate(index, 1.0), scale.count))
    fits(first)
    ratio = needs[first].bytes / scale.closed_form(first).bytes
    largest = _refine_guess(
        fits, max(0, largest_fitting_index(lambda index: fits_by_estimate(index, ratio), scale.count)), scale.count
    )
    following = largest + 1 if largest + 1 < scale.count else None
    return SolveResult(
        field,
        scale.value(largest) if largest >= 0 else None,
        needs.get(largest),
        scale.value(following) if following is not None else None,
        needs.get(following) if following is not None else None,
        "" if following is not None else scale.limit,
        len(needs),
    )


@dataclass(frozen=True)
class _Scale:
    """Values of a setting by index, the least demanding first, with functions that return the memory at each."""

    count: int
    value: Callable[[int], int | str]
    closed_form: Callable[[int], MemoryEstimate]
    simulated: Callable[[int], MemoryEstimate]
    limit: str


def _scale(field: SolvableField, planner: Planner, place: DeviceConfig) -> _Scale:
    resolved, hardware = place.resolved, place.hardware
    values, limit = _values(field, planner.model, resolved.config)
    if field == "model":  # some architectures have no formula, by which the search is bisected
        named = [(str(name), Planner(model_facts(str(name)), planner.lengths)) for name in values]
        values = [name for name, of_name in named if of_name.closed_form(resolved, hardware) is not None]

    def setting_at(index: int) -> tuple[Planner, ResolvedConfig]:
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
                solved = with_new_tokens(model_facts(str(value)), resolved.config.model.add_tokens, None)
                return Planner(solved, planner.lengths), resolved

    def closed(index: int) -> MemoryEstimate:
        index_planner, changed = setting_at(index)
        return _closed_form_or_error(index_planner, changed, hardware)

    def simulated(index: int) -> MemoryEstimate:
        index_planner, changed = setting_at(index)
        return index_planner.simulated(changed, hardware)

    return _Scale(len(values), lambda index: values[index], closed, simulated, limit)


def _values(
    field: SolvableField, model: ModelFacts, config: SureFitConfig
) -> tuple[Sequence[int] | Sequence[str], str]:
    """Return the values to search, the least demanding first, and the reason why they end."""
    match field:
        case "max_length":
            context = model.max_position_embeddings or LONGEST
            return range(LENGTH_STEP, context + 1, LENGTH_STEP), f"it is the context length of {model.name}"
        case "batch":
            return _divisors(decided(config.train.global_batch_size)), "it is the whole global batch"
        case "rank":
            if config.train.method != "lora":
                raise ConfigError(
                    "there is no LoRA rank: all weights are trained",
                    code="E8007",
                    field="train.method",
                    help="use lora",
                )
            return range(1, model.hidden_size + 1), "it is the model's hidden size"
        case "model":
            names = sorted(catalogue(), key=lambda name: (model_facts(name).parameters or 0, name))
            return names, "it is the largest model of the catalogue"
        case _:
            raise ConfigError(
                f"--solve {field!r} is not supported", code="E8008", help=f"choose one of {', '.join(FIELDS)}"
            )


def largest_fitting_index(fits: Callable[[int], bool], count: int) -> int:
    """Return the largest index below `count` that fits, or -1 where none does. Assumes that all indices before a
    fitting one fit."""
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _refine_guess(fits: Callable[[int], bool], guess: int, count: int) -> int:
    """Return the same as `largest_fitting_index`, from a guess near it: steps that double until the answer is
    bracketed, then bisection.

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
    """Return a candidate by the closed form; the time only where it may fit, and exact enough to sort by."""
    needed = _closed_form_or_error(planner, place.resolved, place.hardware)
    verdict = judge_fit(needed, place.hardware.memory_bytes)
    step = None if verdict == "does not fit" else planner.step(place.resolved, place.hardware, near=True)
    return Candidate(place, needed, verdict, step)


def _closed_form_or_error(planner: Planner, resolved: ResolvedConfig, hardware: HardwareFacts) -> MemoryEstimate:
    estimate = planner.closed_form(resolved, hardware)
    if estimate is None:
        raise ModelError(
            f"the layers of {planner.model.name} are unknown, so there is nothing to search",
            code="E8009",
            field="model.name_or_path",
            help="`surefit plan CONFIG` simulates the config without a search",
        )
    return estimate


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
    """Return the config with the same optimization divided differently; None keeps the current setting."""
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
