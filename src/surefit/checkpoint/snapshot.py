"""A copy of what a checkpoint holds, in the host's memory, so that training can go on while it is written."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from surefit.checkpoint.manager import State
from surefit.core.units import GIB

PINNED_BYTES = 16 * GIB
"""Up to here a copy from a GPU lands in page-locked memory: faster, but the system can give it to nobody else."""


class Snapshot:
    """Host buffers that each checkpoint is copied into, made by the first and kept for the next.

    They take as many bytes of the host's memory as one checkpoint has, for as long as the run lasts. Whoever reads the
    returned state must be done before the next `take`.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, state: State) -> State:
        """Copy everything; when this returns, nothing of it changes with the model any more."""
        tensors = [*state.weights.values(), *state.optimizer.values()]
        pin = any(tensor.is_cuda for tensor in tensors) and sum(tensor.nbytes for tensor in tensors) <= PINNED_BYTES
        weights, optimizer = (
            {name: self._copy(f"{kind}.{name}", tensor, pin) for name, tensor in part.items()}
            for kind, part in (("weights", state.weights), ("optimizer", state.optimizer))
        )
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        self._forget_others(weights, optimizer)
        return State(weights, optimizer, state.trainer)

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
