"""Conversion to float8 and back: in PyTorch's operators, and as operators of our own that run in one pass on a GPU.

Both give the same bits for the same scales. Per number, rows move 9 bytes in PyTorch's operators, 2 for their largest,
4 to divide and 3 to round, and in one pass 3. Weights move 7, and in one pass 3. As in `kernel_ops`, the device decides
which arithmetic one of our operators runs, and a plan sees one call.
"""

from __future__ import annotations

import math
from typing import Any

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448
TINY = torch.finfo(torch.float32).tiny


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (Q, scale) with x ≈ scale · Q, for bfloat16 x (rows, inputs): float8, and (rows, 1) float32.

    Rounded to bfloat16 on the way, which saves a float32 copy of x. There a row's largest number is 448 again, however
    the division rounded: the next bfloat16 is 450. So nothing is out of float8's range.
    """
    scale = torch.linalg.vector_norm(x, math.inf, dim=1, keepdim=True, dtype=torch.float32) / FP8_MAX
    scale.clamp_(min=TINY)
    return torch.div(x, scale, out=torch.empty_like(x)).to(FP8), scale


def dequantize_weights(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return scale · Q in `dtype`, each rounded once: q (outputs, inputs) float8, scale (outputs, 1) float32."""
    # Float8 is exact in every dtype of the computation; multiplied by a float32, the product is computed in float32.
    return q.to(dtype).mul_(scale)


@torch.library.custom_op("surefit::float8_rows", mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor)")
def quantize_rows_fused(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `quantize_rows` in one pass on a GPU of compute capability 8.9 or more. Not differentiated."""
    if not x.is_cuda:
        return quantize_rows(x)
    from surefit.model import triton_float8

    return triton_float8.launch_rows_kernel(x)


@quantize_rows_fused.register_fake
def _(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=FP8), x.new_empty(x.shape[0], 1, dtype=torch.float32)


@torch.library.custom_op(
    "surefit::float8_weights", mutates_args=(), schema="(Tensor q, Tensor scale, ScalarType dtype) -> Tensor"
)
def dequantize_weights_fused(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute `dequantize_weights` in one pass on a GPU. Not differentiated: the weights are frozen."""
    if not q.is_cuda:
        return dequantize_weights(q, scale, dtype)
    from surefit.model import triton_float8

    return triton_float8.launch_weights_kernel(q, scale, dtype)


@dequantize_weights_fused.register_fake
def _(q: Any, scale: Any, dtype: torch.dtype) -> torch.Tensor:
    return q.new_empty(q.shape, dtype=dtype)  # type: ignore[no-any-return]
