"""Replacements for CPU operators that differ on a GPU: attention kernels, copies to the host, and the memory that
kernels use inside."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from surefit.core.units import MIB
from surefit.facts.sdpa import AttentionCall, Capability, select_kernel
from surefit.model import checkpointing, quantize
from surefit.model.sdpa import gpu_assumed
from surefit.plan.trace import HOST, HiddenTemporaries, Recorder

FLOAT32 = 4
FLOAT8_CAPABILITY = (8, 9)
PAGED = 100_000
MULTIPROCESSORS = 148
"""Streaming multiprocessors of a B200, the GPU with the most."""
ALIGNMENT = 8
"""Alignment of a row of the mask (`mem_eff_alignment`) and of a head dimension, in numbers."""


@contextmanager
def emulate_cuda_operators(capability: Capability) -> Iterator[None]:
    """Patch attention, dropout and copies to the host so that the recorder sees the allocations of a GPU."""
    functional = torch.nn.functional
    attention = partial(_attention, capability=capability)
    with ExitStack() as stack:
        stack.enter_context(patch.object(functional, "scaled_dot_product_attention", attention))
        stack.enter_context(patch.object(functional, "dropout", _dropout))
        stack.enter_context(patch.object(checkpointing, "to_host", _OffloadedFakeTensor))
        stack.enter_context(gpu_assumed(capability))
        if capability >= FLOAT8_CAPABILITY:
            stack.enter_context(patch.object(quantize, "_multiplies_float8", _multiplies_float8))
        yield


class _OffloadedFakeTensor:
    """Stand-in for `model.checkpointing.Offloaded` on a GPU: a tensor without memory there until it is read, when the
    one offloaded before it is fetched as well."""

    _newest: weakref.ref[_OffloadedFakeTensor] | None = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self._before, _OffloadedFakeTensor._newest = _OffloadedFakeTensor._newest, weakref.ref(self)
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._fetched: torch.Tensor | None = None

    def fetch(self) -> None:
        if self._fetched is None:
            self._fetched = torch.empty(self._shape, dtype=self._dtype)

    def tensor(self) -> torch.Tensor:
        self.fetch()
        fetched, self._fetched = self._fetched, None
        assert fetched is not None
        previous = self._before() if self._before is not None else None
        if previous is not None:
            previous.fetch()
        return fetched


def _multiplies_float8(x: torch.Tensor, layer: torch.nn.Linear) -> bool:
    return x.dtype == torch.bfloat16 and layer.in_features % 16 == 0 and layer.out_features % 16 == 0


def page_optimizer_states(optimizer: Any, recorder: Recorder) -> None:
    """Place the moments of bitsandbytes' paged optimizers as a GPU's driver does: on the host, until the GPU needs
    them. Parameters of fewer than 100,000 numbers are not paged (`get_state_buffer`)."""

    def buffer(parameter: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        state = torch.zeros_like(parameter, dtype=dtype)
        if parameter.numel() >= PAGED:
            recorder.tag([state], HOST)
        return state

    for inner in optimizer.inner:
        if getattr(inner, "is_paged", False):
            inner.get_state_buffer = buffer


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Apply dropout in one kernel, whose mask has a byte per number; a CPU keeps a mask of the input's dtype."""
    if not training or p == 0.0:
        return input
    dropped: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    capability: Capability,
) -> torch.Tensor:
    """Run the attention kernel that `facts.sdpa` selects, as attention.cpp calls it
    (aten/src/ATen/native/transformers)."""
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    call = AttentionCall(
        capability,
        str(query.dtype).removeprefix("torch."),
        query.shape[-1],
        value.shape[-1],
        masked=attn_mask is not None,
        grouped=enable_gqa and query.shape[-3] != key.shape[-3],
        trained=differentiated,
        uneven=is_causal and query.shape[-2] != key.shape[-2],
        dropout=dropout_p > 0,
    )
    kernel = select_kernel(call) if query.dim() == 4 else "math"
    if kernel == "flash":
        padded = (_pad_head_dim(tensor) for tensor in (query, key, value))
        scale = scale if scale is not None else query.shape[-1] ** -0.5
        flash: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, False, scale=scale
        )[0]
        return flash[..., : query.shape[-1]]
    if kernel == "math":
        math: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
        return math
    bias = _bias(attn_mask, query) if attn_mask is not None else None
    efficient: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, differentiated, dropout_p, is_causal, scale=scale
    )[0]
    return efficient


def _pad_head_dim(tensor: torch.Tensor) -> torch.Tensor:
    """Pad the head dimension to a multiple of 8, which the flash kernel needs (`pad_last_dim`)."""
    missing = -tensor.shape[-1] % ALIGNMENT
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return a mask in the form the kernel needs (`convert_boolean_attn_mask`, `preprocess_mask` in attention.cpp):
    numbers in the query's dtype, rows that start at a multiple of 8 numbers."""
    if mask.dtype == torch.bool:
        zero, minus_infinity = (torch.full((), value, dtype=query.dtype) for value in (0.0, float("-inf")))
        mask = torch.where(mask, zero, minus_infinity)
    if any(stride % ALIGNMENT for stride in mask.stride()[:-1]) or mask.stride(-1) != 1:
        length = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, ALIGNMENT - length % ALIGNMENT))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], mask.shape[-1])


