"""Scores in words, with their confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def interval_text(value: dict[str, Any] | None) -> str:
    """Return a mean with its interval.

    >>> interval_text({"mean": 0.5, "ci95": [0.4, 0.6]})
    '0.500 [0.400, 0.600]'
    """
    if value is None:
        return "-"
    low, high = value["ci95"]
    return f"{value['mean']:.3f} [{low:.3f}, {high:.3f}]"


def points_text(difference: float, interval: Sequence[float]) -> str:
    """Return a difference of shares in points, with its interval.

    >>> points_text(0.25, [0.1, 0.4])
    '+25.0 [+10.0, +40.0]'
    """
    return f"{100 * difference:+.1f} [{100 * interval[0]:+.1f}, {100 * interval[1]:+.1f}]"
