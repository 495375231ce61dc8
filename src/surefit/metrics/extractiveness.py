"""Extractiveness of a summary: new n-grams (See, Liu & Manning 2017), coverage and density (Grusky, Naaman & Artzi
2018, arXiv:1804.11283).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


def novelty(document: Sequence[str], summary: Sequence[str], n: int) -> float:
    """Return the share of the summary's n-grams that are not in the document; 0 if the summary has none.

    >>> novelty("the tax on figs is two percent".split(), "the tax is two percent".split(), 2)
    0.25
    """
    summary_grams = list(_grams(summary, n))
    distinct = set(summary_grams)
    shared = {gram for gram in _grams(document, n) if gram in distinct}
    return sum(gram not in shared for gram in summary_grams) / max(1, len(summary_grams))


def _grams(words: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(n)), strict=False)


def fragments(document: Sequence[str], summary: Sequence[str]) -> list[int]:
    """Return the lengths of the passages that a summary shares with its document: left to right, each the longest
    possible.

    The published pseudocode continues behind a match and so misses passages that begin inside another; this one does
    not.

    >>> fragments("a b c d e".split(), "b c x d".split())
    [2, 1]
    """
    numbers: dict[str, int] = {}
    text = np.array([numbers.setdefault(word, len(numbers)) for word in document] + [-1], dtype=np.int64)
    summary_numbers = [numbers.get(word, -2) for word in summary]
    order = np.argsort(text, kind="stable")
    ordered = text[order]
    lengths, start = [], 0
    while start < len(summary_numbers):
        low, high = np.searchsorted(ordered, [summary_numbers[start], summary_numbers[start] + 1])
        ends = order[low:high]  # the last matching word of every candidate
        length = 0
        while len(ends):
            length += 1
            if start + length == len(summary_numbers):
                break
            ends = ends[text[ends + 1] == summary_numbers[start + length]] + 1
        if length:
            lengths.append(length)
        start += max(1, length)
    return lengths


def coverage_and_density(document: Sequence[str], summary: Sequence[str]) -> tuple[float, float]:
    """Return coverage, the share of the summary's words that lie in shared passages, and density, the mean length in
    words of the passage that each word lies in; the density is the whole summary's length if it is one quotation.

    >>> coverage_and_density("a b c d e".split(), "b c x d".split())
    (0.75, 1.25)
    """
    lengths = fragments(document, summary)
    words = max(1, len(summary))
    return sum(lengths) / words, sum(length**2 for length in lengths) / words
