"""What every retriever is, and how its scores become ranks and candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Histories = Sequence[Sequence[int]]

RECENT = 200
"""So many of the last items of a history are read, and are never recommended again."""
AT_ONCE = 256
"""Histories scored at a time: a matrix of so many rows with a column for each item is in memory."""


class Retriever(Protocol):
    """The first stage of a recommender."""

    def scores(self, histories: Histories) -> Floats:
        """Item numbers of some users, oldest first → (users, items + 1): the higher the likelier. Item 0 is none."""


@dataclass(frozen=True)
class Ranking:
    """What a retriever made of some users.

    Attributes:
        ranks: per user, the place of the right item among all items, from 1.
        top: (users, k) item numbers, best first.
        scores: (users, k) what the retriever gave them.
    """

    ranks: NDArray[np.int64]
    top: NDArray[np.int64]
    scores: Floats


def rank_items(retriever: Retriever, histories: Histories, targets: Sequence[int], k: int = 20) -> Ranking:
    """Rank all items for every user; what they took recently is left out. Of equal scores the lower number wins."""
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
    """The same, of scores that a retriever has given to these histories."""
    scores, right = scores.copy(), np.asarray(targets, dtype=np.int64)[:, None]
    scores[:, 0] = -np.inf
    for row, history in enumerate(histories):
        scores[row, list(history[-RECENT:])] = -np.inf
    of_right = np.take_along_axis(scores, right, axis=1)
    before = (scores == of_right) & (np.arange(scores.shape[1]) < right)
    ranks = 1 + (scores > of_right).sum(axis=1) + before.sum(axis=1)
    top = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return Ranking(ranks, top, np.take_along_axis(scores, top, axis=1))
