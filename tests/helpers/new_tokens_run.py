"""One of two processes of tests/distributed/test_new_tokens.py: rows of new tokens beside factors, under DDP."""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from engine_steps import micro_batches, same_path

from surefit.parallel.ddp import DataParallel
from surefit.parallel.process_group import World, process_group

LAST = range(96, 128)  # of 128 tokens, so that every micro batch has some
RARE = range(126, 128)


def main():
    torch.set_num_threads(1)
    world = World.current()
    same = partial(same_path, lambda: DataParallel(world), lora=True, new_tokens=LAST, num_hidden_layers=2)
    with process_group(world, 2.0):
        found = {
            "tied": same(tie_word_embeddings=True),
            "untied": same(tie_word_embeddings=False),
            "packed": same(batches=partial(micro_batches, packed=True)),
            "recomputed": same(checkpointing=True),
            "fused": same(fused=True, tie_word_embeddings=False),
            "seen by one process": same(new_tokens=RARE, tie_word_embeddings=False),
            "full logits": same(chunked=False),
        }
    if world.is_first:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
