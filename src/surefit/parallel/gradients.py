"""Gradients that several processes have a part of each, summed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from surefit.core.units import MIB

BUCKET_BYTES = 64 * MIB
"""Gradients are summed in tensors of about this size."""


@torch.no_grad()
def sum_gradients(parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Sum the gradients of some parameters over a group of processes (all), in place; where one has none, it has zeros.

    The sum is taken in the gradients' own type, a bucket at a time; of a slice, over the processes with the same one.
    """
    if not parameters:
        return
    known = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    known = known.to(parameters[0].device)
    dist.all_reduce(known, dist.ReduceOp.MAX, group=group)
    used = [parameter for parameter, flag in zip(parameters, known.tolist(), strict=True) if flag]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([_local_tensor(parameter.grad) for parameter in used]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _local_tensor(tensor: Any) -> torch.Tensor:
    """What of it is in this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one type, up to `BUCKET_BYTES` together."""
    bucket: list[torch.Tensor] = []
    for gradient in gradients:
        full = sum(held.nbytes for held in bucket) + gradient.nbytes > BUCKET_BYTES
        if bucket and (full or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
