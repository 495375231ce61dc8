"""Batches for training: padded on the right, with padding that no loss and no attention sees."""

from __future__ import annotations

import numpy as np
import torch

from surefit.data.cache import MASKED
from surefit.data.collate import collate


def item(ids, labels):
    return np.array(ids, np.int64), np.array(labels, np.int64)


def test_right_padding():
    batch = collate([item([5, 6, 7], [MASKED, 6, 7]), item([9], [MASKED])], pad_id=6)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [9, 6, 6]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[MASKED, 6, 7], [MASKED, MASKED, MASKED]], (
        "a pad id among the labels is no padding"
    )
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_one_example_is_not_padded():
    batch = collate([item([1, 2], [MASKED, 2])], pad_id=0)
    assert {key: tuple(tensor.shape) for key, tensor in batch.items()} == dict.fromkeys(batch, (1, 2))
