"""Fully sharded data parallelism: shards of weights, gradients and optimizer state, by torch's `fully_shard` (FSDP2).

A decoder layer's weights are gathered for its forward and backward pass, and freed afterwards; embeddings, last norm
and head once for each micro batch. Each process reads its own part of the global batch.

The head's weight is read outside of the model's own forward pass, for every chunk of the loss (train/loss.py). So the
outermost module's forward pass is the whole loss, as under DDP: that weight is gathered while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from surefit.core.errors import ModelError
from surefit.model.compile import decoder_layers
from surefit.parallel.ddp import LossModule
from surefit.parallel.engine import Batch, BatchFunction, Engine, LossFunction, NormFunction
from surefit.parallel.process_group import World, communication_device
from surefit.parallel.shard_ranges import FlatRange, LazyTensors, read_flat_range, read_shape


class FullySharded(Engine):
    """Engine that shards weights, gradients and optimizer state.

    Args:
        world: all processes, joined.
        replicas: number of groups that each hold a whole sharded model; a divisor of the processes. Only gradients are
            exchanged between groups.
        offload: whether the shards are in host memory, and the optimizer runs there.
    """

    name = "fsdp"

    def __init__(self, world: World, replicas: int = 1, offload: bool = False) -> None:
        super().__init__(world)
        self.data_rank, self.data_size = world.rank, world.size
        self.device, self.offload = communication_device(world), offload
        sizes, names = (replicas, world.size // replicas), ("replicate", "shard")
        if replicas == 1:
            self.mesh = init_device_mesh(self.device.type, sizes[1:], mesh_dim_names=names[1:])
        else:
            self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        self.shard_group = self.mesh.get_group("shard")
        self.root: Any = None

    def loading_device(self, kind: str) -> str:
        """Return "cpu": `fully_shard` moves one layer at a time to the device, and keeps this process's part of it."""
        return "cpu"

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard the model in place, each decoder layer separately, and return it.

        Raises:
            ModelError: it has no decoder layers in transformers' form.
        """
        layers = decoder_layers(model)
        if not layers:
            raise ModelError(
                f"{type(model).__name__} has no decoder layers to shard one by one",
                code="E5081",
                field="parallel.mode",
                help="set parallel.mode: ddp",
            )
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        root = LossModule(model)
        options: dict[str, Any] = {
            "mesh": self.mesh,
            # Weights are used in their own type; 16-bit gradients are summed in float32.
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy() if self.offload and self.device.type == "cuda" else OffloadPolicy(),
        }
        for layer in layers:
            fully_shard(layer, reshard_after_forward=True, **options)
        self.root = fully_shard(root, reshard_after_forward=False, **options)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                # Sum the processes' gradients instead of averaging them.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._require_shards(model, layers, shapes)
        return model

    def _require_shards(
        self, model: torch.nn.Module, layers: Iterable[torch.nn.Module], shapes: Mapping[str, torch.Size]
    ) -> None:
        """Assert that the model is sharded: otherwise it would train just as well, with the memory of a whole model."""
        assert isinstance(self.root, FSDPModule)
        assert all(isinstance(layer, FSDPModule) for layer in layers)
        size = dist.get_world_size(self.shard_group)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor), f"{name} is not sharded"
            assert parameter.shape == shapes[name], name
            assert parameter.to_local().shape[0] <= -(-shapes[name][0] // size), f"{name} is whole in each process"

    def loss(self, model: torch.nn.Module, batch: Batch, loss_of: LossFunction) -> torch.Tensor:
        loss: torch.Tensor = self.root(batch, loss_of)
        return loss

    def evaluate(self, model: torch.nn.Module, batch: Batch, function: BatchFunction, size: int) -> torch.Tensor:
        values: torch.Tensor = self.root(batch, function).flatten()
        self.root.reshard()  # after a backward pass FSDP does this by itself
        return values

    def total_loss(self, loss: torch.Tensor) -> torch.Tensor:
        total = loss.to(self.device, copy=True)
        dist.all_reduce(total)
        return total

    def gradient_norm(self, parameters: Iterable[torch.nn.Parameter], norm: NormFunction) -> torch.Tensor:
        """Return the gradient norm: each process's norm of its shards, squared and summed over the shard group."""
        square = norm(_own_gradients(parameters)).to(self.device) ** 2  # type: ignore[arg-type]
        dist.all_reduce(square, group=self.shard_group)
        return square.sqrt()

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gather one tensor after the other, so that a device holds only one whole; the first process keeps them in
        RAM.
        """
        gathered: dict[str, torch.Tensor] = {}
        names: dict[int, str] = {}
        for name, tensor in tensors.items():
            if id(tensor) in names:  # a head tied to the embedding
                if self.world.is_first:
                    gathered[name] = gathered[names[id(tensor)]]
                continue
            names[id(tensor)] = name
            local = tensor.detach()
            full = _gather(local, self.device) if isinstance(local, DTensor) else local
            if self.world.is_first:
                gathered[name] = full
        return gathered

    def held(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, FlatRange] | None:
        """Return this process's rows, or with replicas an equal part of the rows that all of them hold. Unsharded
        tensors, the optimizer's step counts, are the first process's.
        """
        if self.mesh.size() != self.world.size:
            return None
        ranges: dict[str, FlatRange] = {}
        for name, tensor in tensors.items():
            local = tensor.detach()
            if isinstance(local, DTensor):
                ranges[name] = _flat(local)
            elif self.world.is_first:
                ranges[name] = FlatRange(local.reshape(-1), 0, tuple(local.shape))
        return ranges

    def shares(
        self, tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        return LazyTensors(tensors, lambda name: _local_shard(tensors, name, like.get(name)))


def _gather(shard: DTensor, device: torch.device) -> torch.Tensor:
    """Return the whole tensor on the CPU. Every process must call it; an offloaded shard is sent over the device."""
    on_device: Any = shard.to(device)
    full: torch.Tensor = on_device.full_tensor().cpu()
    return full


def _own_gradients(parameters: Iterable[torch.nn.Parameter]) -> Iterator[SimpleNamespace]:
    """Yield objects with this process's local gradients, in place of parameters."""
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            yield SimpleNamespace(grad=parameter.grad.to_local())


