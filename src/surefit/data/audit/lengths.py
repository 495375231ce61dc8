"""Lengths of examples: every length is counted, so quantiles are exact for any number of rows."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import numpy.typing as npt


class LengthCounts:
    """The number of occurrences of each length; memory grows with the number of different lengths."""

    def __init__(self, lengths: npt.ArrayLike = ()) -> None:
        self._counts: Counter[int] = Counter()
        self.add(lengths)

    def add(self, lengths: npt.ArrayLike) -> None:
        """Count more lengths."""
        values, counts = np.unique(np.asarray(lengths, np.int64), return_counts=True)
        self._counts.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    def __len__(self) -> int:
        return self._counts.total()

    def counted(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (the lengths in order, the occurrences of each)."""
        values = np.array(sorted(self._counts), np.int64)
        return values, np.array([self._counts[value] for value in values.tolist()], np.int64)

    @property
    def total(self) -> int:
        """Sum of all lengths."""
        return sum(value * count for value, count in self._counts.items())

    def quantile(self, share: float) -> int:
        """Return the least length that at least this share of the lengths does not exceed; as numpy's method "higher".

        >>> LengthCounts([1, 2, 3, 10]).quantile(0.5)
        3
        """
        values, counts = self.counted()
        place = math.ceil(share * (len(self) - 1))
        return int(values[np.searchsorted(np.cumsum(counts), place, side="right")])

    def over(self, limit: int) -> tuple[int, int, int]:
        """Return (number of longer lengths, their sum, the longest length of all)."""
        long = {value: count for value, count in self._counts.items() if value > limit}
        return sum(long.values()), sum(value * count for value, count in long.items()), max(self._counts, default=0)
