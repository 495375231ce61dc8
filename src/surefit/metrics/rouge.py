"""ROUGE as the `rouge-score` package computes it (Lin 2004; google-research/rouge), for one answer or very many.

The package lower-cases, takes a–z and 0–9 for the only letters there are, and stems with Porter's rules for English. So
accents split words and other scripts score nothing: "letters" is a second way of making tokens that keeps every letter.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from multiprocessing import get_context
from typing import Any, Literal, NamedTuple

from surefit.metrics.words import words

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
Tokens = Literal["stemmed", "plain", "letters"]
"""stemmed and plain: the package's own tokens with and without Porter's stemmer; letters: `metrics.words.words`."""
WORTH_PROCESSES = 50_000_000
"""Cells of the tables of common subsequences, about five seconds: below that, starting processes takes longer."""


class Rouge(NamedTuple):
    """Precision, recall and their harmonic mean, each from 0 to 1."""

    precision: float
    recall: float
    f: float


class _Words:
    def tokenize(self, text: str) -> list[str]:
        return words(text)


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


def rouge_of_all(
    pairs: Sequence[tuple[str, str]], tokens: Iterable[Tokens] = ("stemmed",), processes: int | None = None
) -> list[dict[Tokens, dict[str, Rouge]]]:
    """`rouge` of many (target, prediction) pairs, in their order; in several processes where that is worth it.

    Args:
        tokens: the ways in which every pair is scored.
        processes: at most so many; by default as many as this process may use, and one where there is little to do.
    """
    ways = tuple(dict.fromkeys(tokens))
    if processes is None:
        processes = _cores() if len(ways) * sum(map(_cells, pairs)) > WORTH_PROCESSES else 1
    score = partial(_scored, ways)
    if processes <= 1 or len(pairs) < 2:
        return [score(pair) for pair in pairs]
    # Spawned, not forked: the caller may hold a model, threads and a CUDA context. The workers import no torch.
    with ProcessPoolExecutor(min(processes, len(pairs)), mp_context=get_context("spawn")) as pool:
        return list(pool.map(score, pairs, chunksize=max(1, len(pairs) // (8 * processes))))


def _scored(ways: Sequence[Tokens], pair: tuple[str, str]) -> dict[Tokens, dict[str, Rouge]]:
    return {way: rouge(*pair, way) for way in ways}


def _cells(pair: tuple[str, str]) -> int:
    """What ROUGE-L and ROUGE-Lsum fill in, about: a cell for each word of one text and each of the other, twice."""
    target, prediction = pair
    return 2 * target.count(" ") * prediction.count(" ")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
