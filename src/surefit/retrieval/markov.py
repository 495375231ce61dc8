"""Retrievers that only count: the most popular items, and the items taken shortly after another item.

The scores of a trained retriever mean nothing without these baselines beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from surefit.retrieval.ranking import Floats, Histories


class Popularity:
    """Counts of the items in the training histories."""

    def __init__(self, trained: Histories, items: int) -> None:
        all_items = np.fromiter((item for history in trained for item in history), dtype=np.int64)
        self.counts: Floats = np.bincount(all_items, minlength=items + 1).astype(np.float32)

    def scores(self, histories: Histories) -> Floats:
        return np.broadcast_to(self.counts, (len(histories), len(self.counts)))


class CoOccurrence:
    """Counts of how often an item came shortly after each of the last ones, in the training histories.

    Args:
        trained: histories to count in.
        items: how many items there are.
        weights: weight of a pair of items 1, 2, … places apart in a counted history.
        recent: weight of the last item, the one before it, … of a history that is continued.

    If pairs give no or equal scores, the more popular item comes first.
    """

    def __init__(self, trained: Histories, items: int, weights: Sequence[float], recent: Sequence[float]) -> None:
        self.recent = tuple(recent)
        popular = Popularity(trained, items).counts
        # Smaller than the smallest difference between pairs.
        self.otherwise: Floats = popular / (popular.max() + 1) * np.float32(1e-3)
        pairs, counts = _pairs(trained, items + 1, weights)
        self.after, self.counts = pairs % (items + 1), counts.astype(np.float32)
        self.starts = np.searchsorted(pairs // (items + 1), np.arange(items + 2))

    def scores(self, histories: Histories) -> Floats:
        scores = np.tile(self.otherwise, (len(histories), 1))
        for row, history in zip(scores, histories, strict=True):
            for weight, item in zip(self.recent, reversed(history), strict=False):
                part = slice(self.starts[item], self.starts[item + 1])
                row[self.after[part]] += weight * self.counts[part]
        return scores


def _pairs(trained: Histories, size: int, weights: Sequence[float]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return (first × size + second of every distinct pair, ascending; the sum of its weights)."""
    pair_parts, sums = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
    for history in trained:
        numbers = np.asarray(history, dtype=np.int64)
        for apart, weight in enumerate(weights, start=1):
            first, second = numbers[:-apart], numbers[apart:]
            pair_parts.append(first * size + second)
            sums.append(np.full(len(first), weight))
    pairs, place = np.unique(np.concatenate(pair_parts), return_inverse=True)
    weighted: NDArray[np.float64] = np.bincount(place, np.concatenate(sums), len(pairs)).astype(np.float64)
    return pairs, weighted
