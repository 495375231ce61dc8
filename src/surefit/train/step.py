"""The one training step: planning, tests, measurements and training all run this function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from surefit.data.tokens.collate import count_batch_tokens
from surefit.parallel.engine import SINGLE, Engine, LossFunction
from surefit.train.loss import loss_sum, supervised_tokens
from surefit.train.objectives.labels import LabelObjective
from surefit.train.objectives.pairs import Measured
from surefit.train.optim import clip_factor, gradient_norm
from surefit.train.scaling import LossScale

Batch = Mapping[str, Any]
"""A micro batch, padded or packed, as data/tokens/collate.py makes it."""


class OptimizerLike(Protocol):
    """Methods that a step needs of an optimizer."""

    def step(self, factor: float = 1.0) -> Any: ...
    def zero_grad(self) -> None: ...


class Objective(Protocol):
    """What training optimizes: `CrossEntropy`, or `train.objectives.pairs.PairObjective`, which documents each
    member, or `train.objectives.labels.LabelObjective`, which also needs a number of the whole global batch."""

    @property
    def summed(self) -> int: ...
    def totals(self, batches: Iterable[Batch]) -> Any: ...
    def loss_of(
        self, totals: Any, chunked: bool, balance: list[torch.Tensor], sums: list[torch.Tensor]
    ) -> LossFunction: ...
    def loss_and_metrics(self, sums: Sequence[float], totals: Any) -> tuple[float, dict[str, float]]: ...
    def measure(
        self, model: torch.nn.Module, batches: Iterable[Batch], stop: Callable[[], bool], chunked: bool, engine: Engine
    ) -> Measured | None: ...


class TokenTotals(NamedTuple):
    """The supervised tokens of a global batch, over which the cross-entropy is a mean."""

    supervised: int

    @property
    def divisor(self) -> int:
        return self.supervised


class CrossEntropy:
    """The objective of supervised fine-tuning: mean cross-entropy over the supervised tokens of the global batch."""

    summed = 0

    def totals(self, batches: Iterable[Batch]) -> TokenTotals:
        return TokenTotals(sum(supervised_tokens(batch) for batch in batches))

    def loss_of(
        self, totals: Any, chunked: bool, balance: list[torch.Tensor], sums: list[torch.Tensor]
    ) -> LossFunction:
        return partial(loss_sum, chunked=chunked, balance=balance)

    def loss_and_metrics(self, sums: Sequence[float], totals: Any) -> tuple[float, dict[str, float]]:
        raise NotImplementedError("the cross-entropy has no metrics beside the loss")

    def measure(
        self, model: torch.nn.Module, batches: Iterable[Batch], stop: Callable[[], bool], chunked: bool, engine: Engine
    ) -> Measured | None:
        result = mean_loss(model, batches, stop, chunked=chunked, engine=engine)
        return None if result is None else Measured(*result, {})


CROSS_ENTROPY = CrossEntropy()


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step.

    Attributes:
        loss: mean loss of the whole global batch before the update: of the cross-entropy in nats over its supervised
            tokens, or of a preference objective over its pairs or rows.
        router_loss: load-balancing loss that was added to it before the backward pass (train/loss.py); None without.
        grad_norm: 2-norm over all gradients, before clipping.
        tokens: tokens that are not padding.
        supervised_tokens: the tokens among them that the loss counts.
        applied: False if the loss or the gradient norm was not finite and the update was rejected.
        overflow: whether the update was rejected because the loss scale was too large; the scale has been halved.
        metrics: what a preference objective measures beside its loss, by TRL's names; else empty.
    """

    loss: float
    grad_norm: float
    tokens: int
    supervised_tokens: int
    applied: bool
    overflow: bool = False
    router_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def train_step(
    model: torch.nn.Module,
    micro_batches: Sequence[Batch],
    optimizer: OptimizerLike,
    max_grad_norm: float,
    *,
    chunked: bool = True,
    scaling: LossScale | None = None,
    engine: Engine = SINGLE,
    objective: Objective = CROSS_ENTROPY,
) -> StepResult:
    """Run forward, loss and backward over every micro batch; clip; apply or reject the update; clear the gradients.

    Each micro batch's summed loss is divided by the supervised tokens (or pairs, or rows) of *all* of them, so the
    gradient is the gradient of the mean over the global batch whatever the micro batches are: 1 × 8 equals 8 × 1, also
    with uneven lengths, padded or packed. If the loss or the gradient norm is not finite the optimizer is not called:
    weights and optimizer state stay as they are.

    Args:
        model: a causal language model in training mode, without gradients.
        micro_batches: the global batch, or this process's part of it, on the CPU; at least one token of the global
            batch must be supervised.
        optimizer: holds the trainable parameters of `model`; its learning rate is set.
        max_grad_norm: gradients are scaled down to this 2-norm.
        chunked: never hold the logits of all tokens (train/loss.py).
        scaling: loss scale for float16, which this step adapts.
        engine: execution engine, which distributes the step over processes.
        objective: what the loss is.
    """
    local = objective.totals(micro_batches)
    totals = type(local)(*(int(engine.total(count)) for count in local))
    assert totals.divisor > 0, "the caller drops rows without supervised tokens"
    if isinstance(objective, LabelObjective):
        objective = objective.for_batch(model, micro_batches, totals, chunked, engine)
    scale = 1.0 if scaling is None else scaling.value
    balance: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    loss_of = objective.loss_of(totals, chunked, balance, sums)
    loss = engine.run(model, micro_batches, loss_of, totals.divisor, scale)
    router_terms = [engine.total_loss(torch.stack(balance).sum() / totals.divisor)] if balance else []
    # Of a pipeline only the last stage has sums, and all stages add them up.
    own_sums = torch.stack(sums).sum(0) if sums else loss.new_zeros(objective.summed)
    summed = engine.total_loss(own_sums).unbind() if objective.summed else ()
    norm = engine.gradient_norm((p for p in model.parameters() if p.requires_grad), gradient_norm)
    # One transfer for all numbers: on a GPU each transfer waits for the device.
    loss_value, norm_value, *values = torch.stack([engine.total_loss(loss), norm, *router_terms, *summed]).tolist()
    router_values, sum_values = values[: len(router_terms)], values[len(router_terms) :]
    norm_value /= scale
    applied = math.isfinite(loss_value) and math.isfinite(norm_value)
    if applied:
        optimizer.step(clip_factor(norm_value, max_grad_norm) / scale)
    optimizer.zero_grad()
    # A batch without targets only keeps this process in lockstep with the others (train/batches.py).
    tokens = int(engine.total(sum(count_batch_tokens(batch) for batch in micro_batches if supervised_tokens(batch))))
    overflow = scaling is not None and _adapt(scaling, math.isfinite(loss_value), applied)
    router_loss = router_values[0] if router_values else None
    metrics = objective.loss_and_metrics(sum_values, totals)[1] if sum_values else {}
    return StepResult(
        loss_value - sum(router_values), norm_value, tokens, totals.supervised, applied, overflow, router_loss, metrics
    )


