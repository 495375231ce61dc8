"""ROUGE as the `rouge-score` package computes it (Lin 2004; google-research/rouge).

The package lower-cases, takes a–z and 0–9 for the only letters there are, and stems with Porter's rules for English. So
accents split words and other scripts score nothing: "letters" is a second way of making tokens that keeps every letter.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, NamedTuple

from surefit.metrics.words import split_words

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
Tokens = Literal["stemmed", "plain", "letters"]
"""stemmed and plain: the package's own tokens with and without Porter's stemmer; letters: `metrics.words.words`."""
CELL_SECONDS = 3e-7
"""What filling in a cell of a table of common subsequences takes, in Python."""


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
    from rouge_score.rouge_scorer import RougeScorer  # brings nltk, which takes a second

    tokenizer = _Words() if tokens == "letters" else None
    return RougeScorer(list(KINDS), use_stemmer=tokens == "stemmed", tokenizer=tokenizer)


def rouge(target: str, prediction: str, tokens: Tokens = "stemmed") -> dict[str, Rouge]:
    """ROUGE-1, -2, -L and -Lsum of one answer.

    ROUGE-L looks for one common subsequence of the whole texts. ROUGE-Lsum looks for one per line of the target, in all
    lines of the prediction; where neither text has a line break the two are equal.

    >>> rouge("the cats sat", "the cat sat down")["rouge1"]
    Rouge(precision=0.75, recall=1.0, f=0.8571428571428571)
    """
    found = _scorer(tokens).score(target, prediction)
    return {kind: Rouge(*map(float, found[kind])) for kind in KINDS}


def estimate_rouge_seconds(target: str, prediction: str) -> float:
    """About how long `rouge` takes for one pair: a cell for each word of one text and each of the other, twice."""
    return 2 * CELL_SECONDS * target.count(" ") * prediction.count(" ")
