"""How much of a summary is copied: new n-grams (See, Liu & Manning 2017), coverage and density (Grusky, Naaman & Artzi
2018, arXiv:1804.11283)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


def novelty(document: Sequence[str], summary: Sequence[str], n: int) -> float:
    """The share of the summary's n-grams that the document does not have; 0 where it has none.

    >>> novelty("the tax on figs is two percent".split(), "the tax is two percent".split(), 2)
    0.25
    """
    own = list(_grams(summary, n))
    asked = set(own)
    known = {gram for gram in _grams(document, n) if gram in asked}
    return sum(gram not in known for gram in own) / max(1, len(own))


def _grams(words: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(n)), strict=False)


def fragments(document: Sequence[str], summary: Sequence[str]) -> list[int]:
    """Lengths of the passages that a summary shares with its document: from left to right the longest possible.

    The published pseudo-code goes on behind a match and so misses some that begin inside of another; this one does not.

    >>> fragments("a b c d e".split(), "b c x d".split())
    [2, 1]
    """
    numbers: dict[str, int] = {}
    text = np.array([numbers.setdefault(word, len(numbers)) for word in document] + [-1], dtype=np.int64)
    asked = [numbers.get(word, -2) for word in summary]
    order = np.argsort(text, kind="stable")
    ordered = text[order]
    lengths, start = [], 0
    while start < len(asked):
        low, high = np.searchsorted(ordered, [asked[start], asked[start] + 1])
        ends = order[low:high]  # the last matching word of every candidate
        length = 0
        while len(ends):
            length += 1
            if start + length == len(asked):
                break
            ends = ends[text[ends + 1] == asked[start + length]] + 1
        if length:
            lengths.append(length)
        start += max(1, length)
    return lengths


def coverage_and_density(document: Sequence[str], summary: Sequence[str]) -> tuple[float, float]:
    """Coverage: the share of the summary's words that lie in shared passages. Density: the mean, over its words, of the
    length of the passage each lies in, in words; the whole summary's length if it is one quotation.

    >>> coverage_and_density("a b c d e".split(), "b c x d".split())
    (0.75, 1.25)
    """
    lengths = fragments(document, summary)
    words = max(1, len(summary))
    return sum(lengths) / words, sum(length**2 for length in lengths) / words
