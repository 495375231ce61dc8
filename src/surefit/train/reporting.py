"""Reports of each step: a line of metrics.jsonl, and the numbers of the progress line."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surefit.checkpoint.disk_guard import free_bytes
from surefit.config.resolve import HardwareLike, count_due_steps, count_due_steps_before
from surefit.config.schema import SureFitConfig
from surefit.facts.flops import TrainingFlops, peak_flops, training_flops, windows_of
from surefit.facts.model import ModelFacts
from surefit.telemetry.jsonl import MetricsLog
from surefit.train.progress import Counters, OnStep, TrainingProgress
from surefit.train.step import StepResult

SHOWN_OVER = 20
"""Number of steps over which the progress line averages tokens per second and MFU."""


@dataclass(frozen=True)
class MfuMeter:
    """Computes the MFU from the FLOPs of the run and the peak of all devices in FLOP/s. Either may be unknown."""

    work: TrainingFlops | None = None
    peak: float | None = None

    def flops(self, documents: Sequence[int], supervised: int, shared: Sequence[int] = ()) -> int | None:
        """Return the FLOPs of a step; arguments as `TrainingFlops.of`."""
        return self.work.of(documents, supervised, shared) if self.work else None

    def mfu(self, flops: int | None, seconds: float) -> float | None:
        """Return the share of the devices' peak that `flops` in `seconds` are; None if either is unknown."""
        return flops / seconds / self.peak if flops is not None and self.peak else None


def build_mfu_meter(
    model: torch.nn.Module,
    config: SureFitConfig,
    facts: ModelFacts | None,
    hardware: HardwareLike | None,
    devices: int = 1,
) -> MfuMeter:
    """Build the MFU meter of a run; `facts` about the base model and `hardware`, one of its `devices`, may be
    unknown."""
    settings: Any = model.config
    work = training_flops(facts, config, windows_of(settings.to_dict(), facts.num_layers)) if facts else None
    peak = peak_flops(hardware, config.model.dtype) if hardware else None
    return MfuMeter(work, peak * devices if peak else None)


class EtaEstimator:
    """Estimates the remaining time of a run from the time that it has taken so far.

    Steps and the pauses between them (a checkpoint with its measurements) are averaged separately, so that neither an
    early pause nor many future ones distort the estimate. The first step of a process, which warms up kernels and
    allocator, counts only until there is a second one.

    Args:
        every: optimizer steps between two pauses, for one or two kinds of pause; the last step has one, too.
        pause: expected seconds of a pause, used until one was measured.
    """

    def __init__(self, *every: int | None, pause: float = 0.0) -> None:
        self.every, self.pause = [interval for interval in every if interval], pause
        self.first: float | None = None
        self.seconds, self.steps, self.paused, self.pauses = 0.0, 0, 0.0, 0
        self._ended: float | None = None

    def step(self, step: int, seconds: float, now: float) -> None:
        """Record that step number `step` took `seconds` and ended at `now`, on any monotonic clock."""
        if self._ended is not None and any((step - 1) % interval == 0 for interval in self.every):
            self.paused += max(0.0, now - seconds - self._ended)
            self.pauses += 1
        self._ended = now
        if self.first is None:
            self.first = seconds
        else:
            self.seconds += seconds
            self.steps += 1

    def left(self, step: int, total_steps: int) -> float:
        """Return the estimated seconds from step number `step` to the end of the run."""
        seconds_per_step = self.seconds / self.steps if self.steps else self.first or 0.0
        pause = self.paused / self.pauses if self.pauses else self.pause
        pauses = count_due_steps(total_steps, *self.every) - count_due_steps_before(step, *self.every)
        return seconds_per_step * (total_steps - step) + pause * pauses


class StepReporter:
    """Logs every step and reports it to the callbacks.

    Args:
        log: metrics.jsonl.
        on_progress: called after every step.
        total_steps: optimizer steps of the whole run.
        epoch_share: fraction of an epoch per step.
        pace: ETA estimator of this process.
        meter: computes the MFU.
    """

    def __init__(
        self,
        log: MetricsLog,
        on_progress: OnStep,
        total_steps: int,
        epoch_share: float,
        pace: EtaEstimator,
        meter: MfuMeter,
    ) -> None:
        self.log, self.on_progress, self.total_steps = log, on_progress, total_steps
        self.epoch_share, self.pace, self.meter = epoch_share, pace, meter
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=SHOWN_OVER)

    def step(
        self,
        counters: Counters,
        result: StepResult,
        rate: float,
        seconds: float,
        documents: Sequence[int],
        eval_loss: float | None,
        expert_use: Mapping[str, Any],
        eval_step: int | None = None,
        shared: Sequence[int] = (),
    ) -> bool:
        """Report a step; return whether the callback asks to end the run.

        Args:
            counters: totals including this step.
            result: result of the step.
            rate: learning rate of the step.
            seconds: duration, from building its batches to the end of its update.
            documents: number of tokens of each of its examples.
            eval_loss: the newest held-out loss, and `eval_step` the step after which it was measured.
            expert_use: router load statistics of a mixture of experts (train/expert_use.py); else empty.
            shared: number of tokens of each prompt that two of its examples share.
        """
        step = counters.step
        epoch = round(step * self.epoch_share, 4)
        flops = self.meter.flops(documents, result.supervised_tokens, shared)
        memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        record: dict[str, Any] = {
            "step": step,
            "epoch": epoch,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": rate,
            "tokens": result.tokens,
            "supervised_tokens": result.supervised_tokens,
            "tokens_per_second": result.tokens / seconds,
            "flops": flops,
            "mfu": self.meter.mfu(flops, seconds),
            "seconds": seconds,
            "memory_bytes": memory,
            "disk_free_bytes": free_bytes(self.log.path.parent),
            "rejected": not result.applied,
        }
        if result.router_loss is not None:
            record["router_loss"] = result.router_loss
        self.log.append(record | dict(result.metrics) | dict(expert_use))
        self.pace.step(step, seconds, time.monotonic())
        self._recent.append((result.tokens, flops or 0, seconds))
        tokens, recent_flops, recent_seconds = (sum(column) for column in zip(*self._recent, strict=True))
        return True is self.on_progress(
            TrainingProgress(
                step, self.total_steps, epoch, result.loss, result.grad_norm, rate, tokens / recent_seconds,
                self.pace.left(step, self.total_steps), result.applied, counters.rejected, eval_loss,
                self.meter.mfu(int(recent_flops) if flops is not None else None, recent_seconds), memory,
                eval_step, result.metrics.get("rewards/accuracies"), result.metrics.get("rewards/margins"),
            )
        )  # fmt: skip
