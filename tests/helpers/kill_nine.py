"""Saves in children that are killed with SIGKILL at random moments; run as a script: `kill_nine.py OUT`.

A process of its own, because the children are forked: a fork of the test process would copy locks that its threads
(tokenizers, torch) hold at that moment, and hang. Prints how many children were killed before they were done; what must
hold after every kill is asserted here. Whole runs are killed by benchmarks/kill_resume.py.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from surefit.checkpoint.manager import (
    CheckpointState,
    delete_old_checkpoints,
    latest_complete,
    load_checkpoint,
    save_checkpoint,
)

SECONDS = 60
"""After so long without a new checkpoint a child is taken to hang."""


def state(step: int, size: int = 200_000) -> CheckpointState:
    weights = {"a.weight": torch.arange(size, dtype=torch.float32) + step, "b.weight": torch.ones(2, 3).bfloat16()}
    return CheckpointState(weights, {"exp_avg.a.weight": torch.full((size,), 0.5)}, {"counters": {"step": step}})


def kill(work: Callable[[], None], checkpoints: Path, delay: float) -> bool:
    """Fork, wait for a checkpoint that was not there, and kill a moment later; False where the work was done before."""
    before = latest_complete(checkpoints).step
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + SECONDS
    while latest_complete(checkpoints).step <= before and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    killed = os.waitpid(child, 0)[1] == signal.SIGKILL
    assert latest_complete(checkpoints).step > before, "no checkpoint came"
    return killed


def save_again_and_again(out: Path) -> None:
    step = latest_complete(out).step
    while True:
        step += 1
        save_checkpoint(out, step, state(step))
        delete_old_checkpoints(out, keep=2)


def kill_saves(out: Path) -> int:
    save_checkpoint(out, 1, state(1))
    rng, kills = random.Random(0), 0
    for _ in range(8):
        kills += kill(lambda: save_again_and_again(out), out, 0.03 * rng.random())
        found = latest_complete(out)
        assert found.path is not None
        assert found.skipped == []
        loaded = load_checkpoint(found.path)
        assert loaded.trainer["counters"]["step"] == found.step
        assert torch.equal(loaded.weights["a.weight"], state(found.step).weights["a.weight"])
    return kills


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(kill_saves(Path(sys.argv[1])))
