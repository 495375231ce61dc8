"""Mismatched rows: each prompt of a data set with the answer of another row, from which kto estimates its baseline.

A row's partner is fixed for the whole run: it depends on the rows and the seed, not on the batch that the row is in. So
the baseline of a global batch does not depend on micro batches, processes or the order of rows, and the reference's
log-probability of a mismatched row can be stored (docs/adr/0019-partners-of-kto.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from surefit.core.errors import DataError
from surefit.data.tokens.cache import MASKED
from surefit.data.tokens.collate import Item
from surefit.train.sampler import ORDER_STREAM, TokenizedRows

PARTNER_STREAM = ORDER_STREAM + 2
"""Keeps these random numbers apart from the others that are drawn from the seed (train/sampler.py)."""


def choose_partners(rows: TokenizedRows, seed: int) -> npt.NDArray[np.int64]:
    """Return for each row the row whose answer its mismatched row has: a permutation without fixed points, between rows
    with different prompts as far as that is possible.

    The rows are put in an order in which equal prompts stand together and which is random otherwise. The partner is the
    row that stands as many places further on as the most frequent prompt has rows: no row of the same prompt is there,
    unless more than half of all rows have that prompt.

    Raises:
        DataError: there is one row only.
    """
    if len(rows) == 1:
        raise DataError(
            "there is one row only: kto needs a second one, whose answer it sets behind the first one's prompt",
            code="E5500",
            field="data",
            help="add rows, or hold out a larger share (data.eval)",
        )
    prompts = [hashlib.blake2b(_prompt(rows[row]).tobytes(), digest_size=16).digest() for row in range(len(rows))]
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    group = np.array([numbers[prompt] for prompt in prompts], np.int64)
    # Raw outputs of PCG64, as in `epoch_order`: numpy's shuffles may change.
    places = np.random.PCG64(np.random.SeedSequence((seed, PARTNER_STREAM))).random_raw(len(numbers))
    order = np.lexsort((group, places[group])) if len(rows) else np.empty(0, np.int64)
    most = int(np.bincount(group).max()) if len(rows) else 0
    shift = most if most < len(rows) else 1
    partners = np.empty(len(rows), np.int64)
    partners[order] = np.roll(order, -shift)
    return partners


def _start(item: Item) -> int:
    """Return where the answer of a row begins."""
    return int(np.argmax(item[1] != MASKED))


def _prompt(item: Item) -> npt.NDArray[np.int64]:
    return np.asarray(item[0][: _start(item)], np.int64)


def mismatch(row: Item, partner: Item, max_length: int) -> Item:
    """Return the prompt of `row` with the answer of `partner`, which is cut at `max_length` tokens: it is measured, not
    learned. At least one token of the answer remains, as the prompt was followed by one."""
    start, other = _start(row), _start(partner)
    parts: list[npt.NDArray[Any]] = [np.concatenate([a[:start], b[other:]]) for a, b in zip(row, partner, strict=True)]
    return parts[0][:max_length], parts[1][:max_length]


def split_in_order(lengths: Sequence[int], capacity: int) -> Iterator[slice]:
    """Yield consecutive documents that together have at most `capacity` tokens; a longer one is alone.

    >>> list(split_in_order([3, 4, 2, 9, 1], 7))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    start = tokens = 0
    for number, length in enumerate(lengths):
        if number > start and tokens + length > capacity:
            yield slice(start, number)
            start, tokens = number, 0
        tokens += length
    if start < len(lengths):
        yield slice(start, len(lengths))
