"""The loss: cross-entropy over the supervised tokens, summed, from the logits the model itself computed."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from surefit.data.cache import MASKED


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum of the next-token cross-entropies over all supervised tokens.

    Working from the model's own logits keeps everything a model does to them (softcaps, logit scales). The sum, not
    the mean, lets the caller divide by the tokens of the whole global batch, however it is cut into micro batches.

    Args:
        logits: (batch, length, vocabulary), any floating dtype; the entry at position t predicts token t + 1.
        labels: (batch, length), int64, aligned with the input ids; `MASKED` where a token is not supervised. The
            first label of a row is never used: nothing comes before it.

    Returns:
        A 0-d float32 tensor in nats. 0 where nothing is supervised.

    Memory in the backward pass: `config.resolve.LOSS_BYTES` × batch × length × vocabulary.
    """
    targets = F.pad(labels, (0, 1), value=MASKED)[:, 1:]
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten().to(logits.device), ignore_index=MASKED, reduction="sum"
    )


def supervised_tokens(labels: torch.Tensor) -> int:
    """How many tokens of a (batch, length) label tensor the loss counts."""
    return int((labels[:, 1:] != MASKED).sum())
