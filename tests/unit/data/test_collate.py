"""Batches for training: padded on the right, with padding that no loss and no attention sees."""

from __future__ import annotations

import numpy as np
import torch

from surefit.data.tokens.cache import MASKED
from surefit.data.tokens.collate import collate, collate_packed, count_batch_tokens


def item(ids, labels):
    return np.array(ids, np.int64), np.array(labels, np.int64)


def test_right_padding():
    batch = collate([item([5, 6, 7], [MASKED, 6, 7]), item([9], [MASKED])], pad_id=6)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [9, 6, 6]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[MASKED, 6, 7], [MASKED, MASKED, MASKED]], (
        "a pad id among the labels is no padding"
    )
    assert batch["padded"] is True
    assert {value.dtype for name, value in batch.items() if name != "padded"} == {torch.int64}
    assert batch["loss_rows"].tolist() == [0, 1], "the hidden states that say 6 and 7"
    assert batch["targets"].tolist() == [6, 7]
    assert count_batch_tokens(batch) == 4


def test_one_example_is_not_padded():
    batch = collate([item([1, 2], [MASKED, 2])], pad_id=0)
    assert all(tuple(batch[key].shape) == (1, 2) for key in ("input_ids", "attention_mask", "labels"))
    assert batch["padded"] is False


def test_packed_examples_have_no_padding_and_positions_of_their_own():
    batch = collate_packed([item([5, 6, 7], [MASKED, 6, 7]), item([9, 8], [9, 8])])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9, 8]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["labels"].tolist() == [[MASKED, 6, 7, MASKED, 8]], "nothing of its own comes before a first token"
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert (batch["max_length_q"], batch["max_length_k"], batch["document_lengths"]) == (3, 3, (3, 2))
    assert batch["loss_rows"].tolist() == [0, 1, 3]
    assert batch["targets"].tolist() == [6, 7, 8]
    assert count_batch_tokens(batch) == 5
    assert "attention_mask" not in batch
