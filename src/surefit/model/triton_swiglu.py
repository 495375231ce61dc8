"""silu(g + s A_g B_g) · (u + s A_u B_u), in one pass over g and u: Triton's source, and its launcher.

LoRA's part is never written: a block of the output reads its rows of `low` (the A x) and its columns of B, a few
numbers in addition to g and u. The backward pass recomputes g and u from the saved products, so that nothing else is
kept.

Only imported where Triton is installed; `kernel_ops` has the operators, and the same arithmetic in PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

ROWS, COLUMNS, WARPS = 64, 64, 8
"""Shape of a block: 64 tokens × 64 numbers of the MLP, by eight warps. Of five shapes this needs the fewest registers
and reads the least of A x and B beside g and u (docs/LOG.md); the fastest can only be measured on a GPU."""
LEAST_STEP, MOST_STEP = 16, 64
"""Least and most ranks that are multiplied at a time: tensor cores need at least 16."""


@triton.jit
def _added(base, low, low_width, b, rank, scaling, rows, columns, row_mask, column_mask, STEP: tl.constexpr):
    """Return base + s · low Bᵀ for one block, in float32."""
    total = tl.zeros(base.shape, dtype=tl.float32)
    for start in range(0, rank, STEP):
        ranks = start + tl.arange(0, STEP)
        inside = ranks < rank
        left = tl.load(low + rows[:, None] * low_width + ranks[None, :], row_mask[:, None] & inside[None, :], 0.0)
        right = tl.load(b + columns[None, :] * rank + ranks[:, None], inside[:, None] & column_mask[None, :], 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    return base + scaling * total


@triton.jit
def _inputs(
    gate, up, low, gate_b, up_b, gate_rank, up_rank, gate_scaling, up_scaling, count, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return g and u of this program's block, in float32, the block's offsets, and the mask of those that exist. STEP
    0: no LoRA."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask, column_mask = rows < count, columns < width
    places, mask = rows[:, None] * width + columns[None, :], row_mask[:, None] & column_mask[None, :]
    g = tl.load(gate + places, mask, 0.0).to(tl.float32)
    u = tl.load(up + places, mask, 0.0).to(tl.float32)
    if STEP > 0:
        ranks = gate_rank + up_rank
        g = _added(g, low, ranks, gate_b, gate_rank, gate_scaling, rows, columns, row_mask, column_mask, STEP)
        u = _added(u, low + gate_rank, ranks, up_b, up_rank, up_scaling, rows, columns, row_mask, column_mask, STEP)
    return g, u, places, mask


@triton.jit
def forward_kernel(
    y, gate, up, low, gate_b, up_b, gate_rank, up_rank, gate_scaling, up_scaling, count, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    g, u, places, mask = _inputs(
        gate, up, low, gate_b, up_b, gate_rank, up_rank, gate_scaling, up_scaling, count, width, ROWS, COLUMNS, STEP
    )
    tl.store(y + places, (g * tl.sigmoid(g) * u).to(y.dtype.element_ty), mask)


@triton.jit
def backward_kernel(
    d_gate, d_up, dy, gate, up, low, gate_b, up_b, gate_rank, up_rank, gate_scaling, up_scaling, count, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    g, u, places, mask = _inputs(
        gate, up, low, gate_b, up_b, gate_rank, up_rank, gate_scaling, up_scaling, count, width, ROWS, COLUMNS, STEP
    )
    grad, sigmoid = tl.load(dy + places, mask, 0.0).to(tl.float32), tl.sigmoid(g)
    slope = sigmoid * (1.0 + g * (1.0 - sigmoid))
    tl.store(d_gate + places, (grad * u * slope).to(d_gate.dtype.element_ty), mask)
    tl.store(d_up + places, (grad * g * sigmoid).to(d_up.dtype.element_ty), mask)


def forward(
    gate: torch.Tensor, up: torch.Tensor, low: torch.Tensor | None, b: list[torch.Tensor], scalings: list[float]
) -> torch.Tensor:
    """Compute `kernel_ops.swiglu`, with its arguments."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    _start(forward_kernel, [y], [gate, up], low, b, scalings)
    return y


def backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    low: torch.Tensor | None,
    b: list[torch.Tensor],
    scalings: list[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `kernel_ops.swiglu_backward`, with its arguments."""
    gate, up = gate.contiguous(), up.contiguous()
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    _start(backward_kernel, [d_gate, d_up], [dy.contiguous(), gate, up], low, b, scalings)
    return d_gate, d_up


def rank_block_size(ranks: list[int]) -> int:
    """Return how many ranks the kernels multiply at a time; 0 without factors."""
    return min(MOST_STEP, max(LEAST_STEP, *(triton.next_power_of_2(rank) for rank in ranks))) if ranks else 0


def _start(
    kernel: Any,
    written: list[torch.Tensor],
    read: list[torch.Tensor],
    low: torch.Tensor | None,
    b: list[torch.Tensor],
    scalings: list[float],
) -> None:
    gate = read[-1]
    width = gate.shape[-1]
    count, ranks = gate.numel() // width, [factor.shape[1] for factor in b]
    # Without factors these arguments are not read: any tensor and any number will do.
    factors = [low.contiguous(), *(factor.contiguous() for factor in b)] if low is not None else [gate] * 3
    kernel[(triton.cdiv(count, ROWS), triton.cdiv(width, COLUMNS))](
        *written, *read, *factors, *(ranks or (0, 0)), *(scalings or (0.0, 0.0)), count, width,
        ROWS=ROWS, COLUMNS=COLUMNS, STEP=rank_block_size(ranks), num_warps=WARPS,
    )  # fmt: skip
