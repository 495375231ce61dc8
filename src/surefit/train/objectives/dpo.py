"""Direct preference optimization: the policy's log-probabilities against a reference's.

Rafailov et al. 2023, "Direct Preference Optimization: Your Language Model is Secretly a Reward Model"
(arXiv:2305.18290), equation 7. With r = log π(y|x) − log π_ref(y|x), summed over the answer's tokens, in nats:

    loss = −logsigmoid(β (r_chosen − r_rejected))

Worked example, β = 0.1: if the chosen answer has become 3 nats more likely and the rejected one 2 nats less, the margin
of rewards is 0.1 × 5 = 0.5, the loss −logsigmoid(0.5) = 0.4741, and the gradient's weight sigmoid(−0.5) = 38 % of β. At
the start r = 0, so the loss is ln 2 = 0.6931 whatever the answers are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def sigmoid_losses(
    chosen_ratio: torch.Tensor, rejected_ratio: torch.Tensor, beta: float, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return the loss of each pair; `label_smoothing` is the assumed share ε of pairs whose answers were swapped.

    Conservative DPO (Mitchell 2023, "A note on DPO with noisy preferences and relationship to IPO"):
    −(1 − ε) logsigmoid(βΔ) − ε logsigmoid(−βΔ), which is ln 2 at Δ = 0 for every ε.

    Args:
        chosen_ratio, rejected_ratio: log π(y|x) − log π_ref(y|x) of each pair's answers, summed over tokens, (pairs,).

    >>> f"{sigmoid_losses(torch.tensor([3.0]), torch.tensor([-2.0]), 0.1).item():.4f}"
    '0.4741'
    """
    margin = beta * (chosen_ratio - rejected_ratio)
    if label_smoothing == 0:
        return -F.logsigmoid(margin)
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def sigmoid_norm_losses(chosen_ratio: torch.Tensor, rejected_ratio: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the loss of each pair of length-normalized DPO (Lambert et al. 2024, "Tülu 3", arXiv:2411.15124, with
    β 5): as `sigmoid_losses`, of ratios per token.

    Args:
        chosen_ratio, rejected_ratio: as in `sigmoid_losses`, each divided by the answer's tokens.

    >>> f"{sigmoid_norm_losses(torch.tensor([0.06]), torch.tensor([-0.04]), 5.0).item():.4f}"
    '0.4741'
    """
    return -F.logsigmoid(beta * (chosen_ratio - rejected_ratio))


def ipo_losses(chosen_ratio: torch.Tensor, rejected_ratio: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the loss of each pair of IPO (Azar et al. 2023, arXiv:2310.12036, equation 17, where β is called τ): the
    squared distance of the difference of ratios from 1 / (2β).

    The ratios are averages over the answer's tokens, as in TRL, whose authors asked the paper's: sums would make the
    target a matter of length. At the start the loss is 1 / (4β²), 25 for β = 0.1.

    Args:
        chosen_ratio, rejected_ratio: as in `sigmoid_norm_losses`.

    >>> ipo_losses(torch.zeros(1), torch.zeros(1), 0.1).item()
    25.0
    """
    return (chosen_ratio - rejected_ratio - 1 / (2 * beta)) ** 2
