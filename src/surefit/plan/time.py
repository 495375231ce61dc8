"""The time of a training step and of a run, and the run's cost.

Each operator of the real step, simulated, takes the time of its arithmetic or of the bytes it moves, whichever is
longer (the roofline). A GPU works while the next kernels are launched: a step takes the time of its operators or of its
launches, whichever is longer; on a CPU, which does one after the other, the sum of both. The rates are measured
(`surefit calibrate`) or a data sheet's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from surefit.core.errors import ConfigError
from surefit.plan.operations import Operation, Operations, OperatorCounter, extrapolate_operations
from surefit.plan.profile import DeviceRates, interpolate_speed
from surefit.plan.simulate import DEEP, record_training
from surefit.plan.step_config import CacheKey, StepConfig
from surefit.plan.trace import ReplayCallback

SHALLOW = (2, 3)
"""Layers of the two models whose operators are counted, to extrapolate along the line through them."""
START_SECONDS = 15.0
"""Seconds from the command to the first step without reading the weights: imports and the tokenizer."""
DISK_BYTES_PER_SECOND = 500e6
"""Assumed speed of an unspecified disk: reading weights and writing checkpoints."""
LOADING_TOKENS_PER_SECOND = 2e6
"""Tokens per second at which the training process collates tokenized rows into batches (measured:
docs/plan-method.md)."""

Limit = Literal["arithmetic", "memory bandwidth", "kernel launches", "data loading", "exchange between GPUs"]


@dataclass(frozen=True)
class StepTime:
    """Time of one optimizer step.

    Attributes:
        seconds: the expected time; low, high: the interval from the known error of the method.
        flops: floating-point operations of matrix products, recomputed ones included.
        bytes: bytes read and written by all operators; kernels: number of kernel launches.
        mfu: share of the device's peak that the operations would reach without recomputation (model FLOPs utilization).
        tokens_per_second: padding included.
        evaluation_tokens_per_second: speed of a forward pass alone.
        limit: the resource that accounts for the largest part of the time.
        source: the origin of the rates.
    """

    seconds: float
    low: float
    high: float
    flops: int
    bytes: int
    kernels: int
    mfu: float
    tokens_per_second: float
    evaluation_tokens_per_second: float
    limit: Limit
    source: str


@dataclass(frozen=True)
class RunTime:
    """Time of a whole run.

    Attributes:
        parts: seconds of start, steps, loading, evaluations, saves and, of pairs, the stored reference; they add up to
            `seconds`.
        low, high: the interval; only the steps and evaluations have one.
        limit: the limit of the steps.
    """

    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    limit: Limit

    def cost(self, price: float, devices: int = 1) -> tuple[float, float, float]:
        """Return (expected, low, high) in the currency of `price`, which is per device and hour.

        Raises:
            ConfigError: a negative price.
        """
        if price < 0:
            raise ConfigError(
                f"a price of {price:g} per hour", code="E8016", field="--price", help="0 or more, e.g. --price 2.5"
            )
        hours = price * devices / 3600
        return self.seconds * hours, self.low * hours, self.high * hours


def run_time(
    step: StepTime,
    steps: int,
    *,
    tokens_per_step: float = 0,
    weight_bytes: int = 0,
    evaluations: int = 0,
    evaluation_tokens: float = 0,
    reference_tokens: float = 0,
    saves: int = 0,
    save_bytes: int = 0,
    disk: float = DISK_BYTES_PER_SECOND,
    loading: float = LOADING_TOKENS_PER_SECOND,
) -> RunTime:
    """Return the time of a run, from the command to the trained adapter.

    Args:
        step: time of a step of usual length.
        steps: optimizer steps.
        tokens_per_step: tokens that the data loader collates between two steps, padding included.
        weight_bytes: bytes read from the disk before the first step.
        evaluations: number of held-out losses; evaluation_tokens: in each, padding included.
        reference_tokens: tokens of the pairs whose reference is stored before the first step, padding included.
        saves: number of checkpoints; save_bytes: of each.
        disk: bytes per second; loading: tokens per second.
    """
    parts = {
        "start": START_SECONDS + weight_bytes / disk,
        "steps": steps * step.seconds,
        "loading": steps * tokens_per_step / loading,
        "evaluations": evaluations * evaluation_tokens / step.evaluation_tokens_per_second,
        "saves": saves * save_bytes / disk,
    }
    if reference_tokens:
        parts["reference"] = reference_tokens / step.evaluation_tokens_per_second
    seconds = sum(parts.values())
    uncertain = parts["steps"] + parts["evaluations"] + parts.get("reference", 0.0)
    limit: Limit = "data loading" if parts["loading"] > parts["steps"] else step.limit
    return RunTime(
        seconds,
        seconds - uncertain * (1 - step.low / step.seconds),
        seconds + uncertain * (step.high / step.seconds - 1),
        parts,
        limit,
    )


def count_step_operations(setting: StepConfig) -> tuple[Operations, Operations]:
    """Return the operators of one optimizer step, and of one held-out micro batch. Results are cached."""
    return _operations(setting.known)


@dataclass(frozen=True)
class OperatorTime:
    """Time of operators by its cause, in seconds.

    Attributes:
        arithmetic, movement: time of the operators limited by one or the other.
        launches: time to launch all their kernels.
        overlaps: whether the device works while kernels are launched.
    """

    arithmetic: float = 0.0
    movement: float = 0.0
    launches: float = 0.0
    overlaps: bool = True

    def plus(self, other: OperatorTime, times: float = 1.0) -> OperatorTime:
        """Return the sum with `times` × the other; no part below zero."""
        parts = ("arithmetic", "movement", "launches")
        sums = {name: max(0.0, getattr(self, name) + times * getattr(other, name)) for name in parts}
        return replace(self, **sums)

    @property
    def seconds(self) -> float:
        """Seconds from the first launch to the end of the last kernel.

        1,000 kernels of 21 µs each to launch, and 15 ms of work: 21 ms on a GPU, which waits for them, and with 30 ms
        of work 30 ms. On a CPU 36 and 51 ms.
        """
        work = self.arithmetic + self.movement
        return max(work, self.launches) if self.overlaps else work + self.launches

    @property
    def limit(self) -> Limit:
        """Resource that accounts for the largest part of the time; on a GPU launches only where it waits for them."""
        work: Limit = "arithmetic" if self.arithmetic > self.movement else "memory bandwidth"
        largest = self.arithmetic + self.movement if self.overlaps else max(self.arithmetic, self.movement)
        return "kernel launches" if self.launches > largest else work


def operator_time(counted: Operations, rates: DeviceRates) -> OperatorTime:
    """Return the time of these operators by its cause, one after the other."""
    arithmetic = movement = launches = 0.0
    for operation, times in counted.items():
        computed, moved = (
            _arithmetic(operation, rates),
            operation.bytes / interpolate_speed(rates.copy, operation.bytes),
        )
        if computed > moved:
            arithmetic += times * computed
        else:
            movement += times * moved
        launches += times * operation.kernels * rates.launch
    return OperatorTime(arithmetic, movement, launches, rates.overlaps)


def roofline(counted: Operations, rates: DeviceRates) -> tuple[float, Limit]:
    """Return (seconds, the limit of most of them) of these operators, one after the other."""
    total = operator_time(counted, rates)
    return total.seconds, total.limit


def _arithmetic(operation: Operation, rates: DeviceRates) -> float:
    """Return the seconds of the matrix products, or of attention's, which has rates of its own."""
    if not operation.flops:
        return 0.0
    if operation.attention:
        kernel, direction, width = operation.attention.split()
        backward = direction == "backward"
        return operation.flops / rates.attention_speed(kernel, backward, int(width), operation.dtype, operation.flops)
    return operation.flops / rates.product_speed(operation.dtype, operation.flops)


