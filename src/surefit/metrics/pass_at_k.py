"""Unbiased pass@k: the probability that at least one of k answers, drawn from n with c correct, is correct."""

from __future__ import annotations

import math


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return 1 - C(n-c, k) / C(n, k), as in the Codex paper (arXiv:2107.03374, section 2.1).

    Args:
        n: number of answers drawn.
        c: number of correct ones.
        k: number of attempts.

    Raises:
        ValueError: not 1 <= k <= n or not 0 <= c <= n.

    >>> pass_at_k(5, 2, 1), pass_at_k(4, 1, 2), pass_at_k(3, 0, 3)
    (0.4, 0.5, 0.0)
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {n} answers, {c} of them right")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
