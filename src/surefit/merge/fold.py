"""The LoRA merge: folds factors into one weight matrix, in float32 and rounded once; measures how exact it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from surefit.merge.adapter_file import Update

BLOCK_BYTES = 2**25
"""Bytes of a float64 copy of the rows that are processed at once: 32 MiB."""


@torch.no_grad()
def fold_update(matrix: torch.Tensor, update: Update) -> None:
    """Compute W ← W + scaling · B A in place, in float32, rounded once to W's dtype; with DoRA each row is then
    rescaled.

    Args:
        matrix: (outputs, inputs), or a stack of such matrices, in its stored dtype; may be a transposed view.
        update: on any device.
    """
    if matrix.ndim == 3:
        for expert, expert_update in zip(matrix, _of_experts(update), strict=True):
            fold_update(expert, expert_update)
        return
    a = update.a.to(matrix.device).float()
    for rows in _blocks(matrix):
        b = update.b[rows].to(matrix.device).float()
        new = torch.addmm(matrix[rows].float(), b, a, alpha=update.scaling)
        if update.magnitude is not None:
            new *= _lengths(update, rows, new, matrix.dtype).float()
        matrix[rows] = new.to(matrix.dtype)


@torch.no_grad()
def rounding_error(matrix: torch.Tensor, update: Update, merged: torch.Tensor, parts: Sequence[Update] = ()) -> float:
    """Return the largest error of a merged weight, as a share of the rounding error that `fold_update` may make: at
    most 1.

    The exact W' is computed in float64. The bound is u|W'| + 2 · 2⁻²⁴ (|W'| + (r + 2) · |scaling| · |B| |A|) (Higham,
    §3.5): its first term is the rounding to the dtype, its second the sum in float32. DoRA rescales the sum,
    with three more roundings.

    Args:
        matrix: W, (outputs, inputs), or a stack of such matrices, in its stored dtype. merged: W', of the same shape.
        parts: the updates that `update` is the sum of; the exact W' is then computed from these, and `update` is the
            one that was merged.

    W = 1, B A = 2⁻¹⁰, in bfloat16: the exact 1.0009765625 lies between 1 and 1.0078125 and is rounded to 1, an error of
    0.0009765625; u is 2⁻⁸, so the bound is about 0.0039.

    >>> one = torch.ones(1, 1, dtype=torch.bfloat16)
    >>> tiny = Update(torch.tensor([[2.0**-10]]), torch.ones(1, 1), 1.0)
    >>> f"{rounding_error(one, tiny, one):.3f}"
    '0.250'
    """
    if matrix.ndim == 3:
        return max(map(rounding_error, matrix, _of_experts(update), merged))
    a = update.a.to(matrix.device)
    unit, unit32 = torch.finfo(matrix.dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    worst = torch.zeros((), dtype=torch.float64, device=matrix.device)
    for rows in _blocks(matrix):
        b = update.b[rows].to(matrix.device)
        exact = matrix[rows].double()
        for part in parts or (update,):
            factors = (part.b[rows].to(matrix.device).double(), part.a.to(matrix.device).double())
            exact = torch.addmm(exact, *factors, alpha=part.scaling)
        # This is only a bound, so float32 is exact enough.
        terms = torch.mm(b.float().abs(), a.float().abs()).mul_(abs(update.scaling) * (len(a) + 2))
        roundings = 2
        if update.magnitude is not None:
            lengths = _lengths(update, rows, exact, matrix.dtype)
            exact, terms, roundings = exact * lengths, terms * lengths.abs().float(), 5
        size = exact.abs()
        bound = (terms.double() + size).mul_(roundings * unit32).add_(size, alpha=unit)
        bound += torch.finfo(matrix.dtype).tiny
        worst = torch.maximum(worst, (merged[rows].to(matrix.device).double() - exact).abs_().div_(bound).max())
    return float(worst)


def _of_experts(update: Update) -> Iterator[Update]:
    return (Update(a, b, update.scaling) for a, b in zip(update.a, update.b, strict=True))


def _blocks(matrix: torch.Tensor) -> Iterator[slice]:
    step = max(1, BLOCK_BYTES // (8 * matrix.shape[1]))
    return (slice(start, start + step) for start in range(0, len(matrix), step))


def _lengths(update: Update, rows: slice, summed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the factors that DoRA multiplies each row of the sum by, (rows, 1), float64; PEFT rounds the norm to the
    weight's dtype."""
    assert update.magnitude is not None
    norm = torch.linalg.vector_norm(summed.double(), dim=1, keepdim=True)
    lengths: torch.Tensor = update.magnitude[rows, None].to(summed.device).double()
    return lengths.div(norm.to(dtype).double())
