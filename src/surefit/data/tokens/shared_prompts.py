"""Pairs packed with their prompt once: prompt, chosen answer, rejected answer, one after the other in a row.

Both answers begin at the prompt's length and read the prompt and themselves, each as if it were alone:

    row        [p p p p c c c r r]
    position    0 1 2 3 4 5 6 4 5
    documents   p p p p c c c         reads itself: the prompt with the chosen answer
                r r                   reads p p p p r r: the prompt again, and itself

So a row has two documents per pair, as without sharing, but the second has fewer queries than keys (model/varlen.py).
The first token of either answer is predicted at the prompt's last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from surefit.data.tokens.cache import MASKED
from surefit.data.tokens.collate import Item, collate_packed
from surefit.data.tokens.prompt_share import worth_sharing


def count_shared_tokens(chosen: Item, rejected: Item) -> int:
    """Return the tokens of a pair's prompt that are left out of a row: all before the first supervised one of either
    answer; 0 where the answers' prompts differ, or where it is not worth it.

    >>> ids = np.array([5, 6, 7, 8])
    >>> count_shared_tokens((ids, np.array([-100, -100, 7, 8])), (ids[:3], np.array([-100, -100, 7])))
    2
    """
    places = [np.flatnonzero(labels[1:] != MASKED) + 1 for _, labels in (chosen, rejected)]
    prompt = min((int(found[0]) for found in places if len(found)), default=0)
    if not np.array_equal(chosen[0][:prompt], rejected[0][:prompt]):
        return 0
    return worth_sharing(prompt, len(chosen[0]) + len(rejected[0]))


def collate_shared(items: Sequence[Item]) -> dict[str, Any]:
    """Concatenate pairs, each with its prompt once.

    Args:
        items: two examples of each pair, chosen and rejected.

    Returns:
        As `collate_packed`, without the prompts of the rejected answers. cu_seq_lens_q, max_length_q and
        document_lengths are of the documents' queries: of a rejected answer without its prompt. cu_seq_lens_k,
        max_length_k and key_lengths are of all that they read, and key_order, int64, has the place in the row of each
        token that is read. loss_rows has the last token of each prompt twice.
    """
    batch = collate_packed(items)
    lengths: tuple[int, ...] = batch["document_lengths"]
    starts = batch["cu_seq_lens_q"].tolist()
    prompts = [count_shared_tokens(*items[first : first + 2]) for first in range(0, len(items), 2)]
    kept = torch.ones(sum(lengths), dtype=torch.bool)
    for pair, prompt in enumerate(prompts):
        kept[starts[2 * pair + 1] : starts[2 * pair + 1] + prompt] = False
    order = kept.cumsum(0) - 1
    for pair, prompt in enumerate(prompts):
        chosen, rejected = starts[2 * pair : 2 * pair + 2]
        order[rejected : rejected + prompt] = order[chosen : chosen + prompt]
    queries = tuple(length - (prompts[place // 2] if place % 2 else 0) for place, length in enumerate(lengths))
    return batch | {
        **{name: batch[name][:, kept] for name in ("input_ids", "position_ids", "labels")},
        "cu_seq_lens_q": torch.as_tensor(np.cumsum([0, *queries]), dtype=torch.int32),
        "max_length_q": max(queries),
        "document_lengths": queries,
        "key_lengths": lengths,
        "key_order": order,
        "loss_rows": order[batch["loss_rows"]],
    }
