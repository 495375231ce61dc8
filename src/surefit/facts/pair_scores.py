"""Names of what `surefit evaluate` reads of the held-out pairs of a run on preferences. Torch-free."""

from __future__ import annotations

from surefit.facts.free_text import is_likelihood

REWARD_ACCURACY = "reward_accuracy"
"""Metric of a pair: whether the chosen answer has the higher reward; a tie counts half."""


def is_read(metric: str) -> bool:
    """Return whether a metric is read from a model's probabilities, so that answers of a baseline or a server have
    none.

    >>> is_read("answer_likelihood"), is_read("reward_accuracy"), is_read("exact_match")
    (True, True, False)
    """
    return is_likelihood(metric) or metric == REWARD_ACCURACY
