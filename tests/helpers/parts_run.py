"""Processes that train all weights under FSDP and write checkpoints in parts.

`parts_run.py BASE OUT RESULT` does every scenario, in forks of one process: an import costs far more than a run. What
comes out goes into RESULT as JSON. The same rows, steps and settings everywhere (tests/helpers/tiny_run.py), so that
all can be compared. `parts_run.py memory WIDTH` prints what a checkpoint takes of the host's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import sharing
import tiny_run
import torch

from surefit.checkpoint import manager
from surefit.checkpoint.files import list_steps
from surefit.checkpoint.snapshot import Snapshot, build_checkpoint_state
from surefit.config.schema import TrainSection
from surefit.core.errors import Interrupted, MachineError, SureFitError
from surefit.parallel.engine import build_engine
from surefit.parallel.fsdp import FullySharded
from surefit.parallel.process_group import World, all_gather, barrier, process_group, run_on_rank0
from surefit.train.loop import Trainer
from surefit.train.optim import make_optimizer
from surefit.train.resuming import parameters_for_state

STEPS, EVERY = 8, 4
SHAPE = {"intermediate_size": 45}
"""Rows that neither two nor four processes can share evenly."""


def settings(base: Path, out: Path, mode: str = "fsdp", dtype: str = "float32", **parallel: Any) -> Any:
    made = sharing.settings(base, out, mode, kind="full", dtype=dtype, max_steps=STEPS, every=EVERY)
    return made.model_copy(update={"parallel": made.parallel.model_copy(update=parallel)})


def train(made: Any, world: World | None, stop_after: int | None = None, **callbacks: Any) -> Trainer:
    """As one of the processes of `world`, or alone."""

    def stop(progress: Any) -> None:
        if progress.step == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    engine = {"engine": build_engine(made.parallel, world)} if world else {}
    job = tiny_run.training(made, **({"on_progress": stop} | callbacks | engine))
    resume = bool(list_steps(Path(made.output_dir) / "checkpoints"))
    try:
        job.fit(resume)
    except Interrupted:
        assert stop_after is not None
    return job


def half_way(straight: Path, out: Path) -> Path:
    """A run as it was after its first checkpoint."""
    shutil.copytree(straight, out)
    for path in (out / f"checkpoints/step-{STEPS}", out / "model"):
        shutil.rmtree(path)
    return out


def two(base: Path, out: Path, world: World) -> dict[str, Any]:
    """Straight runs; each resumed in its own mode, in others, and by way of a single process."""
    for dtype in ("float32", "bfloat16"):
        made = settings(base, out / dtype, dtype=dtype)
        job = train(made, world)
        if world.is_first:
            half_way(out / dtype, out / f"{dtype}-again")
        barrier(world)
        train(settings(base, out / f"{dtype}-again", dtype=dtype), world)
    weights = job.engine.whole(job.optimizer.parameters)
    if world.is_first:
        saved = manager.load_checkpoint(out / f"bfloat16/checkpoints/step-{STEPS}").weights
        same = saved.keys() == weights.keys() and all(torch.equal(saved[name], weights[name]) for name in weights)
        for name in ("alone", "ddp"):
            half_way(out / "float32", out / name)
        train(settings(base, out / "alone", "single"), None, stop_after=STEPS - 2)
        whole = (out / f"alone/checkpoints/step-{STEPS - 2}/weights.safetensors").exists()
    barrier(world)
    train(settings(base, out / "alone"), world)
    train(settings(base, out / "ddp", "ddp"), world)
    return {"saved_is_trained": same, "alone_wrote_it_whole": whole} if world.is_first else {}


def four(base: Path, out: Path, world: World) -> dict[str, Any]:
    """Resume what two have written; and two groups that hold the same shards."""
    train(settings(base, out / "four"), world)
    return {
        "replicas": {str(replicas): _replicas(out / f"replicas-{replicas}", world, replicas) for replicas in (2, 4)}
    }


def _replicas(out: Path, world: World, replicas: int) -> dict[str, Any]:
    """Each process writes its part of what several have; read back, it is what all together have."""
    engine = FullySharded(world, replicas)
    model = engine.wrap(tiny_run.llama(**SHAPE))
    optimizer = engine.optimizer(model, partial(make_optimizer, train=TrainSection()))
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.learning_rate = 0.01
    optimizer.step()
    state = build_checkpoint_state(engine, optimizer.parameters, optimizer.tensors(), {}, adapter=False)
    read = manager.load_checkpoint(_written(out, state, world))
    equal = True
    for ours, theirs in ((optimizer.parameters, read.weights), (optimizer.tensors(), read.optimizer)):
        whole = engine.whole(ours)
        if world.is_first:
            equal = equal and whole.keys() == theirs.keys()
            equal = equal and all(torch.equal(whole[name], theirs[name]) for name in whole)
    numbers = sum(tensor.numel() for tensor in (*state.weights.values(), *state.optimizer.values()))
    return {"equal": equal, "numbers": all_gather(numbers, world)}


def _written(out: Path, state: manager.CheckpointState, world: World) -> Path:
    place = run_on_rank0(world, lambda: manager.begin_sharded_checkpoint(out, 1))
    manager.write_part(place, state)
    barrier(world)
    return run_on_rank0(world, lambda: manager.commit_sharded_checkpoint(place, 1, state))


def memory(width: int, out: Path, world: World) -> dict[str, Any]:
    """By how much the RAM of each process grows while it takes and writes a checkpoint, in parts and whole; in MiB."""
    engine = FullySharded(world)
    model = engine.wrap(tiny_run.llama(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4))
    optimizer = engine.optimizer(model, partial(make_optimizer, train=TrainSection()))
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    parts = optimizer.parameters, optimizer.tensors()
    found: dict[str, Any] = {"checkpoint": sum(t.nbytes for part in parts for t in part.values()) / 2**20}
    with growth(world, found, "in parts"):
        path = _written(out, Snapshot().take(build_checkpoint_state(engine, *parts, {}, adapter=False)), world)
    with growth(world, found, "read"):
        state = manager.load_checkpoint(path)
        weights = engine.shares(state.weights, optimizer.parameters)
        manager.restore_weights(manager.CheckpointState(weights, {}, {}), optimizer.parameters, path)
        optimizer.load_tensors(
            engine.shares(state.optimizer, parameters_for_state(state.optimizer, optimizer.parameters))
        )
    del state, weights
    with growth(world, found, "whole"):
        state = build_checkpoint_state(engine, *parts, {}, adapter=True)
        if world.is_first:
            manager.save_checkpoint(out, 2, Snapshot().take(state))
    return found


@contextlib.contextmanager
def growth(world: World, found: dict[str, Any], name: str) -> Iterator[None]:
    """How far the resident memory of each process was, at its most, above what it is at the beginning; by rank."""

    def status(key: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024

    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    yield
    found[name] = all_gather(round(status("VmHWM") - before, 1), world)


def faulty(base: Path, out: Path, world: World) -> dict[str, Any]:
    """The last process cannot write its part of the first checkpoint."""
    calls: list[int] = []

    def write_part(place: Path, state: manager.CheckpointState, real: Any = manager.write_part) -> None:
        calls.append(1)
        if len(calls) == 2:  # the first is that of the dry pass
            raise MachineError("cannot write: Permission denied", path=place)
        real(place, state)

    if world.rank == world.size - 1:
        manager.write_part = write_part
    train(settings(base, out / "faulty"), world)
    return {}


def in_processes(count: int, scenario: Callable[[World], dict[str, Any]], result: Path) -> list[int]:
    """What so many processes have exited with; each is a fork of this one, which must have no threads. The first writes
    down what it has found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    numbers = []
    for rank in range(count):
        number = os.fork()
        if number == 0:
            torch.set_num_threads(1)
            place = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ |= {key: str(value) for key, value in place.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
            try:
                world = World(rank, count, rank, count)
                with process_group(world, 2.0):
                    found = scenario(world)
                    if world.is_first:
                        result.write_text(json.dumps(found))
                    barrier(world)
            except SureFitError as error:
                os._exit(error.exit_code)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        numbers.append(number)
    return [os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in numbers]


def found_by(count: int, scenario: Callable[[World], dict[str, Any]], result: Path) -> dict[str, Any]:
    codes = in_processes(count, scenario, result)
    assert codes == [0] * count, codes
    return json.loads(result.read_text())


def main(base: Path, out: Path, result: Path) -> None:
    found = found_by(2, partial(two, base, out), result)
    half_way(out / "float32", out / "four")
    found |= found_by(4, partial(four, base, out), result)
    found["faulty"] = in_processes(2, partial(faulty, base, out), result)
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "memory":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            print(json.dumps(found_by(2, partial(memory, int(sys.argv[2]), path), path / "found.json"), indent=2))
    else:
        main(*map(Path, sys.argv[1:]))
