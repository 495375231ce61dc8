"""One of two processes of tests/distributed/test_tensor.py: every scenario, one after the other."""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from engine_steps import micro_batches, prepared, same_path, saved_and_resumed
from torch.distributed.tensor import DTensor

from surefit.core.errors import SureFitError
from surefit.model.fused_lora import fuse_lora
from surefit.parallel.mesh import World, from_first, joined
from surefit.parallel.tensor import TensorParallel


def shards(world, **model):
    """Placement, whole and local shape of every parameter that is a DTensor; the names of those that are plain."""
    wrapped = TensorParallel(world, 2).wrap(prepared(**model))
    named = dict(wrapped.named_parameters())
    cut = {
        name: [str(p.placements[0]), list(p.shape), list(p.to_local().shape)]
        for name, p in named.items()
        if isinstance(p, DTensor)
    }
    return {"cut": cut, "plain": [name for name in named if name not in cut]}


def refused(world, change=lambda model: None, **model):
    try:
        model = prepared(lora=True, **model)
        change(model)
        TensorParallel(world, 2).wrap(model)
    except SureFitError as error:
        return str(error)
    return None


def main():
    torch.set_num_threads(1)
    world = World.current()
    make = partial(TensorParallel, world, 2)
    with tempfile.TemporaryDirectory() as folder:
        with joined(world, 2.0):
            shared = Path(from_first(folder if world.is_first else None, world))
            found = {
                "shards_lora": shards(world, lora=True),
                "shards_full": shards(world, lora=False),
                "lora": same_path(make, num_hidden_layers=2, lora=True),
                "full": same_path(make, num_hidden_layers=2, lora=False),
                "full_whole_logits": same_path(make, num_hidden_layers=2, lora=False, chunked=False),
                "full_tied": same_path(make, num_hidden_layers=2, lora=False, tied=True),
                "lora_tied": same_path(make, num_hidden_layers=2, lora=True, tied=True),
                "packed": same_path(make, partial(micro_batches, packed=True), num_hidden_layers=2, lora=True),
                "checkpointing": same_path(make, num_hidden_layers=2, lora=True, checkpointing=True),
                "qwen3": same_path(make, num_hidden_layers=2, lora=False, family="qwen3"),
                "biases": same_path(make, num_hidden_layers=2, lora=True, family="qwen2"),
                "phi3": same_path(make, num_hidden_layers=2, lora=True, family="phi3"),
                "resume_lora": saved_and_resumed(make, shared / "lora", num_hidden_layers=2, lora=True),
                "resume_full": saved_and_resumed(make, shared / "full", num_hidden_layers=2, lora=False, tied=True),
                "no_plan": refused(world, family="gpt_bigcode"),
                "odd_heads": refused(world, num_key_value_heads=1),
                "fused": refused(world, fuse_lora),
            }
        if world.is_first:
            found["resume_lora"] |= found["resume_lora"].pop("later")()
            Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
