"""The seconds of an optimizer step for many ways to divide its batch, from few simulations.

One micro batch is simulated and timed; a step is the micro batches it accumulates, and one update. Where all weights
are trained, a second simulation with two micro batches separates the update; a LoRA's is too short to matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import SureFitConfig, decided
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
Packed ones need none, so there it is one row and many."""
TILED = 1.15
"""Approximate cost factor of tiles: their MLPs compute forward once more. For sorting only."""
MANY_TOKENS = 32_768
"""Tokens of a micro batch beyond which its tiles are not run."""
UPDATE_LENGTH = 16
"""Tokens of the micro batch that separates the update: its cost does not depend on the length."""


@dataclass
class StepTimeCache:
    """Step times of one model, with a cache of its simulations."""

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
        """Return the time of an optimizer step with examples of `length` tokens; None where the device's speed is not
        known.

        Args:
            resolved: the config without "auto".
            hardware: the device.
            length: tokens of every example.
            supervised: the share of the tokens that the loss counts.
            rows: most examples in a micro batch, for processes that share a step.
            near: interpolate between micro batches of `FEW` and `MANY` rows, which is exact enough to sort candidates.
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
        # Many GPUs run the same operators, so they share simulations.
        setting = replace(setting, micro_batches=1, capability=_oldest_equivalent_capability(setting))
        # With packing, a step has no whole number of equal micro batches; the remainder counts by its share.
        micro_batches = _sequences(resolved.config) / setting.rows
        tile_cost = 1.0
        if setting.tiled_mlp and (near or setting.tokens > MANY_TOKENS):
            setting, tile_cost = replace(setting, tiled_mlp=False), TILED
        if near and setting.checkpointing == "offload":
            setting = replace(setting, checkpointing=True)
        micro, update = self._near(setting, rates, near), self._update(setting, rates)
        total = (
            OperatorTime(overlaps=rates.overlaps)
            .plus(micro, tile_cost * micro_batches)
            .plus(update, -max(0.0, micro_batches - 1))
        )
        seconds = total.seconds
        peak = rates.peak.get(setting.dtype) or max(rates.peak.values())
        few = _few(setting)
        timed = replace(setting, rows=few) if near and setting.rows > few else setting
        counted, evaluation = self._operations(timed)
        times = micro_batches * setting.rows / timed.rows
        return StepTime(
            seconds=seconds,
            low=seconds * (1 - rates.margin),
            high=seconds * (1 + rates.margin),
            flops=round(times * _sum(counted, "flops")),
            bytes=round(times * _sum(counted, "bytes")),
            kernels=round(micro_batches * _sum(counted, "kernels")),
            mfu=times * self._needed(resolved, timed) / (seconds * peak),
            tokens_per_second=micro_batches * setting.tokens / seconds,
            evaluation_tokens_per_second=timed.tokens / roofline(evaluation, rates)[0],
            limit=total.limit,
            source=rates.source,
        )

    def _near(self, setting: StepConfig, rates: DeviceRates, near: bool) -> OperatorTime:
        """Return the time of a step of one micro batch, interpolated or not."""
        least = _few(setting)
        if not near or setting.rows <= least:
            return self._micro(setting, rates)
        few, many = (self._micro(replace(setting, rows=rows), rates) for rows in (least, MANY))
        further = (setting.rows - least) / (MANY - least)
        return few.plus(many, further).plus(few, -further)

    def _micro(self, setting: StepConfig, rates: DeviceRates) -> OperatorTime:
        """Return the time of a step of one micro batch, its update included."""
        from surefit.plan.time import operator_time

        return operator_time(self._operations(setting)[0], rates)

    def _update(self, setting: StepConfig, rates: DeviceRates) -> OperatorTime:
        from surefit.plan.time import OperatorTime

        if setting.adapter is not None:
            return OperatorTime(overlaps=rates.overlaps)
        # An update does not depend on the loss.
        alone = replace(setting, rows=1, objective=None, padded=False, shared=0)
        short = replace(alone, length=UPDATE_LENGTH, checkpointing=False, tiled_mlp=False)
        single, double = (self._micro(replace(short, micro_batches=count), rates) for count in (1, 2))
        return single.plus(single).plus(double, -1.0)

    def _needed(self, resolved: ResolvedConfig, setting: StepConfig) -> float:
        """Return the FLOP that the mathematics of a micro batch needs, as training counts them; where there is no such
        count for the architecture, the FLOP of its step, recomputation included."""
        work = training_flops(self.model, resolved.config)
        if work is None:
            return _sum(self._operations(setting)[0], "flops")
        return work.of([setting.length] * setting.rows, setting.targets, [setting.shared] * (setting.rows // 2))

    def _operations(self, setting: StepConfig) -> tuple[Operations, Operations]:
        from surefit.plan.time import count_step_operations

        key = tuple(repr(value) for name, value in vars(setting).items() if name != "config")
        if key not in self._counted:
            self._counted[key] = count_step_operations(setting)
        return self._counted[key]


def _few(setting: StepConfig) -> int:
    return 1 if setting.packed and setting.objective is None else FEW


def _sum(counted: Operations, what: Literal["flops", "bytes", "kernels"]) -> float:
    return sum(times * float(getattr(operation, what)) for operation, times in counted.items())


def device_rates_for(hardware: HardwareFacts) -> DeviceRates | None:
    """Return the rates of the device: measured, else from its data sheet."""
    from surefit.plan.profile import find_device_speed, to_device_rates

    device = find_device_speed(hardware)
    if device is None:
        return None
    try:
        return to_device_rates(device)
    except MachineError:
        return None


def _oldest_equivalent_capability(setting: StepConfig) -> tuple[int, int]:
    """Return the capability of the oldest GPU that runs the same operators: float8 products begin with Ada, flash
    attention with Ampere."""
    return min(setting.capability, (8, 9) if setting.quantization == "fp8" else (8, 0))


def _sequences(config: SureFitConfig) -> int:
    """Return the sequences of an optimizer step: its examples, or two for each pair."""
    return config.objective.answers_per_example * decided(config.train.global_batch_size)
