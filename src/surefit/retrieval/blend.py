"""A combination of a trained and a counting retriever, as a product of their probabilities.

They are wrong about different users: counts know which films people take in one sitting, the model what goes with a
longer history. The weight of each is selected on the validation items.
"""

from __future__ import annotations

import numpy as np

from surefit.metrics.ranking import mean_ranking
from surefit.retrieval.interactions import Interactions
from surefit.retrieval.ranking import AT_ONCE, Floats, Histories, Retriever, ranking_from_scores

SHARES = tuple(n / 10 for n in range(11))
_NEVER = 1e-5
"""The probability of a pair that was never counted: less than any pair's in a data set of this kind, but not zero."""


class Blend:
    """(1 - share) · log of the model's probability + share · log of the counts' share.

    Args:
        model: its scores are logits.
        counts: its scores are counts.
        share: weight of the counts, 0 to 1.
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
    """Return the blend with the best NDCG@10 on the validation items, and the NDCG@10 of each share there."""
    histories, targets = interactions.questions("valid")
    ranks: dict[float, list[int]] = {share: [] for share in SHARES}
    for start in range(0, len(histories), AT_ONCE):
        batch, right = histories[start : start + AT_ONCE], targets[start : start + AT_ONCE]
        logits, counted = model.scores(batch), counts.scores(batch)
        for share, share_ranks in ranks.items():
            share_ranks += ranking_from_scores(_blended(logits, counted, share), batch, right, 1).ranks.tolist()
    scores = {share: mean_ranking(share_ranks)["ndcg@10"] for share, share_ranks in ranks.items()}
    return Blend(model, counts, max(scores, key=lambda share: scores[share])), scores
