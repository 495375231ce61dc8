"""One of four processes of tests/distributed/test_groups.py: two groups that each share one model."""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from engine_steps import micro_batches, same_path

from surefit.parallel.fsdp import FullySharded
from surefit.parallel.pipeline_parallel import Pipeline
from surefit.parallel.process_group import World, process_group
from surefit.parallel.tensor_parallel import TensorParallel


def main():
    torch.set_num_threads(1)
    world = World.current()
    same = partial(same_path, batches=partial(micro_batches, count=4), num_hidden_layers=2)
    with process_group(world, 2.0):
        found = {
            "tp lora": same(lambda: TensorParallel(world, 2), lora=True),
            "tp full tied": same(lambda: TensorParallel(world, 2), lora=False, tied=True),
            "pp lora": same(lambda: Pipeline(world, 2), lora=True),
            "pp full tied": same(lambda: Pipeline(world, 2), lora=False, tied=True),
            "fsdp lora": same(lambda: FullySharded(world, 2), lora=True),
            "fsdp full tied": same(lambda: FullySharded(world, 2), lora=False, tied=True),
            "fsdp replicas only": same(lambda: FullySharded(world, 4), lora=False),
        }
    if world.is_first:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
