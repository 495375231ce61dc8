"""Progress of a training run after each step, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from surefit.core.units import bytes_text, count_text, duration_text


@dataclass(frozen=True)
class TrainingProgress:
    """The state of a run after an optimizer step.

    Attributes:
        step: optimizer steps done, of `total_steps`.
        epoch: passes over the rows, as a fraction.
        loss: mean over the supervised tokens of the global batch, in nats.
        grad_norm: before clipping.
        learning_rate: learning rate of this step.
        tokens_per_second: over the last steps, padding not counted, the optimizer's time included.
        eta_seconds: to the end of the run at its pace so far, the checkpoints and measurements to come included.
        applied: False if this step's update was skipped because the loss or the gradient was not finite.
        rejected: number of updates rejected so far, overflows of the loss scale not included.
        eval_loss: the newest held-out loss, if there is one; measured after step `eval_step`.
        mfu: model FLOPs of the last steps as a share of the GPU's peak (facts/flops.py), where both are known.
        memory_bytes: peak bytes in tensors on the GPU since the last pause; None on a CPU.
        accuracy: of pairs, the share of this step's whose chosen answer has the higher reward; margin: the mean
            difference of their rewards. None for other rows.
    """

    step: int
    total_steps: int
    epoch: float
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    eta_seconds: float
    applied: bool
    rejected: int
    eval_loss: float | None
    mfu: float | None = None
    memory_bytes: int | None = None
    eval_step: int | None = None
    accuracy: float | None = None
    margin: float | None = None

    @property
    def eta_text(self) -> str:
        """Time to the end as text; nothing is left to show of a run whose last step is done."""
        return f"ETA {duration_text(self.eta_seconds) if self.step < self.total_steps else '0 s'}"

    @property
    def text(self) -> str:
        """Numbers of the progress line as text, the most important first: a narrow terminal cuts the last ones. The
        caller adds steps and ETA.
        """
        measured = f" (step {self.eval_step})" if self.eval_step is not None else ""
        parts = [
            "" if self.applied else "REJECTED",
            f"loss {self.loss:.4f}",
            f"held-out {self.eval_loss:.4f}{measured}" if self.eval_loss is not None else "",
            f"accuracy {self.accuracy:.0%}" if self.accuracy is not None else "",
            f"margin {self.margin:.3g}" if self.margin is not None else "",
            f"{self.rejected} rejected" if self.rejected else "",
            f"epoch {self.epoch:.2f}",
            f"{count_text(self.tokens_per_second)} tok/s",
            f"lr {self.learning_rate:.2e}",
            f"grad {self.grad_norm:.2f}",
            f"MFU {self.mfu:.0%}" if self.mfu is not None else "",
            bytes_text(self.memory_bytes) if self.memory_bytes is not None else "",
        ]
        return " · ".join(part for part in parts if part)


OnStep = Callable[[TrainingProgress], bool | None]
"""Called after each step; returning True ends the run there, with its result, if a single process trains it."""
OnNote = Callable[[str], None]
OnPhase = Callable[[str, int, int], None]
"""Called with (name, steps done, all steps) when a run begins something else than a step, and when it goes on."""


@dataclass
class Counters:
    """Totals of a run, which its checkpoints store.

    Attributes:
        step: optimizer steps done, rejected ones included.
        tokens: tokens trained on, padding not counted.
        supervised_tokens: the tokens among them that the loss counts.
        seconds: time spent in steps.
        rejected: steps with a skipped update, overflows not included.
        rejected_in_a_row: consecutive rejected steps up to the current one.
        overflows: steps skipped because the loss scale of float16 was too large.
    """

    step: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    seconds: float = 0.0
    rejected: int = 0
    rejected_in_a_row: int = 0
    overflows: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the counters as trainer.json stores them; `Counters(**…)` reads them back."""
        return asdict(self)


@dataclass(frozen=True)
class TrainResult:
    """Outcome of a training run.

    Attributes:
        output: the directory of the trained adapter or model.
        counters: totals over the whole run, before a resume included.
        loss: loss of the last step that was not rejected.
        eval_loss: held-out loss after the last step; None without held-out rows.
        resumed_from: the step the run was resumed from; None if it started at the beginning.
        notes: the dry pass in one line, and every unusual event.
        best_step: the step of the exported weights, with `checkpoint.metric_for_best_model`; None for the last step.
        stopped_early: whether the run ended before its last step.
    """

    output: Path
    counters: Counters
    loss: float
    eval_loss: float | None
    resumed_from: int | None
    notes: list[str] = field(default_factory=list)
    best_step: int | None = None
    stopped_early: bool = False
