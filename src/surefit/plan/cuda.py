"""What a GPU runs where a CPU runs something else: attention kernels, and the memory that kernels use inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from surefit.plan.trace import Hidden

FLOAT32 = 4


@contextmanager
def cuda_attention() -> Iterator[None]:
    """Let `scaled_dot_product_attention` record the operators that PyTorch chooses on a CUDA device."""
    with patch.object(torch.nn.functional, "scaled_dot_product_attention", _as_on_cuda):
        yield


def _as_on_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash attention without a mask in 16 bits, else the memory-efficient kernel (aten/native/transformers/cuda)."""
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return out
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    bias = _bias(attn_mask, query) if attn_mask is not None else None
    out = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]
    return out


def _bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A boolean mask as the kernel takes it: numbers, the last dimension a multiple of 16 (`pad_bias`)."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    length = mask.shape[-1]
    if length % 16:
        mask = torch.nn.functional.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], length)


def _flash_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """flash_api.cpp, mha_bwd: softmax's row sums and dq's accumulator in float32; dk and dv per query head where
    several share one."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rounded, wide = -(-length // 128) * 128, -(-width // 32) * 32
    sizes = [batch * heads * rounded * FLOAT32, batch * heads * rounded * wide * FLOAT32]
    if key.shape[1] != heads:
        sizes += 2 * [batch * key.shape[2] * heads * width * key.element_size()]
    return sizes


HIDDEN: dict[str, Hidden] = {"_scaled_dot_product_flash_attention_backward": _flash_backward}
"""Operator → the temporaries inside its CUDA kernel, which no dispatch mode sees."""
