"""The processes of a run: their ranks, the process group, and collectives over Python values (barrier, all-reduce)."""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from surefit.core import env
from surefit.core.errors import LostProcess, SureFitError

T = TypeVar("T")
PATIENCE = datetime.timedelta(days=30)
"""Time limit of collectives in which the others wait for work of unknown length in the first process: reading and
tokenizing data, or a pause until the disk has space. If it dies, they notice at once: its connection is closed.
"""
LOST = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "timed out",
    "Connection refused", "failed to connect", "recvValue failed", "sendBytes failed",
    "failed to pass monitoredBarrier",
)  # fmt: skip
"""Parts of the plain RuntimeErrors that gloo and torch's key-value store raise if another process is lost or too
late.
"""
MISSING = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")
PLACE = re.compile(r"\[\S*\.cc:\d+\] |(?<=\.) This is typically caused.*")
"""Parts of a gloo message that help its developers, but not a user."""
_long_timeout_groups: list[dist.ProcessGroup] = []
"""The group of all processes, over gloo, with the time limit `PATIENCE`; filled inside `process_group`."""
_limits: list[datetime.timedelta] = []
"""Time limit of all other collectives; filled inside `process_group`."""


@dataclass(frozen=True)
class World:
    """All processes of a run, seen from one of them.

    Attributes:
        rank: this process's rank, from 0. size: the number of processes.
        local_rank, local_size: the same on this machine; the device has the local rank's number.
        nodes: the number of machines.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def nodes(self) -> int:
        return -(-self.size // self.local_size)

    @property
    def is_first(self) -> bool:
        """Return whether this is the one process that prints and writes."""
        return self.rank == 0

    @classmethod
    def current(cls) -> World:
        """Return the world from the environment of torchrun, accelerate launch or srun; one process without a
        launcher.
        """
        return cls(*env.distributed_env())


def communication_device(world: World) -> torch.device:
    """Return the device over which this process exchanges tensors with the others."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", world.local_rank)
    return torch.device("cpu")


@contextmanager
def process_group(world: World, timeout_minutes: float, on_gpu: bool | None = None) -> Iterator[None]:
    """Join the process group inside the context: over NCCL between GPUs, over gloo between CPUs.

    Args:
        timeout_minutes: time limit for waiting on other processes.
        on_gpu: whether each process drives a GPU of its own; by default whether torch finds one.

    Raises:
        LostProcess: another process is lost, or was too late.
    """
    if world.size == 1:
        yield
        return
    backend = "nccl" if (torch.cuda.is_available() if on_gpu is None else on_gpu) else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(world.local_rank)
    limit = datetime.timedelta(minutes=timeout_minutes)
    with _translate_lost_process_errors(timeout_minutes):
        dist.init_process_group(backend, timeout=limit, world_size=world.size, rank=world.rank)
        _long_timeout_groups.append(dist.new_group(backend="gloo", timeout=PATIENCE))
        _limits.append(limit)
        try:
            yield
        finally:
            _long_timeout_groups.clear()
            _limits.clear()
            # After an error others may wait in a collective that this process never enters: NCCL would wait for them.
            if backend == "gloo" or sys.exception() is None:
                dist.destroy_process_group()


@contextmanager
def _translate_lost_process_errors(timeout_minutes: float) -> Iterator[None]:
    """Turn library errors about lost processes into a LostProcess."""
    try:
        yield
    except SureFitError:
        raise
    except Exception as error:
        if not is_lost_process_error(error):
            raise
        raise LostProcess(
            _what_is_lost(env.first_line(error)),
            code="E5082",
            field="parallel.timeout_minutes",
            help="see the first process that failed; if none did, one took longer than "
            f"{timeout_minutes:g} minutes. --resume continues from the last checkpoint",
        ) from error


def _what_is_lost(said: str) -> str:
    missing = MISSING.search(said)
    if missing:
        return f"rank {missing[1].replace(', ', ' and ')} has not reached the barrier"
    return f"the connection to the other processes is lost: {PLACE.sub('', said)}"


def is_lost_process_error(error: BaseException) -> bool:
    """Return whether an error means that another process is lost."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in LOST)


def all_reduce_sum(value: float, world: World, group: dist.ProcessGroup | None = None) -> float:
    """Return the sum of a number over the processes of a group (default all), exact for whole numbers below 2**53."""
    if world.size == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=communication_device(world))
    dist.all_reduce(total, group=group)
    return float(total)


def sum_over_processes(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the sum of a tensor over the processes of a group (default all)."""
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total


def all_reduce_any(flag: bool, world: World) -> bool:
    """Return whether the flag is true in any process."""
    return all_reduce_sum(float(flag), world) > 0


def all_gather(value: T, world: World) -> list[T]:
    """Return each process's value, by rank."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value, group=_long_timeout_groups[0])
    return values


def broadcast_from_rank0(value: T | None, world: World) -> T:
    """Return the first process's value, however long it takes; the others pass None."""
    if world.size == 1:
        return value  # type: ignore[return-value]
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_long_timeout_groups[0])
    return values[0]  # type: ignore[return-value]


def run_on_rank0(world: World, call: Callable[[], T]) -> T:
    """Run a function in the first process, and return its result in every process.

    If it fails, only the first process raises: the others lose the connection, and report nothing of their own.
    """
    return broadcast_from_rank0(call() if world.is_first else None, world)


def barrier_with_timeout(world: World) -> None:
    """Wait until every process arrives, within the time limit of other collectives.

    It comes before a wait of unknown length, so that the others notice a process that hangs.
    """
    if world.size > 1:
        dist.monitored_barrier(group=_long_timeout_groups[0], timeout=_limits[0], wait_all_ranks=True)


def barrier(world: World) -> None:
    """Wait until every process arrives, however long it takes."""
    if world.size > 1:
        dist.barrier(group=_long_timeout_groups[0])
