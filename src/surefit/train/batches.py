"""The micro batches of any step: which rows share one, and the tensors they become."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from surefit.config.resolve import optimizer_steps
from surefit.config.schema import Config
from surefit.data.tokens.cache import MASKED
from surefit.data.tokens.collate import collate, collate_packed
from surefit.data.tokens.pack import distribute_bins, pack_for
from surefit.data.tokens.shard_manifest import ShardedLengths
from surefit.train.sampler import RowLengths, TokenizedRows, batch_rows, micro_batches
from surefit.train.step import Batch

SCANNED = 5_000
"""Steps that are packed beforehand in search of the fullest micro batch: about a second."""


LOOKED_UP = 2**14
"""Of prepared data, rows whose lengths are looked up for that: each may lie in another file."""


class MicroBatcher:
    """Cuts any rows into micro batches, padded or packed as `data.packing` says.

    Padded, a micro batch has `per_device_train_batch_size` rows of similar length. Packed, it has as many rows as fit
    into that many times `data.max_length` tokens; where ranks share a step, all get as much. Either way only rows of
    one optimizer step ever share a micro batch, so what is learnt in a step does not depend on it.

    Args:
        rows: tokenised rows.
        lengths: tokens of each.
        config: nothing in it is "auto".
        pad_id: fills up padded rows.
        ranks: processes, or groups of them, that share the rows.
    """

    def __init__(self, rows: TokenizedRows, lengths: RowLengths, config: Config, pad_id: int, ranks: int = 1) -> None:
        size, packing = config.train.per_device_train_batch_size, config.data.packing
        assert isinstance(size, int)
        assert isinstance(packing, bool)
        self.rows, self.lengths, self.size, self.packing, self.pad_id = rows, lengths, size, packing, pad_id
        self.train, self.capacity, self.ranks = config.train, size * config.data.max_length, ranks

    def of_step(self, step: int) -> list[list[int]]:
        """The row numbers of each micro batch of a step; 0 is the first."""
        chosen = batch_rows(step, self.train.seed, len(self.rows), self.train.global_batch_size)
        return self.cut(chosen)

    def cut(self, chosen: Sequence[int]) -> list[list[int]]:
        """Some rows in micro batches, the one with the most tokens first, so that the memory peak comes first, too."""
        if not self.packing:
            return micro_batches(chosen, self.lengths, self.size)
        bins = pack_for(self.ranks, [int(self.lengths[row]) for row in chosen], self.capacity)
        return [[chosen[place] for place in places] for places in bins]

    def share(self, micros: Sequence[list[int]], rank: int) -> list[list[int]]:
        """One rank's part of the micro batches of a step.

        All get the same number, because they compute in step: an empty one fills up where they do not divide. Nothing
        that is learnt depends on how they are shared.
        """
        ranks = self.ranks
        if ranks == 1:
            return list(micros)
        dealt = distribute_bins(micros, self.lengths, ranks)[rank] if self.packing else list(micros[rank::ranks])  # type: ignore[arg-type]
        return dealt + [[]] * (-(-len(micros) // ranks) - len(dealt))

    def make(self, micro: Sequence[int]) -> Batch:
        """The tensors of a micro batch; an empty one is a token that the loss does not count."""
        items = [self.rows[row] for row in micro] or [(np.array([self.pad_id]), np.array([MASKED]))]
        return collate_packed(items) if self.packing else collate(items, self.pad_id)

    def all(self, rank: int = 0) -> Iterator[Batch]:
        """Every row once; of several ranks, one's part, as `share` has it."""
        return map(self.make, self.share(self.cut(range(len(self.rows))), rank))

    def fullest(self) -> list[int]:
        """The row numbers of a micro batch that needs as much memory as any of the run.

        Padded: the longest rows together. Packed: the one with the most tokens in the run's first `SCANNED` steps,
        because rows that are not the longest may fill it better.
        """
        if not self.packing:
            # A step of more rows than there are sees some of them twice.
            found = self.lengths
            longest = (
                found.longest(self.size) if isinstance(found, ShardedLengths) else np.argsort(-found, kind="stable")
            )
            return np.resize(longest, self.size).tolist()
        train = self.train
        steps = optimizer_steps(len(self.rows), train.num_train_epochs, train.global_batch_size, train.max_steps)
        lazily = isinstance(self.lengths, ShardedLengths)
        scanned = max(1, LOOKED_UP // train.global_batch_size) if lazily else SCANNED
        firsts = (self.of_step(step)[0] for step in range(min(steps, scanned)))
        return max(firsts, key=lambda micro: int(self.lengths[micro].sum()))
