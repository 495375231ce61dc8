"""Odds-ratio preference optimization: cross-entropy of the chosen answers, and the odds ratio of both, without a
reference.

Hong et al. 2024, "ORPO: Monolithic Preference Optimization without Reference Model" (arXiv:2403.07691), equations 3 to
7. With p = exp(mean log-probability per token of an answer), odds(p) = p / (1 − p), and λ, here `beta`:

    loss = NLL(chosen) − λ logsigmoid(log odds(p_chosen) − log odds(p_rejected))

The NLL counts the answer's tokens only, as SureFit's cross-entropy does (and LLaMA-Factory's ORPO). TRL's counts the
prompt's as well: the same name, another objective.

Worked example, λ = 0.1: mean log-probabilities −0.5 and −1.0 are p = 0.607 and 0.368, odds 1.541 and 0.582, log odds
ratio 0.974, so the second term is 0.1 × 0.320 = 0.0320.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def odds_ratio_losses(chosen_mean: torch.Tensor, rejected_mean: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the second term of each pair; the first is added by its weight, 1 (train/objectives/pairs.py).

    Args:
        chosen_mean, rejected_mean: mean log-probability per token of each pair's answers, (pairs,).

    >>> f"{odds_ratio_losses(torch.tensor([-0.5]), torch.tensor([-1.0]), 0.1).item():.4f}"
    '0.0320'
    """
    log_odds_ratio = chosen_mean - rejected_mean - (_log1mexp(chosen_mean) - _log1mexp(rejected_mean))
    return -beta * F.logsigmoid(log_odds_ratio)


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 − exp(x)) for x < 0, with all digits on both sides of −ln 2 (Mächler 2012, "Accurately computing
    log(1 − exp(−|a|))").

    A mean log-probability can round to 0, where the odds are infinite: the smallest number below it is taken instead.
    The branch that is not taken gets another x, since its gradient would be infinite × 0.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -0.6931471805599453
    small, large = torch.where(near, x, -0.1), torch.where(near, -1.0, x)
    return torch.where(near, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))
