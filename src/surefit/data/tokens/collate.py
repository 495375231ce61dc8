"""Collation of examples of different lengths into one micro batch: padded, or packed one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from surefit.data.tokens.cache import MASKED

Item = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""(input_ids, labels) of an example, as `TokenDataset` returns them."""
UNREAD_KEYS = frozenset(
    {
        "labels",
        "answer_targets",
        "reference_log_probs",
        "own_targets",
        "shared_sums",
        "desirable",
        "mismatched",
    }
)
"""Keys of a micro batch that neither the model nor the cross-entropy reads."""
OWN_KEYS = frozenset({*UNREAD_KEYS, "loss_rows", "targets", "padded"})
"""Keys of a micro batch for the training step; all others are the model's inputs."""


def collate(items: Sequence[Item], pad_id: int) -> dict[str, Any]:
    """Pad on the right, as a causal model needs it in training.

    Args:
        items: at least one example.
        pad_id: fills input_ids; the attention mask is 0 and the label -100 there, for any pad token.

    Returns:
        input_ids, attention_mask and labels, int64, of shape (examples, longest); padded: whether the mask has zeros,
        for code that must not read a value back from a GPU; and the result of `build_loss_targets`.
    """
    shape = (len(items), max(len(ids) for ids, _ in items))
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, MASKED, dtype=torch.int64)
    for row, (ids, item_labels) in enumerate(items):
        input_ids[row, : len(ids)] = torch.as_tensor(ids)
        attention_mask[row, : len(ids)] = 1
        labels[row, : len(ids)] = torch.as_tensor(item_labels)
    padded = any(len(ids) < shape[1] for ids, _ in items)
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, "padded": padded}
    return batch | build_loss_targets(labels)


def collate_packed(items: Sequence[Item]) -> dict[str, Any]:
    """Concatenate examples; none attends to another (model/attention.py).

    Returns:
        input_ids, labels, position_ids, int64, of shape (1, tokens): positions start at 0 in every example, whose first
        label is masked, because no token of the example comes before it. cu_seq_lens_q and cu_seq_lens_k, int32, of
        shape (examples + 1,): where each begins and the last one ends. max_length_q and max_length_k: the longest
        example's tokens, an int. Those names are transformers' own. document_lengths, a tuple of ints: the lengths
        again, for attention that works on one example at a time and must not read a value back from a GPU. And the
        result of `build_loss_targets`.
    """
    lengths = [len(ids) for ids, _ in items]
    ends = torch.as_tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    labels = np.concatenate([item_labels for _, item_labels in items]).astype(np.int64)
    labels[ends[:-1].numpy()] = MASKED
    batch: dict[str, Any] = {
        "input_ids": torch.as_tensor(np.concatenate([ids for ids, _ in items]).astype(np.int64))[None],
        "position_ids": torch.as_tensor(np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]))[None],
        "labels": torch.as_tensor(labels)[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "document_lengths": tuple(lengths),
    }
    return batch | build_loss_targets(batch["labels"])


def describe_pairs(items: Sequence[Item], reference: npt.NDArray[Any] | None) -> dict[str, Any]:
    """Return what an objective of pairs needs of a micro batch beside its tensors.

    Args:
        items: two examples of each pair, chosen and rejected.
        reference: the reference's summed log-probabilities, (pairs, 2); None without a reference.

    Returns:
        answer_targets: for each example the number of tokens that the loss counts, a tuple of ints, because no step may
        wait for a GPU to count; reference_log_probs, float32, of shape (pairs, 2), where there is a reference.
    """
    counts = {"answer_targets": count_targets(items)}
    if reference is None:
        return counts
    return counts | {"reference_log_probs": torch.as_tensor(reference, dtype=torch.float32)}


def describe_labelled(
    items: Sequence[Item],
    desirable: Sequence[bool],
    reference: npt.NDArray[Any],
    mismatched: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return what an objective on labelled answers needs of a micro batch beside its tensors.

    Args:
        items: the examples.
        desirable: the label of each.
        reference: the reference's summed log-probabilities of each answer and of its mismatched one, (examples, 2).
        mismatched: the batches of the mismatched examples, in their order.

    Returns:
        answer_targets and reference_log_probs as in `describe_pairs`; desirable, a tuple of bools; mismatched: the
        batches, each with its answer_targets, and its reference_log_probs of shape (examples,).
    """
    values = torch.as_tensor(reference, dtype=torch.float32)
    return {
        "answer_targets": count_targets(items),
        "reference_log_probs": values,
        "desirable": tuple(bool(label) for label in desirable),
        "mismatched": tuple(mismatched),
    }


def count_targets(items: Sequence[Item]) -> tuple[int, ...]:
    """Return the number of tokens of each example that the loss counts."""
    return tuple(int(np.count_nonzero(labels[1:] != MASKED)) for _, labels in items)


def build_loss_targets(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the positions and tokens that the loss uses, computed on the CPU so that no step waits for a GPU to count.

    Args:
        labels: (batch, length), `MASKED` where not supervised; a row's first label is never used.

    Returns:
        loss_rows: (n,) int64, ascending: which of the batch × length hidden states predict a supervised token.
        targets: (n,) int64: that token.

    >>> batch = build_loss_targets(torch.tensor([[-100, -100, 7, 8], [-100, 9, -100, -100]]))
    >>> batch["loss_rows"].tolist(), batch["targets"].tolist()
    ([1, 2, 4], [7, 8, 9])
    """
    shifted = torch.nn.functional.pad(labels, (0, 1), value=MASKED)[:, 1:].flatten()
    rows = (shifted != MASKED).nonzero().flatten()
    return {"loss_rows": rows, "targets": shifted[rows]}


def count_batch_tokens(batch: Mapping[str, Any]) -> int:
    """Return the number of tokens that are not padding."""
    mask = batch.get("attention_mask")
    return int(batch["input_ids"].numel() if mask is None else mask.sum())
