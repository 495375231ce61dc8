"""The processes of a run: how many, which one this is, and what they tell each other."""

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
"""How long the others wait for the first process where it does what nobody can foresee the length of: reading and
tokenising data, or a pause until the disk has room. That it has died they notice at once: its connection is closed."""
LOST = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "timed out",
    "Connection refused", "failed to connect", "recvValue failed", "sendBytes failed",
    "failed to pass monitoredBarrier",
)  # fmt: skip
"""What gloo and torch's key-value store say, in plain RuntimeErrors, where another process is gone or too late."""
MISSING = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")
PLACE = re.compile(r"\[\S*\.cc:\d+\] |(?<=\.) This is typically caused.*")
"""Of a message of gloo, what tells its authors something, and a user nothing."""
_long_timeout_groups: list[dist.ProcessGroup] = []
"""The group of all processes, over gloo, that waits as long as `PATIENCE`; there while `process_group`."""
_limits: list[datetime.timedelta] = []
"""How long all other exchanges wait; there while `process_group`."""


@dataclass(frozen=True)
class World:
    """All processes of a run, seen from one of them.

    Attributes:
        rank: of this process, from 0; size: how many there are.
        local_rank, local_size: the same on this machine; the device has the local rank's number.
        nodes: machines.
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
        """Whether this is the one process that prints and writes."""
        return self.rank == 0

    @classmethod
    def current(cls) -> World:
        """What torchrun, accelerate launch or srun say in the environment; one process where none does."""
        return cls(*env.distributed_env())


def communication_device(world: World) -> torch.device:
    """The device over which this process exchanges tensors with the others."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", world.local_rank)
    return torch.device("cpu")


@contextmanager
def process_group(world: World, timeout_minutes: float, on_gpu: bool | None = None) -> Iterator[None]:
    """Be connected to the other processes: over NCCL between GPUs, over gloo between CPUs.

    Args:
        timeout_minutes: how long a process waits for the others before it fails.
        on_gpu: whether each process drives a GPU of its own; as torch finds them if not said.

    Raises:
        LostProcess: another process is gone, or was too late.
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
    """Turn what the libraries say about processes that are gone into an error of ours."""
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
            help="the process that failed first says why; if none did, one took longer than "
            f"{timeout_minutes:g} minutes. --resume continues from the last checkpoint",
        ) from error


def _what_is_lost(said: str) -> str:
    missing = MISSING.search(said)
    if missing:
        return f"rank {missing[1].replace(', ', ' and ')} has not come to where all processes meet"
    return f"the connection to the other processes is lost: {PLACE.sub('', said)}"


def is_lost_process_error(error: BaseException) -> bool:
    """Whether an error says that another process is gone."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in LOST)


def all_reduce_sum(value: float, world: World, group: dist.ProcessGroup | None = None) -> float:
    """The sum of a number over the processes of a group (all of them), exact for whole numbers below 2**53."""
    if world.size == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=communication_device(world))
    dist.all_reduce(total, group=group)
    return float(total)


def all_reduce_any(flag: bool, world: World) -> bool:
    """Whether it is true in any process."""
    return all_reduce_sum(float(flag), world) > 0


def all_gather(value: T, world: World) -> list[T]:
    """What each process has, by rank."""
    if world.size == 1:
        return [value]
    held: list[Any] = [None] * world.size
    dist.all_gather_object(held, value, group=_long_timeout_groups[0])
    return held


def broadcast_from_rank0(value: T | None, world: World) -> T:
    """What the first process has, however long it takes; the others pass None."""
    if world.size == 1:
        return value  # type: ignore[return-value]
    held = [value]
    dist.broadcast_object_list(held, src=0, group=_long_timeout_groups[0])
    return held[0]  # type: ignore[return-value]


def run_on_rank0(world: World, call: Callable[[], T]) -> T:
    """Let the first process do something, and give every process what it returned.

    Where it fails, the first process alone raises: the others lose it, and say nothing of their own.
    """
    return broadcast_from_rank0(call() if world.is_first else None, world)


def barrier_with_timeout(world: World) -> None:
    """Wait until every process is here, no longer than for any other exchange.

    It comes before a wait of unknown length, so that the others notice a process that hangs.
    """
    if world.size > 1:
        dist.monitored_barrier(group=_long_timeout_groups[0], timeout=_limits[0], wait_all_ranks=True)


def barrier(world: World) -> None:
    """Wait until every process is here, however long it takes."""
    if world.size > 1:
        dist.barrier(group=_long_timeout_groups[0])