def _rows(tensor: DTensor) -> tuple[int, int, int]:
    """Return (first row, row count, elements per row) of the rows of a sharded tensor in this process."""
    dimension = next(number for number, placement in enumerate(tensor.placements) if placement.is_shard(0))
    rows, width = tensor.shape[0], math.prod(tensor.shape[1:])
    rows_per_rank = -(-rows // tensor.device_mesh.size(dimension))
    first = min(rows, rows_per_rank * tensor.device_mesh.get_local_rank(dimension))
    return first, min(rows_per_rank, rows - first), width


def _flat(tensor: DTensor) -> FlatRange:
    """Return the range of a sharded tensor that this process writes."""
    first, count, width = _rows(tensor)
    local = tensor.to_local().reshape(-1)
    assert local.numel() == count * width, tensor.shape
    mesh = tensor.device_mesh
    number, copies = 0, 1
    for dimension, placement in enumerate(tensor.placements):
        if not placement.is_shard():
            number = number * mesh.size(dimension) + mesh.get_local_rank(dimension)
            copies *= mesh.size(dimension)
    part_size = -(-local.numel() // copies)
    start = min(local.numel(), part_size * number)
    return FlatRange(local[start : start + part_size], first * width + start, tuple(tensor.shape))


def _local_shard(tensors: Mapping[str, torch.Tensor], name: str, like: torch.Tensor | None) -> torch.Tensor:
    """Return this process's part of a tensor, or the tensor itself where `like` is not a shard of the same shape."""
    if not isinstance(like, DTensor) or read_shape(tensors, name) != like.shape:
        return tensors[name]
    # Every process reads the same files: no communication is needed.
    first, count, width = _rows(like)
    part = read_flat_range(tensors, name, first * width, count * width).view(count, *like.shape[1:])
    return DTensor.from_local(
        part.to(like.device), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
