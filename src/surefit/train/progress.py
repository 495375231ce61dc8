"""What training tells its caller: how far it is, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from surefit.core.units import bytes_text, count_text


@dataclass(frozen=True)
class TrainingProgress:
    """The state of a run after an optimizer step.

    Attributes:
        step: optimizer steps done, of `total_steps`.
        epoch: passes over the rows, as a fraction.
        loss: mean over the supervised tokens of the global batch, in nats.
        grad_norm: before clipping.
        learning_rate: the one this step used.
        tokens_per_second: over the last steps, padding not counted, the optimizer's time included.
        eta_seconds: to the end of the run at its pace so far, the checkpoints and measurements to come included.
        applied: False where this step's update was left out because the loss or the gradient was not finite.
        rejected: how many updates were left out so far.
        eval_loss: the newest held-out loss, if there is one.
        mfu: the share of the GPU's peak that the last steps' arithmetic is (facts/flops.py), where both are known.
        memory_bytes: the most in tensors on the GPU since the last pause; None on a CPU.
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

    @property
    def text(self) -> str:
        """The numbers of the one progress line; the caller draws steps and ETA."""
        parts = [
            f"loss {self.loss:.4f}",
            f"held-out {self.eval_loss:.4f}" if self.eval_loss is not None else "",
            f"lr {self.learning_rate:.2e}",
            f"grad {self.grad_norm:.2f}",
            f"{count_text(self.tokens_per_second)} tok/s",
            f"MFU {self.mfu:.0%}" if self.mfu is not None else "",
            bytes_text(self.memory_bytes) if self.memory_bytes is not None else "",
            f"{self.rejected} rejected" if self.rejected else "",
            "" if self.applied else "REJECTED",
        ]
        return " · ".join(part for part in parts if part)


OnStep = Callable[[TrainingProgress], bool | None]
"""What is called after each step; True ends the run there, with its result, if one process trains it."""
OnNote = Callable[[str], None]


@dataclass
class Counters:
    """What a run counts, and a checkpoint keeps.

    Attributes:
        step: optimizer steps done, rejected ones included.
        tokens: trained on, padding not counted.
        supervised_tokens: those of them that the loss counts.
        seconds: spent in steps.
        rejected: steps whose update was left out.
        rejected_in_a_row: up to now.
        overflows: steps left out because the loss scale of float16 was too large.
    """

    step: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    seconds: float = 0.0
    rejected: int = 0
    rejected_in_a_row: int = 0
    overflows: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For trainer.json; `Counters(**…)` reads it back."""
        return asdict(self)


@dataclass(frozen=True)
class TrainResult:
    """How a training run ended.

    Attributes:
        output: the directory of the trained adapter or model.
        counters: what was counted over the whole run, before a resume included.
        loss: of the last step that was not rejected.
        eval_loss: held-out loss after the last step; None without held-out rows.
        resumed_from: the step the run was resumed from; None where it started at the beginning.
        notes: the dry pass in a line, and everything that was unusual.
        best_step: the step whose weights were exported, with `checkpoint.metric_for_best_model`; None: those of the
            last.
        stopped_early: `train.early_stopping_patience` ended the run before its last step.
    """

    output: Path
    counters: Counters
    loss: float
    eval_loss: float | None
    resumed_from: int | None
    notes: list[str] = field(default_factory=list)
    best_step: int | None = None
    stopped_early: bool = False
