"""Float8 in one pass: rows to it, and weights from it. Triton's source, and its launchers.

Only imported where Triton is installed; `float8_ops` has the operators, and the same arithmetic in PyTorch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 1024, 4
"""Weights that a block of threads computes, and its warps."""
MOST_NUMBERS_PER_THREAD = 32
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def rows_kernel(q, scale, x, width, BLOCK: tl.constexpr):
    """Quantize one row per program, held in registers between its two uses."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    values = tl.load(x + row * width + columns, mask, 0.0).to(tl.float32)
    largest = tl.maximum(tl.div_rn(tl.max(tl.abs(values), axis=0), 448.0), TINY)
    tl.store(scale + row, largest)
    tl.store(q + row * width + columns, tl.div_rn(values, largest).to(tl.bfloat16).to(q.dtype.element_ty), mask)


@triton.jit
def weights_kernel(w, q, scale, width, BLOCK: tl.constexpr):
    """Dequantize q read as bytes, since Ampere has no float8: its bits, shifted left by 7 places, are a float16 that is
    256 times smaller, subnormal numbers included."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    bits = tl.load(q + row * width + columns, mask, 0).to(tl.int16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    value = half.to(tl.float32) * 256.0 * tl.load(scale + row)
    tl.store(w + row * width + columns, value.to(w.dtype.element_ty), mask)


def launch_rows_kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `float8_ops.quantize_rows_fused` on a GPU."""
    x = x.contiguous()
    count, width = x.shape
    q, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(count, 1, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    rows_kernel[(count,)](q, scale, x, width, BLOCK=block, num_warps=num_warps_for_block(block))
    return q, scale


def launch_weights_kernel(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute `float8_ops.dequantize_weights_fused` on a GPU."""
    w = torch.empty_like(q, dtype=dtype)
    count, width = q.shape
    weights_kernel[(count, triton.cdiv(width, BLOCK))](
        w, q.view(torch.uint8), scale, width, BLOCK=BLOCK, num_warps=WARPS
    )
    return w


def num_warps_for_block(block: int) -> int:
    """Return the warps of a program that holds a row of `block` numbers."""
    return min(32, max(4, block // (32 * MOST_NUMBERS_PER_THREAD)))
