"""Recall, MRR and NDCG at k for one relevant item at a known rank, as LlamaRec's and LRURec's tables print them.

With one relevant item Recall@k is whether it is among the first k, MRR@k its reciprocal rank there and NDCG@k 1 /
log₂(rank + 1); all three are 0 below rank k. Corpus scores are means over users.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

CUTOFFS = (1, 5, 10, 20)


def ranking_scores(rank: int | None, cutoffs: tuple[int, ...] = CUTOFFS) -> dict[str, float]:
    """Return the scores of one user.

    Args:
        rank: 1-based rank of the relevant item; None where it is not in the ranking.

    Raises:
        ValueError: the rank is below 1.

    >>> ranking_scores(2, (1, 5))
    {'recall@1': 0.0, 'mrr@1': 0.0, 'ndcg@1': 0.0, 'recall@5': 1.0, 'mrr@5': 0.5, 'ndcg@5': 0.6309297535714575}
    """
    if rank is not None and rank < 1:
        raise ValueError(f"ranks begin at 1, got {rank}")
    scores = {}
    for k in cutoffs:
        hit = rank is not None and rank <= k
        scores[f"recall@{k}"] = float(hit)
        scores[f"mrr@{k}"] = 1 / rank if hit and rank else 0.0
        scores[f"ndcg@{k}"] = 1 / math.log2(rank + 1) if hit and rank else 0.0
    return scores


def mean_ranking(ranks: Sequence[int | None]) -> dict[str, float]:
    """Return the mean scores of users whose relevant items have these ranks."""
    user_scores = [ranking_scores(rank) for rank in ranks]
    return {name: math.fsum(scores[name] for scores in user_scores) / len(user_scores) for name in ranking_scores(None)}
