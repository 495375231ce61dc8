"""How the processes of a run carry out one optimizer step together.

`train/step.py` says what a step is; an engine says who computes which part of it, and what they exchange. Whatever the
engine, the loss and the gradients are those of one process with the whole global batch.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from surefit.config.modes import MODES, ZERO
from surefit.config.schema import ParallelSection
from surefit.parallel.process_group import World, all_reduce_sum
from surefit.parallel.shard_ranges import FlatRange

Batch = Mapping[str, Any]
LossFunction = Callable[[torch.nn.Module, Batch], torch.Tensor]
"""The summed cross-entropy of a micro batch, 0-d float32: `train.loss.loss_sum`."""
NormFunction = Callable[[Iterable[torch.nn.Parameter]], torch.Tensor]


class Engine:
    """One process with everything: what the other engines change, and the interface of all.

    Attributes:
        name: as `parallel.mode` has it.
        world: all processes.
        data_rank, data_size: which part of the global batch this process reads, of how many. Processes that share
            matrices, layers or the tokens of an example read the same part.
        gradient_factor: the loss is multiplied by it before the backward pass; the number of processes where an engine
            takes the mean of gradients in place of the sum.
    """

    name = "single"

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        self.data_rank, self.data_size = 0, 1
        self.gradient_factor = 1.0

    def loading_device(self, kind: str) -> str:
        """Where a model is loaded to, for `wrap` to take it from: the kind of device that this process has, or "cpu"
        where no device may have to hold the whole model."""
        return kind

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model to train, after model/prepare.py and in place where that is possible; asserts what it has made."""
        return model

    def accumulating(self, model: torch.nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward pass of each micro batch; `last` is the one after which gradients are
        exchanged."""
        return contextlib.nullcontext()

    def run(
        self,
        model: torch.nn.Module,
        micro_batches: Sequence[Batch],
        loss_of: LossFunction,
        supervised: int,
        scale: float,
    ) -> torch.Tensor:
        """Forward and backward over this process's micro batches.

        Args:
            supervised: supervised tokens of the whole global batch, which the loss is divided by.
            scale: what the loss is multiplied by before the backward pass, besides `gradient_factor` (float16).

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
        """The summed loss of one micro batch, through whatever module must run for the backward pass to work."""
        return loss_of(model, batch)

    def optimizer(self, model: torch.nn.Module, make: Callable[..., Any]) -> Any:
        """The optimizer over what is trained, without an update; it may be asked for again.

        Args:
            make: `train.optim.make_optimizer`, the settings given; ZeRO calls it with `masters=False`.
        """
        return make(model)

    def measure(self, model: torch.nn.Module, batch: Batch, loss_of: LossFunction) -> float:
        """This process's share of the summed loss of a held-out micro batch; called under `no_grad`."""
        return float(loss_of(model, batch))

    def total(self, value: float) -> float:
        """A number that each data rank has a part of, summed."""
        return all_reduce_sum(value, self.world) if self.data_size > 1 else value

    def total_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of all processes, from this one's share."""
        return loss

    def gradient_norm(self, parameters: Iterable[torch.nn.Parameter], norm: NormFunction) -> torch.Tensor:
        """The 2-norm, 0-d float32, of the whole gradient; equal in every process.

        Args:
            norm: that of the gradients which a process holds (`train.optim.gradient_norm`).
        """
        return norm(parameters)

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of the model or its optimizer, by name, as one process would hold them; every process must call it.
        Only what the first process gets is used."""
        return dict(tensors)

    def held(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, FlatRange] | None:
        """What this process writes of them into a checkpoint: ranges that, those of all processes together, cover each
        tensor exactly once. None where the first process writes them whole."""
        return None

    def shares(
        self, tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """The reverse of `whole`: this process's part of each, laid out as in `like`; made, or read from a file, when
        it is asked for. To be copied, not kept."""
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
"""`parallel.mode`, or two together → the class, imported when it is used, and what it takes besides the world."""


def build_engine(section: ParallelSection, world: World) -> Engine:
    """The engine that `parallel.mode`, decided, asks for; every process is `joined`.

    One process alone has nobody to share with: there only ZeRO is an engine of its own, for `parallel.offload`.
    """
    if section.mode == "single" or (world.size == 1 and not MODES[section.mode].deepspeed):
        return Engine(world)
    place, arguments = ENGINES["fsdp, cp" if section.mode == "fsdp" and section.cp > 1 else section.mode]
    module, _, name = place.partition(":")
    engine: Engine = getattr(importlib.import_module(f"surefit.parallel.{module}"), name)(world, *arguments(section))
    return engine
