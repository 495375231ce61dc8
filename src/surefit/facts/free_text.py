"""Free-text answers: the metric that fits them, and how long they may be for exact match to mean anything."""

from __future__ import annotations

import re
from collections.abc import Iterable
from statistics import median

LIKELIHOOD = "answer_likelihood"
"""Metric of recipes with free-text answers: the probability that the model gives a token of the row's own answer, as
the geometric mean over the answer's tokens."""
LIKELIHOOD_BESIDE_ANSWER = (
    "Won, lost and the figure beside an answer are the likelihood of the expected answer, no mark for the generated one"
)
"""Said once where generated answers stand beside likelihoods."""
SHORT_ANSWER = 8
"""Words up to which exact match decides. Labels, names, dates, numbers and short phrases have fewer, and there is one
right way to write them. A sentence can be said in many ways: a model that finds each word with probability 0.9 writes 8
words exactly as the row has them with 0.9 ** 8 = 0.43, but 20 words with 0.12 and 50 words with 0.005. For longer
answers exact match stays near zero, unless all of them follow one pattern that the model has learned whole."""
_UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")


def count_words(text: str) -> int:
    """Return the words of a text; in Chinese and Japanese, which have no spaces, each character counts as one.

    >>> count_words("We will replace it."), count_words("退款已处理")
    (4, 5)
    """
    return sum(max(1, len(_UNSPACED.findall(piece))) for piece in text.split())


def median_words(answers: Iterable[str]) -> float | None:
    """Return the median number of words; None without answers."""
    counts = [count_words(answer) for answer in answers]
    return median(counts) if counts else None


def is_likelihood(metric: str) -> bool:
    """Return whether a metric is the likelihood of the answer, of this recipe or of a task in it.

    >>> is_likelihood("answer_likelihood"), is_likelihood("chat.answer_likelihood"), is_likelihood("exact_match")
    (True, True, False)
    """
    return metric.rpartition(".")[2] == LIKELIHOOD
