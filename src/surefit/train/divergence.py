"""When a run is given up: too many steps in a row without a finite gradient, or no update at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefit.core.errors import GateError
from surefit.core.rundir import RunDir
from surefit.train.progress import Counters
from surefit.train.replay import write_rejected
from surefit.train.sampler import dropout_seed
from surefit.train.step import Batch, StepResult

MAX_REJECTED_IN_A_ROW = 10
"""After so many steps without a finite gradient nothing will come of the run."""


def build_divergence_error(
    run: RunDir, counters: Counters, batches: Sequence[Batch], result: StepResult, seed: int, newest: Path | None
) -> GateError:
    """The error that ends a run, its last batch written down.

    Args:
        run: gets the batch (train/replay.py).
        counters: with `MAX_REJECTED_IN_A_ROW` rejected steps at their end.
        batches, result: of the last step.
        seed: `train.seed`.
        newest: the checkpoint to go on from.
    """
    step = counters.step
    facts = {"step": step, "seed": seed, "dropout_seed": dropout_seed(seed, step - 1)}
    written = write_rejected(run, batches, facts | {"loss": result.loss, "grad_norm": result.grad_norm})
    return GateError(
        f"the loss or the gradient was not finite in steps {step - MAX_REJECTED_IN_A_ROW + 1} to {step}",
        code="E5098",
        path=newest or run.path,
        field="train.learning_rate",
        help="no update was made with them; lower the learning rate, or check the base model and its dtype"
        + (f"; the last batch is in {written}" if written else "")
        + ("; the last checkpoint is good" if newest else ""),
    )


def require_an_update(run: RunDir, counters: Counters) -> None:
    """Refuse to export what nothing was learnt in.

    Raises:
        GateError: every step was rejected.
    """
    if counters.rejected + counters.overflows == counters.step:
        raise GateError(
            f"all {counters.step} steps were rejected: the loss or the gradient was never finite",
            code="E5099",
            path=run.path,
            field="train.learning_rate",
            help="nothing was learnt; check the base model and its dtype",
        )
