"""Attention on a GPU as decided in `facts/sdpa.py`: cuDNN's kernel off, key heads repeated where no kernel supports
fewer.

A plan's tensors, which have no data, are on a CPU: inside `gpu_assumed` they are treated as a GPU's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from surefit.facts.sdpa import OFF, AttentionCall, Capability
from surefit.facts.sdpa import kernel_needs_repeated_kv as policy_repeats
from surefit.model import compat

_assumed: Capability | None = None


def start_cuda() -> None:
    """Set the process-wide options before the first model is on a GPU; a second call changes nothing.

    Only here cuDNN's attention is switched off, for the whole process: `facts.sdpa.OFF` explains why, and under which
    condition this can go.
    """
    assert set(OFF) == {"cudnn"}
    torch.backends.cuda.enable_cudnn_sdp(False)
    compat.repeat_heads_where(must_repeat_kv_heads)


@contextmanager
def gpu_assumed(capability: Capability = (8, 0)) -> Iterator[None]:
    """Let attention in this block behave as on a GPU of this compute capability, whatever the device."""
    global _assumed
    compat.repeat_heads_where(must_repeat_kv_heads)
    outer, _assumed = _assumed, capability
    try:
        yield
    finally:
        _assumed = outer


def capability_of(tensor: torch.Tensor) -> Capability | None:
    """Return the compute capability of the GPU that a tensor is on, or is assumed to be on; None on a CPU."""
    if _assumed is not None:
        return _assumed
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else None


def on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on a GPU, or is assumed to be."""
    return tensor.is_cuda or _assumed is not None


def must_repeat_kv_heads(key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether keys and values (batch, heads, length, width) have to be repeated for more query heads, in a call
    of `scaled_dot_product_attention` without a mask. The same in training and generation."""
    capability = capability_of(key)
    return capability is not None and _repeats(capability, key.dtype, key.shape[-1], value.shape[-1])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _repeats(capability: Capability, dtype: torch.dtype, width: int, value_width: int) -> bool:
    return policy_repeats(AttentionCall(capability, str(dtype).removeprefix("torch."), width, value_width))
