"""Attention on a GPU as `facts/sdpa.py` has it: cuDNN's kernel off, key heads repeated where no kernel takes fewer.

A plan's tensors, which have no data, lie on a CPU: inside `gpu_assumed` they are taken for a GPU's.
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
    """What this process sets before its first model is on a GPU; again, it changes nothing.

    Here and nowhere else cuDNN's attention is switched off, for the whole process: `facts.sdpa.OFF` says why, and under
    which condition this can go.
    """
    assert set(OFF) == {"cudnn"}
    torch.backends.cuda.enable_cudnn_sdp(False)
    compat.repeat_heads_where(must_repeat_kv_heads)


@contextmanager
def gpu_assumed(capability: Capability = (8, 0)) -> Iterator[None]:
    """Let attention inside do what it does on a GPU of this compute capability, whatever the device."""
    global _assumed
    compat.repeat_heads_where(must_repeat_kv_heads)
    outer, _assumed = _assumed, capability
    try:
        yield
    finally:
        _assumed = outer


def capability_of(tensor: torch.Tensor) -> Capability | None:
    """The compute capability of the GPU that a tensor is on, or is taken to be on; None on a CPU."""
    if _assumed is not None:
        return _assumed
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else None


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU, or is taken to be."""
    return tensor.is_cuda or _assumed is not None


def must_repeat_kv_heads(key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether keys and values (batch, heads, length, width) are to be repeated for more query heads, in a call of
    `scaled_dot_product_attention` without a mask. Training and answering do alike."""
    capability = capability_of(key)
    return capability is not None and _repeats(capability, key.dtype, key.shape[-1], value.shape[-1])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _repeats(capability: Capability, dtype: torch.dtype, width: int, value_width: int) -> bool:
    return policy_repeats(AttentionCall(capability, str(dtype).removeprefix("torch."), width, value_width))
