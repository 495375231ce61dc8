"""One of two or four processes of tests/distributed/test_sharded_context.py: pairs share tokens, all share the weights.

Takes the arguments of tests/helpers/sharing.py, and writes what that writes.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import varlen_on_cpu  # noqa: F401 (registers the kernel)
from engine_steps import micro_batches, refused, same_path
from sharing import SCENARIOS, fit, outcome, resumed, settings, wrapped

from surefit.model.attention import use_varlen
from surefit.parallel.engine import build_engine
from surefit.parallel.process_group import World, process_group
from surefit.parallel.sharded_context import ShardedContext

RUNS = ("lora padded", "full uneven")


def hands_on(model: Any) -> None:
    """A token reads the one before it, past attention."""
    use_varlen(model)
    layer = model.get_base_model().model.layers[0]
    layer.register_forward_pre_hook(lambda _, args: (args[0] + args[0].roll(1, 1), *args[1:]))


def steps(world: World) -> dict[str, Any]:
    """Twenty steps by hand, and a model that is refused."""
    make, packed = partial(ShardedContext, world, 2), partial(micro_batches, packed=True)
    small = partial(same_path, num_hidden_layers=2)
    found = {
        "lora packed fused": small(make, packed, lora=True, fused=True),
        "full padded tied whole logits": small(make, lora=False, tied=True, chunked=False),
        "state": refused(make(), hands_on),
    }
    if world.size == 4:
        return found | {"full packed in two replicas": small(partial(ShardedContext, world, 2, 2), packed, lora=False)}
    return found | {
        "lora padded recomputed": small(make, lora=True, checkpointing=True),
        "full packed tiled": small(make, packed, lora=False, checkpointing="offload", tile=7),
    }


def runs(world: World, base: Path, folder: Path, mode: str) -> dict[str, Any]:
    """Whole runs, and one that is resumed half way."""
    found: dict[str, Any] = {}
    for name in RUNS:
        made = settings(base, folder / name.replace(" ", "-"), mode, cp=2, **SCENARIOS[name])
        engine = build_engine(made.parallel, world)
        job, _ = fit(made, engine)
        found[name] = outcome(made) if world.is_first else {}
        if name == "full uneven":
            found["engine"] = [type(engine).__name__, engine.data_size]
            found["wrapped"] = wrapped(job, engine) | {"attention": job.model.config._attn_implementation}
    return found | resumed(base, folder, mode, world, cp=2)


def main(base: str, out: str, result: str, mode: str) -> None:
    torch.set_num_threads(1)
    world = World.current()
    with process_group(world, 2.0):
        found = steps(world) | runs(world, Path(base), Path(out), mode)
    if world.is_first:
        Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
