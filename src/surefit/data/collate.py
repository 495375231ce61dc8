"""Examples of different lengths become one batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from surefit.data.cache import MASKED

Item = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def collate(items: Sequence[Item], pad_id: int) -> dict[str, torch.Tensor]:
    """Pad on the right, as a causal model needs it in training.

    Args:
        items: (input_ids, labels) of each example, as `TokenDataset` gives them; at least one.
        pad_id: fills input_ids; the attention mask is 0 and the label -100 there, whatever token it is.

    Returns:
        input_ids, attention_mask and labels, int64, of shape (examples, longest).
    """
    shape = (len(items), max(len(ids) for ids, _ in items))
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, MASKED, dtype=torch.int64)
    for row, (ids, own_labels) in enumerate(items):
        input_ids[row, : len(ids)] = torch.as_tensor(ids)
        attention_mask[row, : len(ids)] = 1
        labels[row, : len(ids)] = torch.as_tensor(own_labels)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
