"""The area under the ROC curve, as a probability: how often a number of one kind is above one of the other."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import NormalDist


def area_under_curve(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the probability that a number of `above` is higher than one of `below`, equal ones counting half; NaN if a
    number is not finite. Both need at least one number.

    >>> area_under_curve([2.0, 1.0], [0.0, 1.0]), area_under_curve([0.0], [0.0])
    (0.875, 0.5)
    """
    if not all(map(math.isfinite, (*above, *below))):
        return math.nan
    ordered = sorted(below)
    wins = math.fsum(bisect_left(ordered, value) + bisect_right(ordered, value) for value in above) / 2
    return wins / (len(above) * len(below))


def auc_interval(auc: float, above: int, below: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return a confidence interval of an AUC from its value and the two numbers of rows.

    Newcombe 2006 (Statistics in Medicine 25, 559-573, doi:10.1002/sim.2324), method 5: the values θ for which
    |auc − θ| ≤ z √V(θ), with Hanley and McNeil's variance, so that it is no point where the AUC is 1.

    >>> [round(end, 3) for end in auc_interval(1.0, 20, 20)], [round(end, 3) for end in auc_interval(0.5, 50, 50)]
    ([0.899, 1.0], [0.39, 0.61])
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    half = (above + below) / 2

    def deviation(theta: float) -> float:
        inner = 2 * half - 1 - (3 * half - 3) / ((2 - theta) * (1 + theta))
        return z * math.sqrt(max(0.0, theta * (1 - theta) * inner / (above * below)))

    def end(outer: float) -> float:
        """Return where `auc` leaves the interval around θ, between `auc` and 0 or 1, by bisection."""
        near, far = auc, outer
        for _ in range(60):
            middle = (near + far) / 2
            near, far = (middle, far) if abs(auc - middle) <= deviation(middle) else (near, middle)
        return near

    return (0.0 if auc <= 0 else end(0.0)), (1.0 if auc >= 1 else end(1.0))
