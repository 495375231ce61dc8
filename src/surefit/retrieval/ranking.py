"""The interface of retrievers, and the conversion of their scores to ranks and candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Histories = Sequence[Sequence[int]]

RECENT = 200
"""Number of the last items of a history that are read, and are never recommended again."""
AT_ONCE = 256
"""Histories scored at a time: a matrix with a row for each and a column for each item is in memory."""


class Retriever(Protocol):
    """The first stage of a recommender."""

    def scores(self, histories: Histories) -> Floats:
        """Score the items for users' histories, oldest first → (users, items + 1), higher is likelier; item 0 is
        padding.
        """


@dataclass(frozen=True)
class Ranking:
    """The ranking of some users.

    Attributes:
        ranks: per user, the place of the right item among all items, from 1.
        top: (users, k) item numbers, best first.
        scores: (users, k) the retriever's scores of `top`.
    """

    ranks: NDArray[np.int64]
    top: NDArray[np.int64]
    scores: Floats


def rank_items(retriever: Retriever, histories: Histories, targets: Sequence[int], k: int = 20) -> Ranking:
    """Rank all items for every user, except the ones taken recently. Among equal scores the lower number wins."""
    parts = [
        ranking_from_scores(retriever.scores(histories[start : start + AT_ONCE]), histories[start : start + AT_ONCE],
               targets[start : start + AT_ONCE], k)
        for start in range(0, len(targets), AT_ONCE)
    ]  # fmt: skip
    return Ranking(
        np.concatenate([part.ranks for part in parts]),
        np.concatenate([part.top for part in parts]),
        np.concatenate([part.scores for part in parts]),
    )


def ranking_from_scores(scores: Floats, histories: Histories, targets: Sequence[int], k: int) -> Ranking:
    """Rank items like `rank_items`, from a retriever's scores of these histories."""
    scores, right = scores.copy(), np.asarray(targets, dtype=np.int64)[:, None]
    scores[:, 0] = -np.inf
    for row, history in enumerate(histories):
        scores[row, list(history[-RECENT:])] = -np.inf
    right_scores = np.take_along_axis(scores, right, axis=1)
    tied_before = (scores == right_scores) & (np.arange(scores.shape[1]) < right)
    ranks = 1 + (scores > right_scores).sum(axis=1) + tied_before.sum(axis=1)
    top = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return Ranking(ranks, top, np.take_along_axis(scores, top, axis=1))
