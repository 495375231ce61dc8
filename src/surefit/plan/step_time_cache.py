"""Seconds of an optimizer step for many ways to cut its batch, from few simulations.

One micro batch is simulated and timed; a step is as many of them as it accumulates, and one update. The update is told
apart by a second simulation with two micro batches where all weights are trained; a LoRA's is too short to matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from surefit.config.resolve import ResolvedConfig
from surefit.core.errors import MachineError
from surefit.core.gc_pause import pause_gc
from surefit.facts.flops import training_flops
from surefit.facts.hardware import HardwareFacts
from surefit.facts.model import ModelFacts
from surefit.plan.loading import import_libraries

if TYPE_CHECKING:
    from surefit.plan.operations import Operations
    from surefit.plan.profile import DeviceRates
    from surefit.plan.step_config import StepConfig
    from surefit.plan.time import OperatorTime, StepTime

FEW, MANY = 2, 16
"""Rows of the two padded micro batches through which the time of others is interpolated: one row alone needs no mask.
Packed ones have none, so there it is one row and many."""
TILED = 1.15
"""What tiles cost, about: their MLPs compute forward once more. For sorting alone."""
MANY_TOKENS = 32_768
"""Of a micro batch, from which on its tiles are not run."""
UPDATE_LENGTH = 16
"""Tokens of the micro batch from which the update is told apart: it costs the same whatever the length."""


@dataclass
class StepTimeCache:
    """Step times of one model; what was simulated once is not simulated again."""

    model: ModelFacts
    _counted: dict[tuple[Any, ...], tuple[Operations, Operations]] = field(default_factory=dict)

    def step(
        self,
        resolved: ResolvedConfig,
        hardware: HardwareFacts,
        length: int,
        supervised: float = 1.0,
        *,
        rows: int | None = None,
        near: bool = False,
    ) -> StepTime | None:
        """The time of an optimizer step with examples of `length` tokens; None where the device's speed is not known.

        Args:
            resolved: the config without "auto".
            hardware: the device.
            length: tokens of every example.
            supervised: the share of them that the loss counts.
            rows: examples of a micro batch at most: what processes that share a step put into theirs.
            near: interpolate between micro batches of `FEW` and `MANY` rows: enough to sort candidates by.
        """
        rates = device_rates_for(hardware)
        if rates is None:
            return None
        with pause_gc():
            return self._step(resolved, hardware, rates, length, supervised, rows, near)

    def _step(
        self,
        resolved: ResolvedConfig,
        hardware: HardwareFacts,
        rates: DeviceRates,
        length: int,
        supervised: float,
        rows: int | None,
        near: bool,
    ) -> StepTime:
        import_libraries()
        from surefit.plan.step_config import build_step_config
        from surefit.plan.time import OperatorTime, StepTime, roofline

        setting = build_step_config(resolved, self.model, hardware, length=length, supervised=supervised)
        if rows is not None and rows < setting.rows:
            setting = replace(setting, rows=rows, length=min(length, resolved.config.data.max_length))
        # Many GPUs run the same operators, so they share what was simulated.
        setting = replace(setting, micro_batches=1, capability=_oldest_equivalent_capability(setting))
        # Packed, a step has no whole number of equal micro batches; what is left over is as good as its share.
        parts = resolved.config.train.global_batch_size / setting.rows
        extra = 1.0
        if setting.tiled_mlp and (near or setting.tokens > MANY_TOKENS):
            setting, extra = replace(setting, tiled_mlp=False), TILED
        if near and setting.checkpointing == "offload":
            setting = replace(setting, checkpointing=True)
        micro, update = self._near(setting, rates, near), self._update(setting, rates)
        whole = OperatorTime(overlaps=rates.overlaps).plus(micro, extra * parts).plus(update, -max(0.0, parts - 1))
        seconds = whole.seconds
        peak = rates.peak.get(setting.dtype) or max(rates.peak.values())
        few = _few(setting)
        like = replace(setting, rows=few) if near and setting.rows > few else setting
        counted, evaluation = self._operations(like)
        times = parts * setting.rows / like.rows
        return StepTime(
            seconds=seconds,
            low=seconds * (1 - rates.margin),
            high=seconds * (1 + rates.margin),
            flops=round(times * _sum(counted, "flops")),
            bytes=round(times * _sum(counted, "bytes")),
            kernels=round(parts * _sum(counted, "kernels")),
            mfu=times * self._needed(resolved, like) / (seconds * peak),
            tokens_per_second=parts * setting.tokens / seconds,
            evaluation_tokens_per_second=like.tokens / roofline(evaluation, rates)[0],
            limit=whole.limit,
            source=rates.source,
        )

    def _near(self, setting: StepConfig, rates: DeviceRates, near: bool) -> OperatorTime:
        """What a step of one micro batch takes, interpolated or not."""
        least = _few(setting)
        if not near or setting.rows <= least:
            return self._micro(setting, rates)
        few, many = (self._micro(replace(setting, rows=rows), rates) for rows in (least, MANY))
        further = (setting.rows - least) / (MANY - least)
        return few.plus(many, further).plus(few, -further)

    def _micro(self, setting: StepConfig, rates: DeviceRates) -> OperatorTime:
        """What a step of one micro batch takes, its update included."""
        from surefit.plan.time import operator_time

        return operator_time(self._operations(setting)[0], rates)

    def _update(self, setting: StepConfig, rates: DeviceRates) -> OperatorTime:
        from surefit.plan.time import OperatorTime

        if setting.adapter is not None:
            return OperatorTime(overlaps=rates.overlaps)
        short = replace(setting, rows=1, length=UPDATE_LENGTH, padded=False, checkpointing=False, tiled_mlp=False)
        one, two = (self._micro(replace(short, micro_batches=count), rates) for count in (1, 2))
        return one.plus(one).plus(two, -1.0)

    def _needed(self, resolved: ResolvedConfig, setting: StepConfig) -> float:
        """Operations that the mathematics of a micro batch asks for, as training counts them; where there is no such
        count for the architecture, those of its step, what is computed twice included."""
        work = training_flops(self.model, resolved.config)
        if work is None:
            return _sum(self._operations(setting)[0], "flops")
        return work.of([setting.length] * setting.rows, setting.targets)

    def _operations(self, setting: StepConfig) -> tuple[Operations, Operations]:
        from surefit.plan.time import count_step_operations

        key = tuple(repr(value) for name, value in vars(setting).items() if name != "config")
        if key not in self._counted:
            self._counted[key] = count_step_operations(setting)
        return self._counted[key]


def _few(setting: StepConfig) -> int:
    return 1 if setting.packed else FEW


def _sum(counted: Operations, what: Literal["flops", "bytes", "kernels"]) -> float:
    return sum(times * float(getattr(operation, what)) for operation, times in counted.items())


def device_rates_for(hardware: HardwareFacts) -> DeviceRates | None:
    """How fast the device is: as it was measured, else as its data sheet says."""
    from surefit.plan.profile import find_device_speed, to_device_rates

    device = find_device_speed(hardware)
    if device is None:
        return None
    try:
        return to_device_rates(device)
    except MachineError:
        return None


def _oldest_equivalent_capability(setting: StepConfig) -> tuple[int, int]:
    """The oldest GPU that runs the same operators: float8 products begin with Ada, flash attention with Ampere."""
    return min(setting.capability, (8, 9) if setting.quantization == "fp8" else (8, 0))
