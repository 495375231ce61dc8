"""Seconds of an optimizer step for many ways to cut its batch, from few simulations.

One micro batch is simulated and timed; a step is as many of them as it accumulates, and one update. The update is told
apart by a second simulation with two micro batches where all weights are trained; a LoRA's is too short to matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from surefit.config.resolve import Resolved
from surefit.core.errors import MachineError
from surefit.facts.hardware import HardwareFacts
from surefit.facts.model import ModelFacts

if TYPE_CHECKING:
    from surefit.plan.operations import Operations
    from surefit.plan.profile import Rates
    from surefit.plan.setting import Setting
    from surefit.plan.time import StepTime

FEW, MANY = 2, 16
"""Rows of the two micro batches through which the time of others is interpolated; one row alone needs no mask."""
UPDATE_LENGTH = 16
"""Tokens of the micro batch from which the update is told apart: it costs the same whatever the length."""


@dataclass
class Pace:
    """Step times of one model; what was simulated once is not simulated again."""

    model: ModelFacts
    _counted: dict[tuple[Any, ...], tuple[Operations, Operations]] = field(default_factory=dict)

    def step(self, resolved: Resolved, hardware: HardwareFacts, length: int, *, near: bool = False) -> StepTime | None:
        """The time of an optimizer step with rows of `length` tokens; None where the device's speed is not known.

        Args:
            resolved: the config without "auto".
            hardware: the device.
            length: tokens of every row.
            near: interpolate between micro batches of `FEW` and `MANY` rows: enough to sort candidates by.
        """
        from surefit.plan.setting import AMPERE, setting_of
        from surefit.plan.time import StepTime, roofline

        rates = _rates(hardware)
        if rates is None:
            return None
        setting = setting_of(resolved, self.model, hardware, length=length)
        # From Ampere on the operators are the same, so GPUs share what was simulated.
        setting = replace(setting, micro_batches=1, capability=min(setting.capability, AMPERE))
        parts = resolved.gradient_accumulation_steps
        seconds = parts * self._near(setting, rates, near) - (parts - 1) * self._update(setting, rates)
        like = replace(setting, rows=FEW) if near and setting.rows > FEW else setting
        counted, evaluation = self._operations(like)
        times = parts * setting.rows / like.rows
        peak = rates.peak.get(setting.dtype) or max(rates.peak.values())
        return StepTime(
            seconds=seconds,
            low=seconds * (1 - rates.margin),
            high=seconds * (1 + rates.margin),
            flops=round(times * _sum(counted, "flops")),
            bytes=round(times * _sum(counted, "bytes")),
            kernels=round(parts * _sum(counted, "kernels")),
            mfu=times * self._needed(like) / (seconds * peak),
            tokens_per_second=parts * setting.rows * length / seconds,
            evaluation_tokens_per_second=like.rows * length / roofline(evaluation, rates)[0],
            limit=roofline(counted, rates)[1],
            source=rates.source,
        )

    def _near(self, setting: Setting, rates: Rates, near: bool) -> float:
        """Seconds of a step of one micro batch, interpolated or not."""
        if not near or setting.rows <= FEW:
            return self._micro(setting, rates)
        few, many = (self._micro(replace(setting, rows=rows), rates) for rows in (FEW, MANY))
        return few + (many - few) * (setting.rows - FEW) / (MANY - FEW)

    def _micro(self, setting: Setting, rates: Rates) -> float:
        """Seconds of a step of one micro batch, its update included."""
        from surefit.plan.time import roofline

        return roofline(self._operations(setting)[0], rates)[0]

    def _update(self, setting: Setting, rates: Rates) -> float:
        if setting.adapter.kind == "lora":
            return 0.0
        short = replace(setting, rows=1, length=UPDATE_LENGTH, padded=False, checkpointing=False)
        one, two = (self._micro(replace(short, micro_batches=count), rates) for count in (1, 2))
        return max(0.0, 2 * one - two)

    def _needed(self, setting: Setting) -> float:
        """Operations of a micro batch without those that checkpointing repeats: a forward pass but for the head."""
        step, evaluation = (_sum(counted, "flops") for counted in self._operations(setting))
        if not setting.checkpointing:
            return step
        head = 2 * setting.rows * setting.length * self.model.hidden_size * self.model.vocab_size
        return step - (evaluation - head)

    def _operations(self, setting: Setting) -> tuple[Operations, Operations]:
        from surefit.plan.time import operations

        key = tuple(repr(value) for name, value in vars(setting).items() if name != "config")
        if key not in self._counted:
            self._counted[key] = operations(setting)
        return self._counted[key]


def _sum(counted: Operations, what: Literal["flops", "bytes", "kernels"]) -> float:
    return sum(times * float(getattr(operation, what)) for operation, times in counted.items())


def _rates(hardware: HardwareFacts) -> Rates | None:
    """How fast the device is: as it was measured, else as its data sheet says."""
    from surefit.plan.profile import device_of, rates_of

    device = device_of(hardware)
    if device is None:
        return None
    try:
        return rates_of(device)
    except MachineError:
        return None
