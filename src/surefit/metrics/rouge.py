"""ROUGE as the `rouge-score` package computes it (Lin 2004; google-research/rouge).

The package lowercases, keeps only a–z and 0–9 as letters, and stems with Porter's rules for English. So accents split
words and other scripts score zero: "letters" is a second tokenizer that keeps every letter.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, NamedTuple

from surefit.core.packaging import require_import
from surefit.metrics.words import split_words

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
Tokens = Literal["stemmed", "plain", "letters"]
"""stemmed and plain: the package's own tokens with and without Porter's stemmer; letters:
`metrics.words.split_words`.
"""
CELL_SECONDS = 3e-7
"""Seconds to fill one cell of a longest-common-subsequence table, in Python."""


class Rouge(NamedTuple):
    """Precision, recall and their harmonic mean, each from 0 to 1."""

    precision: float
    recall: float
    f: float


class _Words:
    def tokenize(self, text: str) -> list[str]:
        return split_words(text)


@lru_cache
def _scorer(tokens: Tokens) -> Any:
    require_import("rouge_score.rouge_scorer")
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk, which needs a second

    tokenizer = _Words() if tokens == "letters" else None
    return RougeScorer(list(KINDS), use_stemmer=tokens == "stemmed", tokenizer=tokenizer)


def rouge(target: str, prediction: str, tokens: Tokens = "stemmed") -> dict[str, Rouge]:
    """Return ROUGE-1, -2, -L and -Lsum of one answer.

    ROUGE-L searches for one common subsequence of the whole texts. ROUGE-Lsum searches for one per line of the target,
    in all lines of the prediction; where neither text has a line break the two are equal.

    >>> rouge("the cats sat", "the cat sat down")["rouge1"]
    Rouge(precision=0.75, recall=1.0, f=0.8571428571428571)
    """
    scores = _scorer(tokens).score(target, prediction)
    return {kind: Rouge(*map(float, scores[kind])) for kind in KINDS}


def estimate_rouge_seconds(target: str, prediction: str) -> float:
    """Estimate the seconds of `rouge` for one pair: a cell for each pair of words of the two texts, twice."""
    return 2 * CELL_SECONDS * target.count(" ") * prediction.count(" ")
