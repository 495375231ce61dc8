"""How long examples are: every length counted, so that quantiles are exact for as many rows as there are."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import numpy.typing as npt


class LengthCounts:
    """How often each length occurs; memory is a matter of the different lengths."""

    def __init__(self, lengths: npt.ArrayLike = ()) -> None:
        self._counts: Counter[int] = Counter()
        self.add(lengths)

    def add(self, lengths: npt.ArrayLike) -> None:
        """Count more of them."""
        values, counts = np.unique(np.asarray(lengths, np.int64), return_counts=True)
        self._counts.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    def __len__(self) -> int:
        return self._counts.total()

    def counted(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(the lengths in order, how often each occurs)."""
        values = np.array(sorted(self._counts), np.int64)
        return values, np.array([self._counts[value] for value in values.tolist()], np.int64)

    @property
    def total(self) -> int:
        """All lengths added up."""
        return sum(value * count for value, count in self._counts.items())

    def quantile(self, share: float) -> int:
        """The least length that at least this share of them does not exceed; as numpy's method "higher".

        >>> LengthCounts([1, 2, 3, 10]).quantile(0.5)
        3
        """
        values, counts = self.counted()
        place = math.ceil(share * (len(self) - 1))
        return int(values[np.searchsorted(np.cumsum(counts), place, side="right")])

    def over(self, limit: int) -> tuple[int, int, int]:
        """(how many are longer, those added up, the longest of all)."""
        long = {value: count for value, count in self._counts.items() if value > limit}
        return sum(long.values()), sum(value * count for value, count in long.items()), max(self._counts, default=0)
