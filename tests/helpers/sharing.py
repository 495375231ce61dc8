"""Runs of tests/helpers/tiny_run.py shared by several processes, or in one; a script of which each process is one.

`sharing.py BASE OUT RESULT` does every scenario of a test module in one start: a start costs far more than a run. What
comes out goes into RESULT as JSON; the tests of the module compare it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tiny_run import config, save_base, training

from surefit.core.rundir import RunDir, read_jsonl
from surefit.model import prepare
from surefit.model.kernels import use_kernels
from surefit.model.sdpa import gpu_assumed
from surefit.parallel.engine import Engine, build_engine
from surefit.parallel.process_group import World, barrier, process_group, run_on_rank0

STEPS = 20
SCENARIOS: dict[str, dict[str, Any]] = {
    "lora padded": {},
    "lora packed": {"packing": True},
    "dora": {"adapter": {"use_dora": True, "use_rslora": True}},
    # 6 rows of a global batch in micro batches of 2 are 3: one process runs an empty one.
    "full uneven": {"kind": "full", "global_batch_size": 6, "per_device_train_batch_size": 2},
    "full packed uneven": {"kind": "full", "packing": True, "global_batch_size": 5, "per_device_train_batch_size": 2},
    "logits whole": {"kind": "full", "chunked_loss": False},
    "recomputed": {"gradient_checkpointing": True},
    "lora kernels": {"kernels": True},
    "full kernels": {"kernels": True, "kind": "full", "gradient_checkpointing": True},
    "bfloat16": {"dtype": "bfloat16", "kind": "full"},
}
QUANTIZED = {"lora nf4": {"quantization": "nf4"}, "lora fp8": {"quantization": "fp8"}}
"""Beside a quantised base: every process holds all of it, so only where nothing of the base is sharded."""


def settings(base: Path, out: Path, mode: str = "single", **changes: Any) -> Any:
    """`mode`: of the section parallel; `cp` among the changes belongs there too."""
    changes = {"max_steps": STEPS, "num_train_epochs": 50.0, "learning_rate": 3e-3, "weight_decay": 0.01} | changes
    ways = {"mode": mode, "cp": changes.pop("cp", 1)}
    chunked, quantization = changes.pop("chunked_loss", True), changes.pop("quantization", "none")
    speed = {"chunked_loss": chunked, "kernels": changes.pop("kernels", False)}
    made = config(base, out, every=changes.pop("every", 10), **changes)
    return made.model_copy(
        update={
            "model": made.model.model_copy(update={"quantization": quantization}),
            "lora": made.lora.model_copy(update={"lora_dropout": 0.0}),
            "speed": made.speed.model_copy(update=speed),
            "parallel": made.parallel.model_copy(update=ways),
        }
    )


def fit(made: Any, engine: Engine | None, resume: bool = False) -> Any:
    """Train; rank 0's last weights and log."""
    with ExitStack() as stack:
        if made.speed.kernels is True:  # as on a GPU; their operators compute in PyTorch here
            stack.enter_context(gpu_assumed((9, 0)))
            stack.enter_context(patch.object(prepare, "_use_kernels", _with_kernels))
        job = training(made, **({"engine": engine} if engine else {}))
        result = job.fit(resume)
    return job, result


def _with_kernels(model: torch.nn.Module, hardware: Any) -> list[str]:
    assert all(use_kernels(model)), "norms, MLPs and rope"
    return []


def outcome(made: Any) -> dict[str, Any]:
    """What a run has written: losses, gradient norms and held-out losses."""
    lines = read_jsonl(RunDir(Path(made.output_dir)).metrics)
    steps = [line for line in lines if "loss" in line]
    return {
        "loss": [line["loss"] for line in steps],
        "norm": [line["grad_norm"] for line in steps],
        "tokens": [line["tokens"] for line in steps],
        "held_out": [line["eval_loss"] for line in lines if "eval_loss" in line],
    }


def alone(base: Path, out: Path) -> dict[str, Any]:
    """Every scenario in one process."""
    found = {}
    for name, changes in (SCENARIOS | QUANTIZED).items():
        made = settings(base, out / name.replace(" ", "-"), **changes)
        fit(made, None)
        found[name] = outcome(made)
    return found


def shared(base: Path, out: Path, mode: str, world: World) -> dict[str, Any]:
    """Every scenario as one of several processes; then a run that is stopped half way and resumed."""
    found: dict[str, Any] = {}
    for name, changes in (SCENARIOS | (QUANTIZED if mode == "ddp" else {})).items():
        made = settings(base, out / name.replace(" ", "-"), mode, **changes)
        engine = build_engine(made.parallel, world)
        job, _ = fit(made, engine)
        found[name] = outcome(made) if world.is_first else {}
        if name == "full uneven":
            found["wrapped"] = wrapped(job, engine)
    found |= resumed(base, out, mode, world)
    return found


def wrapped(job: Any, engine: Any) -> dict[str, Any]:
    """What the engine has made of the model, by the types and shapes that are really there."""
    parameters = dict(job.model.named_parameters())
    module = getattr(engine, "ddp", None) or getattr(engine, "root", None)
    return {
        "type": type(module).__name__,
        "layers": sorted({type(layer).__name__ for layer in job.model.model.layers}),
        "kinds": sorted({type(parameter).__name__ for parameter in parameters.values()}),
        "whole": sum(p.numel() for p in parameters.values()),
        "held": sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in parameters.values()),
        "state": sum(
            getattr(t, "to_local", lambda t=t: t)().numel()
            for n, t in job.optimizer.tensors().items()
            if "exp_avg." in n
        ),
    }


def resumed(base: Path, out: Path, mode: str, world: World, **changes: Any) -> dict[str, Any]:
    """Steps 11 to 20 once more, from the checkpoint at 10 of the run 'full uneven', beside it."""
    first, again = out / "full-uneven", out / "again"
    if world.is_first:
        shutil.copytree(first, again)
        for path in (again / "checkpoints" / "step-20", again / "model"):
            shutil.rmtree(path)
    barrier(world)
    made = settings(base, again, mode, **SCENARIOS["full uneven"], **changes)
    fit(made, build_engine(made.parallel, world), resume=True)
    return {"again": outcome(made)} if world.is_first else {}


def places(processes: int) -> list[dict[str, str]]:
    """What each process finds in its environment, as a launcher would set it; over gloo, on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo"}
    return [
        {name: str(value) for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        for rank in range(processes)
    ]


def start(
    mode: str, folder: Path, processes: int = 2, timeout: float = 400, script: str | Path = __file__
) -> dict[str, Any]:
    """Start the script, or another that takes the same arguments, and return what the first process wrote."""
    base = save_base(folder / "base")
    result = folder / "result.json"
    command = [sys.executable, str(script), str(base), str(folder / "runs"), str(result), mode]
    running = [
        subprocess.Popen(command, env=os.environ | place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for place in places(processes)
    ]
    try:
        said = [process.communicate(timeout=timeout)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * processes, "\n".join(said)
    return json.loads(result.read_text())


def main(base: str, out: str, result: str, mode: str) -> None:
    torch.set_num_threads(1)
    world = World.current()
    with process_group(world, 2.0):
        found = shared(Path(base), Path(out), mode, world)
        run_on_rank0(world, lambda: Path(result).write_text(json.dumps(found)))


if __name__ == "__main__":
    main(*sys.argv[1:])
