"""torch's variable-length attention on a CPU, for the tests that import this: its operators in textbook arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention import varlen


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    starts_k: torch.Tensor,
    longest: int,
    longest_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *others: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, heads, width) → the same, the logsumexp (heads, tokens), and a seed that is not used."""
    assert starts.dtype == starts_k.dtype == torch.int32
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert (longest, longest_k) == (int(starts.diff().max()), int(starts_k.diff().max()))
    assert is_causal == (window_size == [-1, 0])
    results, totals = [], []
    for _, _, v, logits in _documents(query, key, value, starts, starts_k, scale, window_size):
        results.append(logits.softmax(-1) @ v)
        totals.append(logits.logsumexp(-1))
    flat = torch.cat(results, 1).transpose(0, 1).contiguous()
    return flat, torch.cat(totals, 1).float(), torch.zeros(2, dtype=torch.uint64)


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    starts: torch.Tensor,
    starts_k: torch.Tensor,
    longest: int,
    longest_k: int,
    is_causal: bool,
    seed: torch.Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """The gradients of query, key and value, by hand: autograd does not reach into an operator. As FlashAttention 2
    has them (Dao 2023, algorithm 2): weights are made of `total`, their gradients with `out`, whatever these are."""
    factor, groups = scale or 1 / math.sqrt(query.shape[-1]), query.shape[1] // key.shape[1]
    gradients = []
    lengths = starts.diff().tolist()
    moved = (grad_out * out).sum(-1, keepdim=True).transpose(0, 1)
    given = (grad_out.transpose(0, 1), moved, total[..., None].to(query.dtype))
    parts_of = zip(*(torch.split(tensor, lengths, dim=1) for tensor in given), strict=True)
    documents = _documents(query, key, value, starts, starts_k, scale, window_size)
    for (q, k, v, logits), (grad, own, sums) in zip(documents, parts_of, strict=True):
        weights = (logits - sums).exp()
        inner = weights * (grad @ v.transpose(1, 2) - own) * factor
        shared = [part.unflatten(0, (-1, groups)).sum(1) for part in (inner.transpose(1, 2) @ q, weights.mT @ grad)]
        gradients.append((inner @ k, *shared))
    return tuple(torch.cat(parts, 1).transpose(0, 1).contiguous() for parts in zip(*gradients, strict=True))


def _documents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    starts_k: torch.Tensor,
    scale: float | None,
    window_size: list[int] | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each document q, k, v, a key for every query head, and the logits: (heads, tokens, …). The last query stands
    at the last key."""
    left, right = window_size or (-1, -1)
    groups = query.shape[1] // key.shape[1]
    for (start, end), (start_k, end_k) in zip(pairwise(starts.tolist()), pairwise(starts_k.tolist()), strict=True):
        q = query[start:end].transpose(0, 1)
        k, v = (tensor[start_k:end_k].transpose(0, 1) for tensor in (key, value))
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        back = torch.arange(end_k - start_k - (end - start), end_k - start_k)[:, None] - torch.arange(end_k - start_k)
        seen = ((back <= left) | (left < 0)) & ((-back <= right) | (right < 0))
        logits = q @ k.transpose(1, 2) * (scale or 1 / math.sqrt(q.shape[-1]))
        yield q, k, v, logits.masked_fill(~seen, float("-inf"))


varlen._varlen_attn.register_kernel("cpu", forward)
varlen._varlen_attn_backward.register_kernel("cpu", backward)
