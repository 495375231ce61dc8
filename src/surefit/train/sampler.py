"""The rows of each optimizer step: a pure function of the seed, the number of rows and the step.

The rows form one endless stream, with a new shuffle for every epoch, and step k uses rows `k × global_batch_size` up to
`(k + 1) × global_batch_size` of it. So every batch is full: the one that an epoch cannot fill is completed with the
first rows of the next epoch. A resumed run needs nothing but its step number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from surefit.core.errors import DataError
from surefit.data.tokens.cache import MASKED
from surefit.data.tokens.shard_manifest import ShardedLengths, ShardedTokens
from surefit.train.permutation import permute_positions

TABLE_ROWS = 2**24
"""Largest number of rows for which an epoch's order is stored as a table, of at most 128 MiB; of more rows the order is
computed row by row."""
ORDER_STREAM, DROPOUT_STREAM = 0, 1
"""Keep apart the random numbers that are drawn from one seed for different purposes."""


class TokenizedRows(Protocol):
    """Tokenized rows: (input ids, labels), two arrays of equal length, labels `MASKED` where not supervised."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]: ...


def labels_of(rows: TokenizedRows) -> npt.NDArray[np.bool_]:
    """Return which rows are desirable answers, from rows that were tokenized with their labels."""
    desirable: npt.NDArray[np.bool_] | None = getattr(rows, "desirable", None)
    if desirable is None:
        assert len(rows) == 0, "rows of an objective on labelled answers have labels"
        return np.empty(0, np.bool_)
    return desirable


RowLengths = npt.NDArray[np.int64] | ShardedLengths
"""Number of tokens of each row; indexed by one row number or by several."""


@dataclass(frozen=True)
class DatasetFingerprint:
    """Lengths, hash and token count of all rows, which training needs beforehand.

    Attributes:
        lengths: number of tokens of each row.
        sha256: hash of all ids and labels, also of those that say which answers are desirable; a resumed run must have
            the same.
        supervised: number of tokens that the loss counts; 0 for prepared data, where it is not needed.
    """

    lengths: RowLengths
    sha256: str
    supervised: int = 0


def fingerprint_training_rows(rows: TokenizedRows) -> DatasetFingerprint:
    """Compute the fingerprint of the training rows from every row; for prepared data from the manifest, whose shards
    hold no row without a supervised token.

    Raises:
        DataError: there are no rows, or a row has no token that the loss would count.
    """
    if len(rows) == 0:
        raise DataError("no rows to train on", code="E5111", field="data.train", help="name data with usable rows")
    if isinstance(rows, ShardedTokens):
        return DatasetFingerprint(rows.lengths, rows.sha256)
    return fingerprint_rows(rows, _require_supervised)


def _require_supervised(index: int, length: int, supervised: int) -> None:
    if not supervised:
        raise DataError(
            f"tokenized row {index} has no supervised token among its {length}",
            code="E5112",
            field="data.train",
            help="its answer is empty or was truncated: raise data.max_length, or remove the row",
        )


def fingerprint_rows(rows: TokenizedRows, look: Callable[[int, int, int], None] | None = None) -> DatasetFingerprint:
    """Compute the fingerprint from every row; there may be no rows.

    Args:
        look: called with (row number, tokens, supervised tokens) for each row.
    """
    digest = hashlib.sha256()
    lengths = np.empty(len(rows), dtype=np.int64)
    supervised = 0
    for index in range(len(rows)):
        ids, labels = rows[index]
        counted = int(np.count_nonzero(labels[1:] != MASKED))
        if look is not None:
            look(index, len(ids), counted)
        supervised += counted
        lengths[index] = len(ids)
        for part in (lengths[index : index + 1], ids, labels):
            digest.update(np.ascontiguousarray(part, dtype=np.int32).data)
    if getattr(rows, "desirable", None) is not None:
        digest.update(labels_of(rows).tobytes())
    return DatasetFingerprint(lengths, digest.hexdigest(), supervised)


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, rows: int) -> npt.NDArray[np.int64]:
    """Return the shuffled row numbers of one epoch.

    Sorts raw 64-bit outputs of PCG64, which are the same in all versions of numpy; numpy's shuffles may change.
    """
    bits = np.random.PCG64(np.random.SeedSequence((seed, ORDER_STREAM, epoch)))
    order = np.argsort(bits.random_raw(rows), kind="stable")
    order.flags.writeable = False
    return order


def batch_rows(step: int, seed: int, rows: int, global_batch_size: int) -> list[int]:
    """Return the row numbers of one global batch; `step` is 0 for the first."""
    start = step * global_batch_size
    if rows > TABLE_ROWS:
        return _without_table(range(start, start + global_batch_size), seed, rows)
    return [
        int(epoch_order(seed, position // rows, rows)[position % rows])
        for position in range(start, start + global_batch_size)
    ]


def _without_table(positions: range, seed: int, rows: int) -> list[int]:
    """Compute the rows at these positions of the endless stream, epoch by epoch."""
    row_numbers: list[int] = []
    for epoch in range(positions.start // rows, (positions.stop - 1) // rows + 1):
        begin = max(positions.start, epoch * rows) - epoch * rows
        end = min(positions.stop, (epoch + 1) * rows) - epoch * rows
        row_numbers += permute_positions(np.arange(begin, end), rows, (seed, ORDER_STREAM, epoch)).tolist()
    return row_numbers


def micro_batches(batch: Sequence[int], lengths: RowLengths, size: int) -> list[list[int]]:
    """Cut a batch into micro batches of `size` rows of similar length, the longest first.

    Rows of similar length need little padding. The rows of an optimizer step stay the same, so unlike sorting the whole
    data set this does not change what is learned. The longest come first so that the memory peak comes first, too.

    >>> micro_batches([4, 0, 2, 1], np.array([7, 3, 9, 0, 5]), 2)
    [[2, 0], [4, 1]]
    """
    ordered = sorted(batch, key=lambda row: (-lengths[row], row))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def dropout_seed(seed: int, step: int, data_rank: int = 0) -> int:
    """Return torch's random seed for one step, so that dropout depends on nothing but the step and, where processes see
    different rows, the process's data rank."""
    parts = (seed, DROPOUT_STREAM, step, *([data_rank] if data_rank else []))
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))
