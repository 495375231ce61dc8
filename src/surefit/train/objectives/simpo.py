"""Simple preference optimization: the length-normalized likelihood itself as the reward, with a target margin, without
a reference.

Meng et al. 2024, "SimPO: Simple Preference Optimization with a Reference-Free Reward" (arXiv:2405.14734), equation 6:

    loss = −logsigmoid(β (mean log π(y_chosen|x) − mean log π(y_rejected|x) − ratio))

with `gamma_beta_ratio` as the ratio (the paper's gamma is β times it): the margin in nats per token that the loss asks
for, which does not change its meaning with β. No cross-entropy is added unless `sft_weight` asks for it; TRL's
`cpo_alpha` adds it by default.

Worked example, β = 2, ratio 0.5: mean log-probabilities −0.5 and −1.5 differ by 1 nat per token, so the loss is
−logsigmoid(2 × 0.5) = 0.3133, and the gradient's weight 27 %. With TRL's defaults (β 0.1, gamma 0.5: a ratio of 5 nats
per token) they would be 0.9130 and 60 %: the margin is out of reach, so that the loss hardly looks at it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def simpo_losses(
    chosen_mean: torch.Tensor, rejected_mean: torch.Tensor, beta: float, gamma_beta_ratio: float
) -> torch.Tensor:
    """Return the loss of each pair.

    Args:
        chosen_mean, rejected_mean: mean log-probability per token of each pair's answers, (pairs,).

    >>> f"{simpo_losses(torch.tensor([-0.5]), torch.tensor([-1.5]), 2.0, 0.5).item():.4f}"
    '0.3133'
    """
    return -F.logsigmoid(beta * (chosen_mean - rejected_mean - gamma_beta_ratio))
