"""Kahneman-Tversky optimization: single answers with a label, each pushed away from what the model prefers on average.

Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization" (arXiv:2402.01306), equation 7.
With r = log π(y|x) − log π_ref(y|x), summed over the answer's tokens, in nats, and the baseline z of the whole global
batch, which no gradient flows through:

    loss = λ_D (1 − sigmoid(β (r − z)))    where y is desirable, weighted by λ_D = `desirable_weight`
           λ_U (1 − sigmoid(β (z − r)))    where it is undesirable, by λ_U = `undesirable_weight`

    z = max(0, mean over the batch of log π(y_j|x_i) − log π_ref(y_j|x_i)),   y_j the answer of another row

Worked example, β = 0.1, both weights 1, z = 1: a desirable answer that has become 3 nats more likely has the loss
1 − sigmoid(0.2) = 0.4502, an undesirable one that has become 3 nats more likely 1 − sigmoid(−0.2) = 0.5498. At the
start r = 0 and z = 0, so each loss is half its weight.
"""

from __future__ import annotations

import torch


def kto_losses(
    ratios: torch.Tensor, signs: torch.Tensor, weights: torch.Tensor, baseline: float, beta: float
) -> torch.Tensor:
    """Return the loss of each answer.

    Args:
        ratios: log π(y|x) − log π_ref(y|x) of each answer, summed over tokens, (answers,).
        signs: 1 where the answer is desirable, −1 where it is not, (answers,).
        weights: λ of each answer, (answers,).
        baseline: z, from `clamp_baseline`.

    >>> losses = kto_losses(torch.tensor([3.0, 3.0]), torch.tensor([1.0, -1.0]), torch.ones(2), 1.0, 0.1)
    >>> [f"{loss:.4f}" for loss in losses.tolist()]
    ['0.4502', '0.5498']
    """
    return weights * torch.sigmoid(-beta * signs * (ratios - baseline))


def clamp_baseline(mean: float) -> float:
    """Return z: the mean log-ratio of mismatched rows, which estimates a KL divergence, and so is at least 0; NaN
    remains, so that the step is rejected.

    >>> clamp_baseline(0.5), clamp_baseline(-0.5), clamp_baseline(float("nan"))
    (0.5, 0.0, nan)
    """
    return 0.0 if mean < 0 else mean
