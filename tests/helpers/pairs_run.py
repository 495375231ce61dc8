"""Runs on pairs in one of two real processes under ddp: what they train, into JSON.

`pairs_run.py OUT` in the environment that torchrun makes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tiny_run
import torch
from safetensors.numpy import load_file

from surefit.config.schema import ParallelSection
from surefit.core.rundir import read_jsonl
from surefit.parallel.engine import build_engine
from surefit.parallel.process_group import World, broadcast_from_rank0, process_group

RPO = {"name": "dpo", "beta": 0.1, "sft_weight": 0.5}
KTO = {"name": "kto", "beta": 0.1, "undesirable_weight": 1.5}
CASES: dict[str, dict[str, Any]] = {
    "dpo": {"objective": RPO, "per_device_train_batch_size": 2},
    "dpo packed": {"objective": RPO, "packing": True},
    "one micro batch for two": {"objective": RPO, "per_device_train_batch_size": 8},
    "kto": {"objective": KTO, "per_device_train_batch_size": 2},
    "kto packed": {"objective": KTO, "packing": True},
    "kto, one micro batch for two": {"objective": KTO, "per_device_train_batch_size": 8},
    "orpo, all weights": {"objective": {"name": "orpo", "beta": 0.1}, "kind": "full", "learning_rate": 1e-3},
}
"""Name → arguments of `tiny_run.config`."""


def train(case: str, folder: Path, engine: Any = None) -> dict[str, Any]:
    """Train six steps; return the metrics and the stored reference."""
    out = folder / f"{case} {'alone' if engine is None else 'shared'}"
    settings = tiny_run.config(base_in(folder), out, max_steps=6, **CASES[case])
    if engine is not None:
        settings = settings.model_copy(update={"parallel": ParallelSection(mode="ddp")})
    given = {} if engine is None else {"engine": engine}
    tiny_run.training(settings, **given).fit()
    if engine is not None and not engine.world.is_first:
        return {}
    stored = out / "reference.safetensors"
    reference = load_file(stored)["train"].tolist() if stored.exists() else None
    return {
        "lines": read_jsonl(out / "metrics.jsonl"),
        "reference": reference,
        "first": json.loads((out / "first_batch.json").read_text()),
    }


def base_in(folder: Path) -> Path:
    base = folder / "base"
    if not (base / "config.json").exists():
        tiny_run.save_base(base)
    return base


def main(result: str) -> None:
    torch.set_num_threads(1)
    world = World.current()
    with tempfile.TemporaryDirectory() as mine:
        with process_group(world, 2.0):
            folder = Path(broadcast_from_rank0(mine if world.is_first else None, world))
            if world.is_first:
                base_in(folder)
            broadcast_from_rank0(None if not world.is_first else True, world)
            found = {case: train(case, folder, build_engine(ParallelSection(mode="ddp"), world)) for case in CASES}
        if world.is_first:
            for case in CASES:
                found[case]["alone"] = train(case, folder)
            Path(result).write_text(json.dumps(found, default=_number), encoding="utf-8")


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


if __name__ == "__main__":
    main(sys.argv[1])
