"""Summing of gradients over processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from surefit.core.units import MIB

BUCKET_BYTES = 64 * MIB
"""Approximate size of the tensors in which gradients are summed."""


@torch.no_grad()
def sum_gradients(parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Sum the gradients of parameters over a group (by default all processes), in place; a missing gradient counts as
    zero.

    The sum is taken in the gradients' own type, a bucket at a time; for sliced tensors, over the processes with the
    same slice.
    """
    if not parameters:
        return
    has_gradient = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    has_gradient = has_gradient.to(parameters[0].device)
    dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=group)
    with_gradient = [parameter for parameter, flag in zip(parameters, has_gradient.tolist(), strict=True) if flag]
    for parameter in with_gradient:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([_local_tensor(parameter.grad) for parameter in with_gradient]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _local_tensor(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor in this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield adjacent gradients of one type, up to `BUCKET_BYTES` together."""
    bucket: list[torch.Tensor] = []
    for gradient in gradients:
        full = sum(tensor.nbytes for tensor in bucket) + gradient.nbytes > BUCKET_BYTES
        if bucket and (full or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
