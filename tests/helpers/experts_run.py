"""One of two processes of tests/distributed/test_experts.py: factors beside the experts of a mixture, under DDP."""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from engine_steps import micro_batches, same_path

from surefit.parallel.ddp import DataParallel
from surefit.parallel.process_group import World, process_group

MIXTURE = {
    "family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
}  # fmt: skip


def main():
    torch.set_num_threads(1)
    world = World.current()
    same = partial(same_path, lambda: DataParallel(world), lora=True, experts=True, **MIXTURE)
    packed = partial(micro_batches, packed=True)
    with process_group(world, 2.0):
        found = {
            "padded": same(),
            "packed": same(batches=packed),
            "recomputed": same(checkpointing=True),
            "routers too": same(experts="with_router", output_router_logits=True, router_aux_loss_coef=0.1),
            "router loss": same(output_router_logits=True, router_aux_loss_coef=0.1),
        }
    if world.is_first:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
