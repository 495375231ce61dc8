"""The one training step: what is planned, tested, measured and trained is this function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad_norm_

from surefit.train.loss import summed_cross_entropy, supervised_tokens

Batch = Mapping[str, torch.Tensor]
"""A micro batch: `input_ids`, `attention_mask` and `labels`, each (batch, length), right-padded."""


class Optimizer(Protocol):
    """What a step needs of an optimizer."""

    def step(self) -> Any: ...
    def zero_grad(self) -> None: ...


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        loss: mean cross-entropy in nats over the supervised tokens of the whole global batch, before the update.
        grad_norm: 2-norm over all gradients, before clipping.
        tokens: tokens that are not padding.
        supervised_tokens: those of them that the loss counts.
        applied: False where the loss or the gradient norm was not finite and the update was rejected.
    """

    loss: float
    grad_norm: float
    tokens: int
    supervised_tokens: int
    applied: bool


def train_step(
    model: torch.nn.Module, micro_batches: Sequence[Batch], optimizer: Optimizer, max_grad_norm: float
) -> StepResult:
    """Forward, loss, backward over every micro batch; clip; reject or apply; clear the gradients.

    Each micro batch's summed loss is divided by the supervised tokens of *all* of them, so the gradient is that of the
    mean over the global batch whatever the micro batches are: 1 × 8 equals 8 × 1, also with uneven lengths. Where the
    loss or the gradient norm is not finite the optimizer is not called: weights and optimizer state stay as they are.

    Args:
        model: a causal language model in training mode, its gradients clear.
        micro_batches: the global batch in parts, on any device; at least one token must be supervised.
        optimizer: holds the trainable parameters of `model`, its learning rate set.
        max_grad_norm: gradients are scaled down to this 2-norm.
    """
    supervised = sum(supervised_tokens(batch["labels"]) for batch in micro_batches)
    assert supervised > 0, "the caller leaves rows without supervised tokens out"
    loss = torch.zeros((), device=_device(model))
    for batch in micro_batches:
        part = loss_sum(model, batch) / supervised
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.detach()
    norm = clip_grad_norm_([p for p in model.parameters() if p.requires_grad], max_grad_norm)
    # One transfer for both numbers: on a GPU each would wait for the device.
    loss_value, norm_value = torch.stack([loss, norm.float()]).tolist()
    applied = math.isfinite(loss_value) and math.isfinite(norm_value)
    if applied:
        optimizer.step()
    optimizer.zero_grad()
    tokens = sum(int(batch["attention_mask"].sum()) for batch in micro_batches)
    return StepResult(loss_value, norm_value, tokens, supervised, applied)


def loss_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The summed cross-entropy of one micro batch, 0-d float32, on the model's device."""
    device = _device(model)
    # No cache: it costs memory, and transformers takes a batch with a cache for the start of a generation.
    logits = model(
        input_ids=batch["input_ids"].to(device, non_blocking=True),
        attention_mask=batch["attention_mask"].to(device, non_blocking=True),
        use_cache=False,
    ).logits
    return summed_cross_entropy(logits, batch["labels"])


@torch.no_grad()
def mean_loss(
    model: torch.nn.Module, batches: Iterable[Batch], stop: Callable[[], bool] = lambda: False
) -> tuple[float, int] | None:
    """The mean cross-entropy over the supervised tokens of `batches`, and their number, without dropout.

    Args:
        model: left in the mode (training or not) it was in.
        stop: asked before every batch; once it is true the measurement is given up.

    Returns:
        (nats per token, tokens); None where it was given up or nothing is supervised.
    """
    was_training = model.training
    model.eval()
    try:
        total, count = 0.0, 0
        for batch in batches:
            if stop():
                return None
            total += float(loss_sum(model, batch))
            count += supervised_tokens(batch["labels"])
    finally:
        model.train(was_training)
    return (total / count, count) if count else None


def _device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device
