"""Interface of the engines, which carry out one optimizer step in all processes of a run.

`train/step.py` defines a step; an engine defines how its computation and communication are distributed. Under any
engine, the loss and the gradients equal a single process's with the whole global batch.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from surefit.config.modes import MODES, ZERO
from surefit.config.schema import ParallelSection
from surefit.parallel.process_group import World, all_reduce_sum
from surefit.parallel.shard_ranges import FlatRange

Batch = Mapping[str, Any]
BatchFunction = Callable[[torch.nn.Module, Batch], torch.Tensor]
"""Function that computes something of a micro batch with the model."""
LossFunction = BatchFunction
"""Function that returns the summed cross-entropy of a micro batch, 0-d float32: `train.loss.loss_sum`."""
NormFunction = Callable[[Iterable[torch.nn.Parameter]], torch.Tensor]


class Engine:
    """The engine of a single process, and the interface that the other engines override.

    Attributes:
        name: the value of `parallel.mode`.
        world: all processes.
        data_rank, data_size: index and number of the part of the global batch that this process reads. Processes that
            share matrices, layers or the tokens of an example read the same part.
        data_group: processes that read the other parts, with this one; None for all processes.
        gradient_factor: factor of the loss before the backward pass; the number of processes where an engine averages
            gradients instead of summing them.
    """

    name = "single"

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        self.data_rank, self.data_size = 0, 1
        self.data_group: dist.ProcessGroup | None = None
        self.gradient_factor = 1.0

    def loading_device(self, kind: str) -> str:
        """Return the device type to load a model on before `wrap`: this process's, or "cpu" where a device may be too
        small for the whole model.
        """
        return kind

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model to train, after model/prepare.py, in place if possible; assert that it was wrapped as
        intended.
        """
        return model

    def accumulating(self, model: torch.nn.Module, last: bool) -> AbstractContextManager[None]:
        """Return a context for the forward and backward pass of each micro batch; after the `last` one gradients are
        exchanged.
        """
        return contextlib.nullcontext()

    def run(
        self,
        model: torch.nn.Module,
        micro_batches: Sequence[Batch],
        loss_of: LossFunction,
        supervised: int,
        scale: float,
    ) -> torch.Tensor:
        """Run forward and backward over this process's micro batches.

        Args:
            supervised: supervised tokens of the whole global batch, the divisor of the loss.
            scale: further factor of the loss before the backward pass (float16's loss scale), besides
                `gradient_factor`.

        Returns:
            This process's share of the mean loss, 0-d float32, detached.
        """
        parts = []
        factor = scale * self.gradient_factor
        for number, batch in enumerate(micro_batches, start=1):
            with self.accumulating(model, last=number == len(micro_batches)):
                part = self.loss(model, batch, loss_of) / supervised
                (part if factor == 1.0 else part * factor).backward()  # type: ignore[no-untyped-call]
            parts.append(part.detach())
        return sum(parts[1:], parts[0])

    def loss(self, model: torch.nn.Module, batch: Batch, loss_of: LossFunction) -> torch.Tensor:
        """Return the summed loss of one micro batch, through the module that the backward pass needs."""
        return loss_of(model, batch)

    def optimizer(self, model: torch.nn.Module, make: Callable[..., Any]) -> Any:
        """Return the optimizer over the trained parameters, without an update; can be called again.

        Args:
            make: `train.optim.make_optimizer` with its settings bound; ZeRO calls it with `masters=False`.
        """
        return make(model)

    def measure(self, model: torch.nn.Module, batch: Batch, loss_of: LossFunction) -> float:
        """Return the summed loss of a held-out micro batch; called under `no_grad`."""
        return float(self.evaluate(model, batch, loss_of, 1))

    def evaluate(self, model: torch.nn.Module, batch: Batch, function: BatchFunction, size: int) -> torch.Tensor:
        """Return the numbers that a function computes of a micro batch, flat, in every process that reads the batch;
        called under `no_grad`, by all processes equally often.

        Args:
            function: where processes share the tokens, each call returns a part, and the parts are added up.
            size: how many numbers it returns.
        """
        return function(model, batch).flatten()

    def total(self, value: float) -> float:
        """Return the sum over the data ranks of a number of which each has a part."""
        return all_reduce_sum(value, self.world, self.data_group) if self.data_size > 1 else value

    def total_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss over all processes, from this one's share."""
        return loss

    def gradient_norm(self, parameters: Iterable[torch.nn.Parameter], norm: NormFunction) -> torch.Tensor:
        """Return the 2-norm, 0-d float32, of the whole gradient; equal in every process.

        Args:
            norm: function for the norm of the gradients in one process (`train.optim.gradient_norm`).
        """
        return norm(parameters)

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gather tensors of the model or its optimizer, by name, as a single process would hold them; every process
        must call it. Only the first process's result is used.
        """
        return dict(tensors)

    def held(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, FlatRange] | None:
        """Return the ranges that this process writes into a checkpoint: the ranges of all processes together cover each
        tensor exactly once. None where the first process writes whole tensors.
        """
        return None

    def shares(
        self, tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Reverse `whole`: map each name to this process's part, laid out as in `like`, made or read from a file at
        access. The result is to be copied, not kept.
        """
        return tensors


SINGLE = Engine()

ENGINES: dict[str, tuple[str, Callable[[ParallelSection], tuple[Any, ...]]]] = {
    "ddp": ("ddp:DataParallel", lambda section: ()),
    "fsdp": ("fsdp:FullySharded", lambda section: (section.dp_replicate, section.offload)),
    "fsdp, cp": (
        "sharded_context:ShardedContext",
        lambda section: (section.cp, section.dp_replicate, section.offload),
    ),
    **dict.fromkeys(ZERO, ("zero:Zero", lambda section: (section,))),
    "tp": ("tensor_parallel:TensorParallel", lambda section: (section.tp,)),
    "cp": ("context_parallel:ContextParallel", lambda section: (section.cp,)),
    "pp": ("pipeline_parallel:Pipeline", lambda section: (section.pp,)),
}
"""`parallel.mode`, or two together → the class, imported when it is used, and its arguments besides the world."""


def build_engine(section: ParallelSection, world: World) -> Engine:
    """Make the engine for a resolved `parallel.mode`; the process group must be initialized.

    A single process does not share: only ZeRO has its own engine there, for `parallel.offload`.
    """
    if section.mode == "single" or (world.size == 1 and not MODES[section.mode].deepspeed):
        return Engine(world)
    target, arguments = ENGINES["fsdp, cp" if section.mode == "fsdp" and section.cp > 1 else section.mode]
    module, _, name = target.partition(":")
    engine: Engine = getattr(importlib.import_module(f"surefit.parallel.{module}"), name)(world, *arguments(section))
    return engine
