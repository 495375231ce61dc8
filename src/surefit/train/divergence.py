"""Errors that end a diverged run: too many steps in a row without a finite gradient, or no update at all."""

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
"""Number of consecutive steps without a finite gradient after which the run is given up."""


def build_divergence_error(
    run: RunDir, counters: Counters, batches: Sequence[Batch], result: StepResult, seed: int, newest: Path | None
) -> GateError:
    """Build the error that ends a diverged run, after the last batch is written to the run directory.

    Args:
        run: where the batch is written (train/replay.py).
        counters: the last `MAX_REJECTED_IN_A_ROW` steps were rejected.
        batches, result: batches and result of the last step.
        seed: `train.seed`.
        newest: the checkpoint to resume from.
    """
    step = counters.step
    facts = {"step": step, "seed": seed, "dropout_seed": dropout_seed(seed, step - 1)}
    batch_path = write_rejected(run, batches, facts | {"loss": result.loss, "grad_norm": result.grad_norm})
    return GateError(
        f"the loss or the gradient was not finite in steps {step - MAX_REJECTED_IN_A_ROW + 1} to {step}",
        code="E5098",
        path=newest or run.path,
        field="train.learning_rate",
        help="their updates were skipped; lower the learning rate, or check the base model and its dtype"
        + (f"; the last batch is in {batch_path}" if batch_path else "")
        + ("; the last checkpoint is intact" if newest else ""),
    )


def require_an_update(run: RunDir, counters: Counters) -> None:
    """Raise if no step updated the weights, so that an untrained model is not exported.

    Raises:
        GateError: every step was rejected.
    """
    if counters.rejected + counters.overflows == counters.step:
        raise GateError(
            f"all {counters.step} steps were rejected: the loss or the gradient was never finite",
            code="E5099",
            path=run.path,
            field="train.learning_rate",
            help="the weights are unchanged; check the base model and its dtype",
        )
