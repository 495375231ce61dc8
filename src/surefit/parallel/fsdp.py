"""A share of every weight, gradient and optimizer state in each process: torch's `fully_shard` (FSDP2).

A decoder layer's weights are gathered when it is run, forward and backward, and let go afterwards; embeddings, last
norm and head, once for each micro batch. Each process reads its own part of the global batch.

The head's weight is read outside of the model's own forward pass, for every chunk of the loss (train/loss.py). So the
outermost module is one whose forward pass is the whole loss, as under DDP: while it runs, that weight is there.
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
from surefit.parallel.engine import Batch, Engine, LossFunction, NormFunction
from surefit.parallel.process_group import World, communication_device
from surefit.parallel.shard_ranges import FlatRange, LazyTensors, read_flat_range, read_shape


class FullySharded(Engine):
    """Weights, gradients and optimizer state in shards.

    Args:
        world: all processes, joined.
        replicas: groups that each hold a whole sharded model; a divisor of the processes. Only gradients cross them.
        offload: the shards lie in the host's memory, and the optimizer runs there.
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
        """The host: `fully_shard` moves one layer at a time to the device, and keeps this process's part of it."""
        return "cpu"

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard the model in place, each decoder layer by itself, and return it.

        Raises:
            ModelError: it has no decoder layers of transformers' kind.
        """
        layers = decoder_layers(model)
        if not layers:
            raise ModelError(
                f"{type(model).__name__} has no decoder layers that could be sharded one by one",
                code="E5081",
                field="parallel.mode",
                help="set parallel.mode: ddp",
            )
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        root = LossModule(model)
        options: dict[str, Any] = {
            "mesh": self.mesh,
            # Weights are computed with as they are; 16-bit gradients are added up in float32.
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy() if self.offload and self.device.type == "cuda" else OffloadPolicy(),
        }
        for layer in layers:
            fully_shard(layer, reshard_after_forward=True, **options)
        self.root = fully_shard(root, reshard_after_forward=False, **options)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                # The sum of the processes' gradients, in place of their mean.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._require_shards(model, layers, shapes)
        return model

    def _require_shards(
        self, model: torch.nn.Module, layers: Iterable[torch.nn.Module], shapes: Mapping[str, torch.Size]
    ) -> None:
        """Prove that it is sharded: what only looks so trains just as well, and takes the memory of a whole model."""
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

    def measure(self, model: torch.nn.Module, batch: Batch, loss_of: LossFunction) -> float:
        value = float(self.root(batch, loss_of))
        self.root.reshard()  # after a backward pass it happens by itself
        return value

    def total_loss(self, loss: torch.Tensor) -> torch.Tensor:
        total = loss.to(self.device, copy=True)
        dist.all_reduce(total)
        return total

    def gradient_norm(self, parameters: Iterable[torch.nn.Parameter], norm: NormFunction) -> torch.Tensor:
        """Each process's norm of what it holds, squared and added up over those that together hold all."""
        square = norm(_own_gradients(parameters)).to(self.device) ** 2  # type: ignore[arg-type]
        dist.all_reduce(square, group=self.shard_group)
        return square.sqrt()

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One after the other, so that a device holds only one of them whole; the first process keeps them in RAM."""
        found: dict[str, torch.Tensor] = {}
        names: dict[int, str] = {}
        for name, tensor in tensors.items():
            if id(tensor) in names:  # a head that shares its weight with the embedding
                if self.world.is_first:
                    found[name] = found[names[id(tensor)]]
                continue
            names[id(tensor)] = name
            one = tensor.detach()
            full = _gather(one, self.device) if isinstance(one, DTensor) else one
            if self.world.is_first:
                found[name] = full
        return found

    def held(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, FlatRange] | None:
        """This process's rows, or of replicas an equal part of those that all of them have. What is not sharded, the
        step counts of the optimizer, is the first process's."""
        if self.mesh.size() != self.world.size:
            return None
        found: dict[str, FlatRange] = {}
        for name, tensor in tensors.items():
            one = tensor.detach()
            if isinstance(one, DTensor):
                found[name] = _flat(one)
            elif self.world.is_first:
                found[name] = FlatRange(one.reshape(-1), 0, tuple(one.shape))
        return found

    def shares(
        self, tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        return LazyTensors(tensors, lambda name: _local_shard(tensors, name, like.get(name)))


def _gather(shard: DTensor, device: torch.device) -> torch.Tensor:
    """The whole, on the CPU. Every process must call it; an offloaded shard goes over the device that can send it."""
    moved: Any = shard.to(device)
    whole: torch.Tensor = moved.full_tensor().cpu()
    return whole


def _own_gradients(parameters: Iterable[torch.nn.Parameter]) -> Iterator[SimpleNamespace]:
    """What has the gradients that this process holds, in the place of parameters."""
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            yield SimpleNamespace(grad=parameter.grad.to_local())


def _rows(tensor: DTensor) -> tuple[int, int, int]:
    """(first, count, of a row's numbers) of the rows that this process holds of a sharded tensor."""
    dimension = next(number for number, placement in enumerate(tensor.placements) if placement.is_shard(0))
    rows, width = tensor.shape[0], math.prod(tensor.shape[1:])
    each = -(-rows // tensor.device_mesh.size(dimension))
    first = min(rows, each * tensor.device_mesh.get_local_rank(dimension))
    return first, min(each, rows - first), width


def _flat(tensor: DTensor) -> FlatRange:
    """What this process writes of a sharded tensor."""
    first, count, width = _rows(tensor)
    held = tensor.to_local().reshape(-1)
    assert held.numel() == count * width, tensor.shape
    mesh = tensor.device_mesh
    number, copies = 0, 1
    for dimension, placement in enumerate(tensor.placements):
        if not placement.is_shard():
            number = number * mesh.size(dimension) + mesh.get_local_rank(dimension)
            copies *= mesh.size(dimension)
    part = -(-held.numel() // copies)
    begin = min(held.numel(), part * number)
    return FlatRange(held[begin : begin + part], first * width + begin, tuple(tensor.shape))


def _local_shard(tensors: Mapping[str, torch.Tensor], name: str, like: torch.Tensor | None) -> torch.Tensor:
    """This process's part of a tensor; the tensor where `like` is no shard of one like it."""
    if not isinstance(like, DTensor) or read_shape(tensors, name) != like.shape:
        return tensors[name]
    # Every process reads the same files: nobody need send anything.
    first, count, width = _rows(like)
    part = read_flat_range(tensors, name, first * width, count * width).view(count, *like.shape[1:])
    return DTensor.from_local(
        part.to(like.device), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
