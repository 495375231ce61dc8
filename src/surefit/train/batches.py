"""The micro batches of every optimizer step: which rows share one, and the tensors that they become."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from surefit.config.resolve import optimizer_steps
from surefit.config.schema import SureFitConfig, decided
from surefit.data.tokens.cache import MASKED
from surefit.data.tokens.collate import (
    Item,
    collate,
    collate_packed,
    count_targets,
    describe_labelled,
    describe_pairs,
)
from surefit.data.tokens.pack import distribute_bins, pack_for
from surefit.data.tokens.shard_manifest import ShardedLengths
from surefit.data.tokens.shared_prompts import collate_shared, count_shared_tokens
from surefit.train.mismatched import choose_partners, mismatch, split_in_order
from surefit.train.sampler import RowLengths, TokenizedRows, batch_rows, labels_of, micro_batches
from surefit.train.step import Batch

SCANNED = 5_000
"""Number of steps that are packed beforehand to find the fullest micro batch: about a second."""


LOOKED_UP = 2**14
"""Number of rows of prepared data that are looked up for the same purpose: each row may be in another file."""


class MicroBatcher:
    """Cuts rows into micro batches, padded or packed as `data.packing` says.

    Padded, a micro batch has `per_device_train_batch_size` rows of similar length. Packed, it is filled with rows up to
    `per_device_train_batch_size` × `data.max_length` tokens; where ranks share a step, their micro batches are about
    equally full. Either way all rows of a micro batch belong to one optimizer step, so packing does not change what is
    learned.

    Of an objective of pairs, an example is two consecutive rows, chosen and rejected: row numbers, batch sizes and
    `lengths` count pairs. Both answers are in one micro batch, padded as 2 rows of it, or packed as 2 documents, for
    which a micro batch has room for twice as many tokens. With `speed.shared_prompts` a pair's prompt is in the row
    once, and counts once.

    Of an objective on labelled answers, a micro batch has with it the mismatched rows of its rows
    (train/mismatched.py), in batches of their own, none larger than a micro batch may be.

    Args:
        rows: tokenized rows.
        lengths: number of tokens of each row.
        config: resolved: no setting is "auto".
        pad_id: token id that pads the rows.
        ranks: number of processes, or of groups of processes, that share the rows.

    Attributes:
        examples: number of examples: rows, or pairs of them.
        lengths: tokens of each example; of a pair that is padded, of two rows as long as its longer one.
        reference: the reference's log-probabilities, (examples, 2): of a pair's two answers, or of a labelled answer
            and of its mismatched one; None before they are known, for which 0 stands in.
        partners: of labelled answers, the row whose answer each mismatched row has; else None.
    """

    def __init__(
        self, rows: TokenizedRows, lengths: RowLengths, config: SureFitConfig, pad_id: int, ranks: int = 1
    ) -> None:
        size, packing = config.train.per_device_train_batch_size, config.data.packing
        assert isinstance(size, int)
        assert isinstance(packing, bool)
        self.rows, self.size, self.packing, self.pad_id = rows, size, packing, pad_id
        self.answers, self.compares = config.objective.answers_per_example, config.objective.has_reference
        self.examples, self.lengths = len(rows) // self.answers, lengths
        if self.answers > 1:
            assert not isinstance(lengths, ShardedLengths), "prepared data are single answers"
            self._answers = answers = lengths.reshape(self.examples, self.answers)
            self.lengths = answers.sum(axis=1) if packing else self.answers * answers.max(axis=1, initial=0)
        self.shares = packing and self.answers > 1 and config.speed.shared_prompts is True
        self._prompts: npt.NDArray[np.int64] | None = None
        if self.shares:
            pairs = [count_shared_tokens(rows[2 * pair], rows[2 * pair + 1]) for pair in range(self.examples)]
            self._prompts = np.array(pairs, np.int64)
            self.lengths = self.lengths - self._prompts
        self.reference: npt.NDArray[np.float32] | None = None
        self.train, self.ranks = config.train, ranks
        self.capacity = self.answers * size * config.data.max_length
        self.max_length = config.data.max_length
        self.partners: npt.NDArray[np.int64] | None = None
        if config.objective.labelled:
            self.partners, self.desirable = choose_partners(rows, config.train.seed), labels_of(rows)

    @property
    def partners_sha256(self) -> list[str]:
        """Return the hash of what the mismatched rows are made from beside the rows; nothing where there are none."""
        if self.partners is None:
            return []
        return [hashlib.sha256(self.partners.tobytes() + str(self.max_length).encode()).hexdigest()]

    def of_step(self, step: int) -> list[list[int]]:
        """Return the row numbers of each micro batch of a step; 0 is the first step."""
        row_numbers = batch_rows(step, self.train.seed, self.examples, decided(self.train.global_batch_size))
        return self.cut(row_numbers)

    def cut(self, chosen: Sequence[int]) -> list[list[int]]:
        """Split rows into micro batches, the one with the most tokens first, so that the memory peak comes early,
        too."""
        if not self.packing:
            return micro_batches(chosen, self.lengths, self.size)
        bins = pack_for(self.ranks, [int(self.lengths[row]) for row in chosen], self.capacity)
        return [[chosen[index] for index in indices] for indices in bins]

    def share(self, micros: Sequence[list[int]], rank: int) -> list[list[int]]:
        """Return one rank's micro batches of a step.

        All ranks get the same number, because they compute in lockstep: where the number is not divisible, empty micro
        batches are added. How the ranks share the micro batches does not change what is learned.
        """
        ranks = self.ranks
        if ranks == 1:
            return list(micros)
        rank_micros = distribute_bins(micros, self.lengths, ranks)[rank] if self.packing else list(micros[rank::ranks])  # type: ignore[arg-type]
        return rank_micros + [[]] * (-(-len(micros) // ranks) - len(rank_micros))

    def make(self, micro: Sequence[int]) -> Batch:
        """Collate the tensors of a micro batch; an empty one becomes a single token that the loss does not count."""
        items = self.items(micro)
        filled = items or [(np.array([self.pad_id]), np.array([MASKED]))]
        if self.shares and items:
            return collate_shared(items) | describe_pairs(items, self._reference_of(micro))
        batch = self._collate(filled)
        if self.partners is not None:
            return batch | self._describe_labelled(micro, items)
        return batch if self.answers == 1 else batch | describe_pairs(items, self._reference_of(micro))

    def _collate(self, items: Sequence[Item]) -> dict[str, Any]:
        return collate_packed(items) if self.packing else collate(items, self.pad_id)

    def _describe_labelled(self, micro: Sequence[int], items: Sequence[Item]) -> dict[str, Any]:
        """Return what an objective on labelled answers needs of a micro batch, its mismatched rows included."""
        assert self.partners is not None
        reference = self._reference_of(micro)
        assert reference is not None
        mismatched = [
            mismatch(item, self.rows[int(self.partners[row])], self.max_length)
            for row, item in zip(micro, items, strict=True)
        ]
        capacity = self.capacity if self.packing else self.size * self.max_length
        batches = [
            self._collate(mismatched[part])
            | {
                "answer_targets": count_targets(mismatched[part]),
                "reference_log_probs": torch.as_tensor(reference[part, 1], dtype=torch.float32),
            }
            for part in split_in_order([len(ids) for ids, _ in mismatched], capacity)
        ]
        return describe_labelled(items, [bool(self.desirable[row]) for row in micro], reference, batches)

    def items(self, micro: Sequence[int]) -> list[Item]:
        """Return the token rows of a micro batch, in its order; the two of a pair follow one another."""
        return [self.rows[self.answers * row + answer] for row in micro for answer in range(self.answers)]

    def document_lengths(self, micros: Sequence[Sequence[int]]) -> list[int]:
        """Return the tokens of each row of some micro batches."""
        if self.answers == 1:
            return [int(self.lengths[row]) for micro in micros for row in micro]
        return [int(length) for micro in micros for row in micro for length in self._answers[row]]

    def shared_prompts(self, micros: Sequence[Sequence[int]]) -> list[int]:
        """Return the tokens of each prompt of some micro batches that both answers of a pair share."""
        return [] if self._prompts is None else [int(self._prompts[row]) for micro in micros for row in micro]

    def _reference_of(self, micro: Sequence[int]) -> npt.NDArray[np.float32] | None:
        if not self.compares:
            return None
        if self.reference is None:
            return np.zeros((len(micro), 2), np.float32)
        return self.reference[np.asarray(micro, np.int64)]

    def all(self, rank: int = 0) -> Iterator[Batch]:
        """Yield every row once, collated; with several ranks, only the rows of `rank`, as `share` deals them."""
        return map(self.make, self.share(self.cut(range(self.examples)), rank))

    def fullest(self) -> list[int]:
        """Return the row numbers of a micro batch that needs at least as much memory as any other of the run.

        Padded: the longest rows together. Packed: the micro batch with the most tokens among the run's first `SCANNED`
        steps, because rows that are not the longest may fill it better.
        """
        if not self.packing:
            # If a step needs more rows than the data set has, some rows occur twice.
            lengths = self.lengths
            longest = (
                lengths.longest(self.size)
                if isinstance(lengths, ShardedLengths)
                else np.argsort(-lengths, kind="stable")
            )
            return np.resize(longest, self.size).tolist()
        train = self.train
        epochs, batch = decided(train.num_train_epochs), decided(train.global_batch_size)
        steps = optimizer_steps(self.examples, epochs, batch, train.max_steps)
        lazily = isinstance(self.lengths, ShardedLengths)
        scanned = max(1, LOOKED_UP // batch) if lazily else SCANNED
        firsts = (self.of_step(step)[0] for step in range(min(steps, scanned)))
        return max(firsts, key=lambda micro: int(self.lengths[micro].sum()))
