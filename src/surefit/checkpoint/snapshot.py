"""Copies of checkpoint tensors in host memory, so that training continues while they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from surefit.checkpoint.manager import CheckpointState
from surefit.checkpoint.shards import build_checkpoint_shard, shard_values
from surefit.core.units import GIB
from surefit.parallel.engine import Engine

PINNED_BYTES = 16 * GIB
"""Largest checkpoint that is copied from a GPU into page-locked memory: faster, but no other process can use that
memory.
"""


def build_checkpoint_state(
    engine: Engine,
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    trainer: Mapping[str, Any],
    adapter: bool,
) -> CheckpointState:
    """Collect the tensors of a checkpoint, not copied yet; every process must call it.

    Where each process holds a shard of everything, the state is this process's part. An adapter is small: it is
    gathered, and only the first process's state is used, as with engines that do not shard.
    """
    weight_ranges = None if adapter else engine.held(weights)
    state_ranges = None if weight_ranges is None else engine.held(optimizer)
    if weight_ranges is None or state_ranges is None:
        return CheckpointState(engine.whole(weights), engine.whole(optimizer), trainer)
    part = build_checkpoint_shard(engine.world.rank, engine.world.size, weight_ranges, state_ranges)
    return CheckpointState(shard_values(weight_ranges), shard_values(state_ranges), trainer, part)


class Snapshot:
    """Host buffers that each checkpoint is copied into, allocated by the first and reused.

    They occupy the bytes of one checkpoint, or of this process's part of one, in host memory for the whole run. The
    returned state must be written before the next `take`.

    Args:
        processes: number of processes on this machine that make snapshots.
    """

    def __init__(self, processes: int = 1) -> None:
        self._pinned = PINNED_BYTES // processes
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, state: CheckpointState) -> CheckpointState:
        """Copy all tensors; when this returns, the copies no longer change with the model."""
        tensors = [*state.weights.values(), *state.optimizer.values()]
        pin = any(tensor.is_cuda for tensor in tensors) and sum(tensor.nbytes for tensor in tensors) <= self._pinned
        weights, optimizer = (
            {name: self._copy(f"{kind}.{name}", tensor, pin) for name, tensor in part.items()}
            for kind, part in (("weights", state.weights), ("optimizer", state.optimizer))
        )
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        self._forget_others(weights, optimizer)
        return replace(state, weights=weights, optimizer=optimizer)

    @torch.no_grad()
    def _copy(self, key: str, tensor: torch.Tensor, pin: bool) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin and tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)

    def _forget_others(self, weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]) -> None:
        current = {f"weights.{name}" for name in weights} | {f"optimizer.{name}" for name in optimizer}
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in current}
