"""torch's choice of an attention kernel, line by line as its source has it: what `surefit.facts.sdpa` is held against.

aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h, torch 2.11 to 2.13. A build for CPUs cannot be
asked: it takes no GPU's tensor for one of a fused kernel (tests/cuda/test_policy.py shows it).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

LOW = (torch.float16, torch.bfloat16)


class Params(NamedTuple):
    """`sdp_params`, and what the device's properties say."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any
    dropout: float
    is_causal: bool
    enable_gqa: bool
    capability: tuple[int, int]
    requires_grad: bool


def select_sdp_backend(params: Params, cudnn_enabled: bool = False, cudnn_version: int = 91900) -> str:
    prefer_cudnn = cudnn_version > 91500 and params.capability[0] in (9, 10)  # check_prefer_cudnn_attention
    order = ("cudnn", "flash", "efficient") if prefer_cudnn else ("flash", "efficient")
    can: dict[str, bool] = {
        "cudnn": cudnn_enabled and can_use_cudnn_attention(params),
        "flash": can_use_flash_attention(params),
        "efficient": can_use_mem_efficient_attention(params),
    }
    return next((name for name in order if can[name]), "math")


def can_use_flash_attention(params: Params) -> bool:
    q, k, v = params.query.shape, params.key.shape, params.value.shape
    if params.attn_mask is not None:  # check_for_attn_mask
        return False
    if not (q[-1] == k[-1] == v[-1] and q[-1] <= 256):  # check_head_dim_size_flash
        return False
    if not (8, 0) <= params.capability <= (12, 1):  # check_flash_attention_hardware_support
        return False
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    narrow = (8, 6) <= params.capability <= (8, 9) or (12, 0) <= params.capability <= (12, 1)
    if params.requires_grad and narrow and not (q[-1] <= 192 or (params.dropout == 0 and q[-1] > 224)):
        return False
    if params.is_causal and q[-2] != k[-2]:  # check_flash_causal_non_square_seqlens
        return False
    if not _dtype(params, LOW):  # check_dtypes_low_precision
        return False
    return _heads(params, supports_gqa=True)


def can_use_mem_efficient_attention(params: Params) -> bool:
    q, k, v = params.query.shape, params.key.shape, params.value.shape
    if not (5, 0) <= params.capability <= (12, 1):  # check_mem_efficient_hardware_support
        return False
    alignment = _minimum_gemm_alignment(params)  # check_head_dim_size_mem_efficient
    if not (q[-1] == k[-1] and q[-1] % alignment == 0 and v[-1] % alignment == 0):
        return False
    if not _heads(params, supports_gqa=False):
        return False
    return _dtype(params, (*LOW, torch.float32) if params.capability[0] >= 8 else (torch.float16, torch.float32))


def can_use_cudnn_attention(params: Params) -> bool:
    q, v = params.query.shape, params.value.shape
    low = LOW if params.capability[0] >= 8 else (torch.float16,)
    if not _dtype(params, low) or not (8, 0) <= params.capability <= (12, 1):
        return False
    return max(q[-1], v[-1]) <= 128 and q[-1] % 8 == v[-1] % 8 == 0 and _heads(params, supports_gqa=True)


def _minimum_gemm_alignment(params: Params) -> int:
    major, half = params.capability[0], params.query.dtype in LOW
    use_tensor_cores = major >= 8 or (major == 7 and half)
    alignment = 4 if major >= 8 else 1
    return max(alignment, 128 // (16 if half else 32)) if use_tensor_cores else alignment


def _dtype(params: Params, allowed: tuple[torch.dtype, ...]) -> bool:
    return params.query.dtype == params.key.dtype == params.value.dtype and params.query.dtype in allowed


def _heads(params: Params, supports_gqa: bool) -> bool:
    """`check_batch_size_and_num_heads_dense`"""
    q, k, v = (tensor.shape[-3] for tensor in (params.query, params.key, params.value))
    if params.enable_gqa and supports_gqa:
        return bool(k == v and q % k == 0)
    return bool(q == k == v)
