"""A copy of what a checkpoint holds, in the host's memory, so that training can go on while it is written."""

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
"""Up to here a copy from a GPU lands in page-locked memory: faster, but the system can give it to nobody else."""


def build_checkpoint_state(
    engine: Engine,
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    trainer: Mapping[str, Any],
    adapter: bool,
) -> CheckpointState:
    """What a checkpoint has to hold, not copied yet; every process must call it.

    Where each process has a share of everything, it is this process's part. An adapter is small: it is gathered, and
    only what the first process gets is used, as it is where the engine has no shares.
    """
    held = None if adapter else engine.held(weights)
    states = None if held is None else engine.held(optimizer)
    if held is None or states is None:
        return CheckpointState(engine.whole(weights), engine.whole(optimizer), trainer)
    part = build_checkpoint_shard(engine.world.rank, engine.world.size, held, states)
    return CheckpointState(shard_values(held), shard_values(states), trainer, part)


class Snapshot:
    """Host buffers that each checkpoint is copied into, made by the first and kept for the next.

    They take as many bytes of the host's memory as one checkpoint has, or this process's part of one, for as long as
    the run lasts. Whoever reads the returned state must be done before the next `take`.

    Args:
        processes: those of this machine that take one.
    """

    def __init__(self, processes: int = 1) -> None:
        self._pinned = PINNED_BYTES // processes
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, state: CheckpointState) -> CheckpointState:
        """Copy everything; when this returns, nothing of it changes with the model any more."""
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
        used = {f"weights.{name}" for name in weights} | {f"optimizer.{name}" for name in optimizer}
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in used}