def _adapt(scaling: LossScale, finite_loss: bool, applied: bool) -> bool:
    """Adapt the loss scale after a step; return whether the step overflowed. A loss that is not finite, which no scale
    has touched, leaves it unchanged."""
    overflow = finite_loss and not applied and scaling.can_shrink
    if overflow:
        scaling.shrink()
    elif applied:
        scaling.grow()
    return overflow


def measure(
    model: torch.nn.Module,
    batches: Iterable[Batch],
    stop: Callable[[], bool] = lambda: False,
    *,
    chunked: bool = True,
    engine: Engine = SINGLE,
    objective: Objective = CROSS_ENTROPY,
) -> Measured | None:
    """Return the objective's mean loss on `batches` without dropout, and its metrics.

    Args, returns: as `mean_loss`.
    """
    was_training = model.training
    model.eval()
    try:
        return objective.measure(model, batches, stop, chunked, engine)
    finally:
        model.train(was_training)


@torch.no_grad()
def mean_loss(
    model: torch.nn.Module,
    batches: Iterable[Batch],
    stop: Callable[[], bool] = lambda: False,
    *,
    chunked: bool = True,
    engine: Engine = SINGLE,
) -> tuple[float, int] | None:
    """Compute the mean cross-entropy over the supervised tokens of `batches`, and their number, without dropout.

    Args:
        model: its mode (training or evaluation) is restored afterwards.
        stop: called before every batch; returning True cancels the measurement.

    Returns:
        (nats per token, tokens); None if it was canceled or nothing is supervised.
    """
    was_training = model.training
    model.eval()
    try:
        total, count = 0.0, 0
        for batch in batches:
            if stop():
                return None
            total += engine.measure(model, batch, partial(loss_sum, chunked=chunked))
            count += supervised_tokens(batch)
    finally:
        model.train(was_training)
    total, count = engine.total(total), int(engine.total(count))
    return (total / count, count) if count else None
