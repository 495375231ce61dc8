"""A trained retriever and a counting one together, as a product of their probabilities.

They are wrong about different users: counts know which films people take in one sitting, the model what goes with a
longer history. How much each has to say is selected on the validation items.
"""

from __future__ import annotations

import numpy as np

from surefit.metrics.ranking import mean_ranking
from surefit.retrieval.interactions import Interactions
from surefit.retrieval.ranking import AT_ONCE, Floats, Histories, Retriever, ranking_from_scores

SHARES = tuple(n / 10 for n in range(11))
_NEVER = 1e-5
"""The probability of what was never counted: less than any pair's in a data set of this kind, and not nothing."""


class Blend:
    """(1 - share) · log of the model's probability + share · log of the counts' share.

    Args:
        model: its scores are logits.
        counts: its scores are counts.
        share: how much the counts say, 0 to 1.
    """

    def __init__(self, model: Retriever, counts: Retriever, share: float) -> None:
        self.model, self.counts, self.share = model, counts, share

    def scores(self, histories: Histories) -> Floats:
        return _blended(self.model.scores(histories), self.counts.scores(histories), self.share)


def _blended(logits: Floats, counts: Floats, share: float) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    of_model = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    of_counts = np.log(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-9) + _NEVER)
    scores: Floats = (1 - share) * of_model + share * of_counts
    return scores


def select_blend(interactions: Interactions, model: Retriever, counts: Retriever) -> tuple[Blend, dict[float, float]]:
    """The blend with the best NDCG@10 on the validation items, and what each share had there."""
    histories, targets = interactions.questions("valid")
    ranks: dict[float, list[int]] = {share: [] for share in SHARES}
    for start in range(0, len(histories), AT_ONCE):
        asked, right = histories[start : start + AT_ONCE], targets[start : start + AT_ONCE]
        logits, counted = model.scores(asked), counts.scores(asked)
        for share, found in ranks.items():
            found += ranking_from_scores(_blended(logits, counted, share), asked, right, 1).ranks.tolist()
    tried = {share: mean_ranking(found)["ndcg@10"] for share, found in ranks.items()}
    return Blend(model, counts, max(tried, key=lambda share: tried[share])), tried
