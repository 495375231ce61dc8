"""kill -9 at random moments of small runs, saves, evaluation and export included; every resume must lose nothing.

    python benchmarks/kill_resume.py [--kills 100] [--seed 0] [--json]

Runs of several kinds (LoRA with dropout, packed, accumulated, all the weights in bfloat16, with the best checkpoint
kept and early stopping) are trained by a child process that is killed with SIGKILL, resumed by the next, killed again,
until one is through. Half of the kills come at any time, half while a phase is going on that is hard to hit: a copy of
the state, a write by the background thread, an evaluation, the export. After every kill no checkpoint may be damaged
and both logs must be readable; at the end weights (their file, byte by byte), optimizer state and metrics must equal
those of an uninterrupted run of the same config. Exits with 1 where they do not.

The children are forked from a parent that has imported everything and holds no thread, so an attempt costs the run and
not the imports.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import mmap
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/helpers"))

import tiny_run
import torch
from safetensors.torch import load_file

from surefit.checkpoint.manager import latest_complete
from surefit.core.rundir import read_jsonl
from surefit.train import heldout, loop, saving

KINDS: dict[str, dict[str, Any]] = {
    "LoRA, dropout": {},
    "packed, dropout": {"packing": True},
    "accumulation 8 × 1, dropout": {"per_device_train_batch_size": 1},
    "all weights, bfloat16": {"kind": "full", "dtype": "bfloat16", "weight_decay": 0.01},
    "best kept, early stop": {
        "learning_rate": 0.5, "schedule": "constant", "early_stopping_patience": 2,
        "checkpoint": {"keep_best": "eval_loss", "save_total_limit": 1},
    },
}  # fmt: skip
PHASES = ("start", "step", "copy", "evaluation", "export", "between")
WRITING = "writing"
AIMED = (WRITING, "copy", "evaluation", "export")
TIMES = ("seconds", "tokens_per_second", "mfu", "disk_free_bytes")
PATIENCE = 60.0
"""Seconds after which a child is taken to hang."""


class Watch:
    """Two bytes shared with the child: what its main thread is doing, and whether its writer is at work."""

    def __init__(self) -> None:
        self.shared = mmap.mmap(-1, 2)

    @property
    def phase(self) -> str:
        return WRITING if self.shared[1] else PHASES[self.shared[0]]

    @contextlib.contextmanager
    def during(self, byte: int, value: int, after: int) -> Iterator[None]:
        self.shared[byte] = value
        yield
        self.shared[byte] = after

    def wrap(self, place: Any, name: str, phase: str) -> None:
        """Mark a phase whenever the child is inside a function."""
        function = getattr(place, name)
        if phase == WRITING:
            byte, value, after = 1, 1, 0
        else:
            byte, value, after = 0, PHASES.index(phase), PHASES.index("between")

        def marked(*args: Any, **kwargs: Any) -> Any:
            with self.during(byte, value, after):
                return function(*args, **kwargs)

        setattr(place, name, marked)


def config(base: Path, out: Path, kind: str) -> Any:
    return tiny_run.config(base, out, every=2, **KINDS[kind])


def child(work: Callable[[], object]) -> int:
    """Run something in a fork of this process; its number."""
    number = os.fork()
    if number == 0:
        # Before any other thread does: after a fork torch makes its pool anew, and two threads at once break it.
        torch.set_num_threads(1)
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars of transformers
                work()
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
        os._exit(0)
    return number


def train(base: Path, out: Path, kind: str, watch: Watch) -> None:
    watch.wrap(loop, "train_step", "step")
    watch.wrap(loop, "export", "export")
    watch.wrap(heldout, "mean_loss", "evaluation")
    watch.wrap(saving.Snapshot, "take", "copy")
    watch.wrap(saving.Saving, "_write", WRITING)
    tiny_run.training(config(base, out, kind)).fit(resume=True)


def attempt(work: Callable[[], object], watch: Watch, draw: random.Random, seconds: float) -> str | None:
    """Start or resume a run and kill it; the phase it was killed in, or None where it was through before."""
    watch.shared[:] = bytes(2)
    number = child(work)
    aim = draw.choice(AIMED) if draw.random() < 0.5 else None
    began, wait = time.monotonic(), draw.uniform(0, 1.1 * seconds)
    while (watch.phase != aim) if aim else (time.monotonic() - began < wait):
        ended, status = os.waitpid(number, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0, "the run failed"
            return None
        assert time.monotonic() - began < PATIENCE, "the run hangs"
        time.sleep(0.0002)
    if aim:
        time.sleep(draw.uniform(0, 0.004))
    phase = watch.phase
    os.kill(number, signal.SIGKILL)
    killed = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == -signal.SIGKILL
    return phase if killed else None


def require_undamaged(out: Path) -> None:
    skipped = latest_complete(out / "checkpoints").skipped
    assert not skipped, f"damaged after a kill: {skipped}"
    for log in ("metrics.jsonl", "events.jsonl"):
        read_jsonl(out / log)


def differences(one: Path, two: Path) -> list[str]:
    """What is not the same in two finished runs."""
    found = []
    files = [next(out / name for name in ("adapter", "model") if (out / name).is_dir()) for out in (one, two)]
    weights = [next(folder.glob("*model*.safetensors")).read_bytes() for folder in files]
    if weights[0] != weights[1]:
        found.append("weights")
    lines = [
        [{k: v for k, v in line.items() if k not in TIMES} for line in read_jsonl(out / "metrics.jsonl")]
        for out in (one, two)
    ]
    if lines[0] != lines[1]:
        found.append("metrics")
    newest = [latest_complete(out / "checkpoints") for out in (one, two)]
    for name in ("weights", "optimizer"):
        ours, theirs = (load_file(latest.path / f"{name}.safetensors") for latest in newest if latest.path)
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[key], theirs[key]) for key in ours):
            found.append(f"{name} of the last checkpoint")
    if sorted(path.name for path in (one / "checkpoints").iterdir()) != sorted(
        path.name for path in (two / "checkpoints").iterdir()
    ):
        found.append("the checkpoints that are kept")
    return found


def measure(kills: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Kill and resume runs of every kind in turn until there were enough kills; a row per kind."""
    base = tiny_run.save_base(folder / "base")
    draw, watch = random.Random(seed), Watch()
    rows = [{"kind": kind, "runs": 0, "kills": 0, "phases": Counter(), "differences": []} for kind in KINDS]
    seconds = {}
    number = 0
    while sum(row["kills"] for row in rows) < kills:
        row = rows[number % len(rows)]
        kind, straight, out = row["kind"], folder / f"straight-{number % len(rows)}", folder / f"run-{number}"
        if kind not in seconds:
            began = time.monotonic()
            ended = os.waitpid(child(lambda kind=kind, to=straight: train(base, to, kind, watch)), 0)[1]
            assert ended == 0, "the uninterrupted run failed"
            seconds[kind] = time.monotonic() - began
        done = False
        while not done:
            if sum(row["kills"] for row in rows) < kills:
                phase = attempt(lambda kind=kind, to=out: train(base, to, kind, watch), watch, draw, seconds[kind])
            else:
                phase = None
                assert os.waitpid(child(lambda kind=kind, to=out: train(base, to, kind, watch)), 0)[1] == 0
            require_undamaged(out)
            done = phase is None
            if phase is not None:
                row["kills"] += 1
                row["phases"][phase] += 1
        row["runs"] += 1
        row["differences"] += differences(straight, out)
        number += 1
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        rows = measure(options.kills, options.seed, Path(folder))
    phases = sum((row["phases"] for row in rows), Counter())
    passed = not any(row["differences"] for row in rows)
    result = {
        "kills": sum(row["kills"] for row in rows), "runs": sum(row["runs"] for row in rows), "phases": phases,
        "rows": rows, "seconds": round(time.monotonic() - began, 1), "passed": passed,
    }  # fmt: skip
    if options.json:
        print(json.dumps(result))
    else:
        print(f"{'run':28} {'runs':>5} {'kills':>6}  equal to the uninterrupted run")
        for row in rows:
            said = "not run" if not row["runs"] else "bit for bit" if not row["differences"] else row["differences"]
            print(f"{row['kind']:28} {row['runs']:>5} {row['kills']:>6}  {said}")
        print("killed during: " + ", ".join(f"{phase} {count}" for phase, count in phases.most_common()))
        print(f"{'PASSED' if passed else 'FAILED'}: {result['kills']} kills in {result['seconds']} s")
    raise SystemExit(not passed)


if __name__ == "__main__":
    main()
