"""Data parallelism with a whole model in each process: torch's DistributedDataParallel.

DDP hooks into the forward pass of the module that it wraps. Our loss does more than that pass: it runs the head once
more for every chunk (train/loss.py). So DDP wraps a module whose forward pass is the whole loss. The model inside stays
as it is, including its names: optimizer, checkpoints and export do not see DDP.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from surefit.model import compat
from surefit.parallel.engine import Batch, Engine, LossFunction
from surefit.parallel.process_group import World, sum_over_processes


class LossModule(torch.nn.Module):
    """A module whose forward pass is a model's loss, so that its wrapper sees every use of a weight."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, loss_of: LossFunction) -> torch.Tensor:
        return loss_of(self.model, batch)


class DataParallel(Engine):
    """Engine with a whole model per process; gradients are summed over all processes in the last backward pass."""

    name = "ddp"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.data_rank, self.data_size = world.rank, world.size
        self.ddp: DistributedDataParallel | None = None

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap the model in DDP, and return it as it was.

        Experts that no token of a micro batch was routed to get no gradient; only then must DDP look for unused
        parameters.
        """
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.ddp = DistributedDataParallel(
            LossModule(model),
            **compat.ddp_buffer_kwargs(),  # buffers do not change in training
            init_sync=False,  # all have read the same files and use the same seed; gloo cannot send float8
            gradient_as_bucket_view=True,
            find_unused_parameters=any(".experts." in name for name in trained),
        )
        self.ddp.register_comm_hook(None, _sum)
        assert type(self.ddp) is DistributedDataParallel
        assert dist.get_world_size() == self.world.size
        return model

    def accumulating(self, model: torch.nn.Module, last: bool) -> AbstractContextManager[None]:
        assert self.ddp is not None, "wrap comes first"
        return nullcontext() if last else self.ddp.no_sync()

    def loss(self, model: torch.nn.Module, batch: Batch, loss_of: LossFunction) -> torch.Tensor:
        assert self.ddp is not None, "wrap comes first"
        loss: torch.Tensor = self.ddp(batch, loss_of)
        return loss

    def total_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return sum_over_processes(loss)


# The signature is compared with types, not their names: this file has no `from __future__ import annotations`.
def _sum(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Sum gradients over processes; DDP's own hook takes the mean, and scaling the loss by the number of processes
    rounds.
    """
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]