def _safe_softmax(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return the temporaries of attention.cpp's safe softmax: the softmax, and a mask of the rows that are minus
    infinity throughout, before the two become the result."""
    return [args[0].numel() * args[0].element_size(), args[0].numel()]


def _flash_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return the temporaries of flash_api.cpp, mha_bwd: softmax's row sums and dq's accumulator in float32; dk and dv
    per query head where several share one."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rounded_length, rounded_width = _round_up(length, 128), _round_up(width, 32)
    sizes = [batch * heads * rounded_length * FLOAT32, batch * heads * rounded_length * rounded_width * FLOAT32]
    if key.shape[1] != heads:
        sizes += 2 * [batch * key.shape[2] * heads * width * key.element_size()]
    return sizes


def _efficient_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return the temporaries of mem_eff_attention/kernel_backward.h, Params::workspace_size: in 16 bits dq, dk and dv
    are summed in float32 tiles of 64 × 64 (some GPUs use larger tiles and keep dk and dv in registers); and one number
    per query row."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    sizes = [batch * heads * length * FLOAT32]
    if query.element_size() < FLOAT32:
        rows = _round_up(length, 64) + 2 * _round_up(key.shape[2], 64)
        sizes.append(batch * heads * rows * _round_up(width, 64) * FLOAT32)
    return sizes


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _varlen_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return the temporaries of flash_api.cpp, mha_varlen_bwd: as `_flash_backward`, but rounded up by 128 rows per
    document."""
    query, key, boundaries = args[1], args[2], args[6]
    tokens, heads, width = query.shape
    rounded = tokens + 128 * (boundaries.numel() - 1)
    sizes = [heads * rounded * FLOAT32, heads * rounded * _round_up(width, 32) * FLOAT32]
    if key.shape[1] != heads:
        sizes += 2 * [key.shape[0] * heads * width * key.element_size()]
    return sizes


def _four_bit_product(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return the temporaries of bitsandbytes 0.50, backends/cuda/ops.py, `_dequant_linear_fallback`: the scales in
    float32, before and after their offset, and the weights. It runs from 1,537 rows on, and below that where a table of
    GPUs lists it as faster than a product without it: here assumed for every GPU."""
    inputs, shape, scales = args[0], args[2], kwargs.get("absmax_8bit")
    nested = 2 * [scales.numel() * FLOAT32] if scales is not None else []
    return [*nested, shape[0] * shape[1] * inputs.element_size()]


def _norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return the temporaries of liger_kernel/ops/rms_norm.py: where the weight is trained, a float32 row of its
    gradient for each multiprocessor."""
    weight, trained = args[2], args[6]
    return [MULTIPROCESSORS * weight.numel() * FLOAT32] if trained else []


HIDDEN_TEMPORARIES: dict[str, HiddenTemporaries] = {
    "rms_norm_backward": _norm_backward,
    "_varlen_attn_backward": _varlen_backward,
    "gemm_4bit": _four_bit_product,
    "_safe_softmax": _safe_softmax,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
"""Operator → the temporaries inside its CUDA kernel, which no dispatch mode sees."""

MATMULS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm", "gemm_4bit", "_scaled_mm"})
"""Operators that run in cuBLAS."""


def cublas_thread_workspace_bytes(capability: tuple[int, int]) -> int:
    """Return the bytes of the cuBLAS workspace that PyTorch allocates once per thread: the forward pass's and
    autograd's.

    CUDAContext's `getChosenWorkspaceSize` (aten/src/ATen/cuda/CublasHandlePool.cpp): 32 MiB from Hopper on, else the
    `:4096:2:16:8` of cuBLAS's own documentation.
    """
    return 32 * MIB if capability >= (9, 0) else 2 * 4096 * 1024 + 8 * 16 * 1024


CONTEXT = {
    (8, 6): 256 * MIB,  # RTX 3090, PyTorch 2.7 with CUDA 12.8: github.com/invoke-ai/InvokeAI/issues/9413
    (8, 9): 426 * MIB,  # RTX 6000 Ada, PyTorch 2.10 with CUDA 13.0: github.com/unslothai/unsloth-zoo/pull/1053
}
"""Compute capability → memory that nvidia-smi shows for a process that has only a CUDA context."""
OTHER_CONTEXT = 512 * MIB
"""Assumed context where no measurement with a recent CUDA is published: the middle of the 256 to 768 MiB of
`plan.memory_interval`."""


def cuda_context_bytes(capability: tuple[int, int]) -> int:
    """Return the bytes of the CUDA context on the device beside the allocator's segments, before kernels are loaded."""
    return CONTEXT.get(capability, OTHER_CONTEXT)
