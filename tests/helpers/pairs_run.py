"""Runs on pairs in one of two real processes, in every parallel mode, and in one alone: what they train, into JSON.

`pairs_run.py OUT [MODE …]` in the environment that torchrun makes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tiny_run
import torch
import varlen_on_cpu  # noqa: F401 (registers the kernel)
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors

from surefit.config.modes import GROUPED, MODES
from surefit.config.schema import ParallelSection
from surefit.core.rundir import read_jsonl
from surefit.parallel.engine import build_engine
from surefit.parallel.process_group import World, broadcast_from_rank0, process_group

RPO = {"name": "dpo", "beta": 0.1, "sft_weight": 0.5}
KTO = {"name": "kto", "beta": 0.1, "undesirable_weight": 1.5}
FULL = {"kind": "full", "learning_rate": 1e-3}
CASES: dict[str, dict[str, Any]] = {
    "dpo padded": {"objective": RPO, "per_device_train_batch_size": 2},
    "dpo packed, all weights": {"objective": RPO, "packing": True} | FULL,
    # Five pairs in micro batches of two: with two processes one has an empty micro batch.
    "simpo packed": {
        "objective": {"name": "simpo", "beta": 2.0},
        "packing": True,
        "global_batch_size": 5,
        "per_device_train_batch_size": 1,
    },
    "orpo padded, all weights": {"objective": {"name": "orpo", "beta": 0.1}, "per_device_train_batch_size": 2} | FULL,
}
"""Name → arguments of `tiny_run.config`."""
OTHERS: dict[str, dict[str, Any]] = {
    "one micro batch for two": {"objective": RPO, "per_device_train_batch_size": 8},
    "prompts shared": {"objective": RPO, "packing": True, "shared": True},
    "kto": {"objective": KTO, "per_device_train_batch_size": 2},
    "kto packed": {"objective": KTO, "packing": True},
    "kto, one micro batch for two": {"objective": KTO, "per_device_train_batch_size": 8},
}
"""The same for cases of some modes only."""
STEPS = 3
TOGETHER = (*(mode for mode in MODES if mode != "single"), "fsdp cp")


def section_of(mode: str, processes: int = 2) -> ParallelSection:
    name, *more = mode.split()
    return ParallelSection.model_validate(
        {"mode": name} | {size: processes for size in GROUPED if size in (name, *more)}
    )


def made(case: str, folder: Path, mode: str, **changes: Any) -> Any:
    # An output head of its own: tensor parallelism divides it, and one that is trained is read again for its gradient.
    base = folder / "base"
    out = folder / f"{case} {mode}"
    arguments = {"max_steps": STEPS, **(CASES | OTHERS)[case], **changes}
    settings = tiny_run.config(base, out, **arguments)
    return settings.model_copy(update={"parallel": section_of(mode)} if mode != "single" else {})


def train(case: str, folder: Path, mode: str, world: World | None = None) -> dict[str, Any]:
    """Train; return what the run wrote."""
    settings = made(case, folder, mode)
    given = {} if world is None else {"engine": build_engine(settings.parallel, world)}
    tiny_run.training(settings, **given).fit()
    if world is not None and not world.is_first:
        return {}
    out = Path(settings.output_dir)
    stored = out / "reference.safetensors"
    return {
        "lines": read_jsonl(out / "metrics.jsonl"),
        "reference": {name: array.tolist() for name, array in load_file(stored).items()} if stored.exists() else None,
        "first": json.loads((out / "first_batch.json").read_text()),
        "weights": {name: tensor.tolist() for name, tensor in weights_in(out).items()},
    }


def weights_in(out: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a run's result."""
    (file,) = [*out.glob("adapter/adapter_model.safetensors"), *out.glob("model/model.safetensors")]
    return load_tensors(file)


class Killed(BaseException):
    """Ends a run in the middle of its steps."""


def ended(settings: Any, world: World) -> None:
    """Train into the third step, in which all processes end."""
    job = tiny_run.training(settings, engine=build_engine(settings.parallel, world))
    step = job._step

    def step_and_end(reporting: Any) -> None:
        step(reporting)
        if job.counters.step == 3:
            raise Killed

    job._step = step_and_end  # type: ignore[method-assign]
    with contextlib.suppress(Killed):
        job.fit()


def resumed(folder: Path, mode: str, world: World) -> dict[str, Any]:
    """A run that ends in its third step and goes on from the checkpoint after the second, and one that does not end."""
    straight, again = (
        made("dpo packed, all weights", folder, mode, every=2, max_steps=4).model_copy(
            update={"output_dir": str(folder / name)}
        )
        for name in ("straight", "again")
    )
    tiny_run.training(straight, engine=build_engine(straight.parallel, world)).fit()
    ended(again, world)
    result = tiny_run.training(again, engine=build_engine(again.parallel, world)).fit(resume=True)
    if not world.is_first:
        return {}
    ours, theirs = (weights_in(Path(run.output_dir)) for run in (straight, again))
    losses = [
        [line.get("loss") for line in read_jsonl(Path(run.output_dir) / "metrics.jsonl")] for run in (straight, again)
    ]
    return {
        "from": result.resumed_from,
        "losses": losses,
        "same": [name for name, tensor in ours.items() if torch.equal(tensor, theirs[name])] == list(ours),
        "notes": result.notes,
    }


def scenarios(modes: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (mode, case): all of fsdp, three of the others."""
    for number, mode in enumerate(modes):
        left_out = {"fsdp": None, "ddp": "dpo padded"}.get(
            mode, ("simpo packed", "orpo padded, all weights")[number % 2]
        )
        yield from ((mode, case) for case in CASES if case != left_out)
        yield from ((mode, case) for case in {"ddp": tuple(OTHERS), "fsdp": ("one micro batch for two",)}.get(mode, ()))


def available() -> tuple[str, ...]:
    """Return the modes that this machine has."""
    there = importlib.util.find_spec("deepspeed") is not None
    return tuple(mode for mode in TOGETHER if there or not mode.startswith("zero"))


def main(result: str, *modes: str) -> None:
    torch.set_num_threads(1)
    world = World.current()
    modes = modes or available()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as own:
        with process_group(world, 2.0):
            folder = Path(broadcast_from_rank0(own if world.is_first else None, world))
            if world.is_first:
                tiny_run.save_base(folder / "base", tie_word_embeddings=False)
            broadcast_from_rank0(True if world.is_first else None, world)
            for mode, case in scenarios(modes):
                found[f"{mode}: {case}"] = train(case, folder, mode, world)
            if "fsdp" in modes:
                found["resumed"] = resumed(folder, "fsdp", world)
        if world.is_first:
            for case in (*CASES, *OTHERS):
                found[f"alone: {case}"] = train(case, folder, "single")
            Path(result).write_text(json.dumps(found, default=_number), encoding="utf-8")


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


if __name__ == "__main__":
    main(*sys.argv[1:])