@lru_cache(maxsize=256)
def _operations(known: CacheKey) -> tuple[Operations, Operations]:
    """Return the operators of a step and of an evaluation: of many micro batches only one and two are run, since every
    further one costs the same as the second."""
    setting = known.setting
    if setting.micro_batches <= 2:
        return _all_layers(setting)
    (single, _), (double, evaluation) = (_all_layers(replace(setting, micro_batches=count)) for count in (1, 2))
    return extrapolate_operations(single, double, setting.micro_batches - 2), evaluation


def _all_layers(setting: StepConfig) -> tuple[Operations, Operations]:
    layers = setting.layers
    if layers <= DEEP or not setting.uniform:
        return _count(setting)
    (step2, evaluation2), (step3, evaluation3) = (_count(setting.with_layers(depth)) for depth in SHALLOW)
    further = layers - SHALLOW[1]
    return extrapolate_operations(step2, step3, further), extrapolate_operations(evaluation2, evaluation3, further)


def _count(setting: StepConfig) -> tuple[Operations, Operations]:
    step, evaluation = OperatorCounter({"step"}), OperatorCounter({"eval"})

    def watch(phase: str, *call: Any) -> ReplayCallback | None:
        return (evaluation if phase == "eval" else step).note(phase, *call)

    record_training(replace(setting, evaluates=True), watch)
    return step.operations, evaluation.operations
