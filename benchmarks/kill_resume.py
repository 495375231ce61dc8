"""kill -9 at random moments of small runs, saves, evaluation and export included; every resume must lose nothing.

    python benchmarks/kill_resume.py [--kills 100] [--processes 1] [--model DIR | --pairs] [--seed 0] [--json]

Runs of several kinds (LoRA with dropout, packed, accumulated, all the weights in bfloat16, with the best checkpoint
kept and early stopping) are trained by a child process that is killed with SIGKILL, resumed by the next, killed again,
until one is through. Half of the kills come at any time, half while a phase is going on that is hard to hit: a copy of
the state, a write by the background thread, an evaluation, the export. After every kill no checkpoint may be damaged
and both logs must be readable; at the end weights (their file, byte by byte), optimizer state and metrics must equal
those of an uninterrupted run of the same config. Exits with 1 where they do not.

With `--processes 2` the runs train all weights under FSDP, and their checkpoints are written in parts. Half of the
kills hit all processes at once, half one of them; the others must then end by themselves within ten seconds.

With `--pairs` the runs are of dpo, and kills also come while the reference is being stored, which a resumed run goes on
with; reference.safetensors must be the same in the end, too.

With `--model` LoRA runs of that model on a few short rows are killed; a step takes longer there.

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
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/helpers"))

import tiny_run
import torch
from safetensors import safe_open

from surefit.checkpoint.manager import latest_complete, load_checkpoint
from surefit.core.errors import LostProcess
from surefit.core.rundir import read_jsonl
from surefit.parallel.engine import build_engine
from surefit.parallel.process_group import World, process_group
from surefit.train import checkpointing, heldout, loop, reference, sharded_checkpoint

KINDS: dict[str, dict[str, Any]] = {
    "LoRA, dropout": {},
    "packed, dropout": {"packing": True},
    "accumulation 8 × 1, dropout": {"per_device_train_batch_size": 1},
    "all weights, bfloat16": {"kind": "full", "dtype": "bfloat16", "weight_decay": 0.01},
    "best kept, early stop": {
        "learning_rate": 0.5, "lr_scheduler_type": "constant_with_warmup", "early_stopping_patience": 2,
        "checkpoint": {"metric_for_best_model": "eval_loss", "save_total_limit": 1},
    },
}  # fmt: skip
IN_PARTS: dict[str, dict[str, Any]] = {
    "FSDP, bfloat16": {"kind": "full", "dtype": "bfloat16", "weight_decay": 0.01},
    "FSDP, best kept": {"kind": "full", "checkpoint": {"metric_for_best_model": "eval_loss", "save_total_limit": 1}},
}
REAL: dict[str, dict[str, Any]] = {
    "LoRA, real model": {"num_train_epochs": 2.0, "learning_rate": 1e-3},
    "packed, real model": {"num_train_epochs": 2.0, "learning_rate": 1e-3, "packing": True},
}
PAIRS: dict[str, dict[str, Any]] = {
    "dpo": {"objective": {"name": "dpo", "beta": 0.1}},
    "dpo packed, sft term": {"objective": {"name": "dpo", "beta": 0.1, "sft_weight": 0.5}, "packing": True},
    "dpo, all weights": {"objective": {"name": "dpo", "beta": 0.1}, "kind": "full", "learning_rate": 1e-3},
}
PHASES = ("start", "step", "copy", "evaluation", "export", "reference", "between")
WRITING = "writing"
AIMED = (WRITING, "copy", "evaluation", "export")
TIMES = ("seconds", "tokens_per_second", "mfu", "disk_free_bytes")
LOST = 70
"""What a child exits with that has lost another."""
PATIENCE = 60.0
REAL_PATIENCE = 900.0
"""Seconds after which a child is taken to hang."""
GRACE = 10.0
"""Seconds that the other processes of a run have to end by themselves, as `surefit train --gpus` has it."""


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
    made = tiny_run.config(base, out, every=2, **(KINDS | IN_PARTS | REAL | PAIRS)[kind])
    mode = "fsdp" if kind in IN_PARTS else "single"
    return made.model_copy(update={"parallel": made.parallel.model_copy(update={"mode": mode})})


def child(work: Callable[[], object]) -> int:
    """Run something in a fork of this process; its number."""
    number = os.fork()
    if number == 0:
        # Before any other thread does: after a fork torch makes its pool anew, and two threads at once break it.
        torch.set_num_threads(1)
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars of transformers
                work()
        except LostProcess:
            os._exit(LOST)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
        os._exit(0)
    return number


class Processes:
    """Those of one run, each a fork of this one.

    Attributes:
        codes: rank → what it exited with, negative for a signal.
    """

    def __init__(self, base: Path, out: Path, kind: str, watches: Sequence[Watch]) -> None:
        for watch in watches:
            watch.shared[:] = bytes(2)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        place = {"WORLD_SIZE": len(watches), "LOCAL_WORLD_SIZE": len(watches), "MASTER_PORT": port}
        place |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}

        def work(rank: int) -> None:
            os.environ |= {key: str(value) for key, value in (place | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            train(base, out, kind, watches[rank], World(rank, len(watches), rank, len(watches)))

        self.kind = kind
        self.numbers = [child(partial(work, rank)) for rank in range(len(watches))]
        self.codes: dict[int, int] = {}

    def poll(self) -> bool:
        """Whether all have ended."""
        for rank, number in enumerate(self.numbers):
            if rank not in self.codes:
                ended, status = os.waitpid(number, os.WNOHANG)
                if ended:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self.numbers)

    def kill(self, rank: int) -> None:
        if rank not in self.codes:
            os.kill(self.numbers[rank], signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Whether all have ended by themselves in that time."""
        limit = time.monotonic() + seconds
        while not self.poll() and time.monotonic() < limit:
            time.sleep(0.001)
        return self.poll()


def train(base: Path, out: Path, kind: str, watch: Watch, world: World) -> None:
    watch.wrap(loop, "train_step", "step")
    watch.wrap(loop, "export_trained_model", "export")
    watch.wrap(heldout, "measure", "evaluation")
    watch.wrap(checkpointing.Snapshot, "take", "copy")
    watch.wrap(checkpointing.CheckpointWriter, "_write", WRITING)
    watch.wrap(reference.StoredReference, "_measure", "reference")
    reference.SAVED_EVERY = 4  # pairs, of 30: a kill may come before the first save, between two and after the last
    watch.wrap(sharded_checkpoint.ShardedCheckpointWriter, "_work", WRITING)
    made = config(base, out, kind)
    with process_group(world, patience(kind) / 60):
        tiny_run.training(made, engine=build_engine(made.parallel, world)).fit(resume=True)


def attempt(
    started: Processes, watches: Sequence[Watch], draw: random.Random, seconds: float, before: int
) -> str | None:
    """Kill one process of a run, or all; the phase it was killed in, or None where the run was through before.

    Args:
        before: kills of this run before. Runs on pairs are few, and take the phases in turn: the reference is stored
            at the start, and no more when a resumed run has it.
    """
    aim = draw.choice(AIMED) if draw.random() < 0.5 else None
    if started.kind in PAIRS:
        aim = ("reference", None, *AIMED)[before % 6]
    victim = draw.randrange(len(watches))
    victims = range(len(watches)) if draw.random() < 0.5 else [victim]
    watch = watches[victim]
    began, wait = time.monotonic(), draw.uniform(0, 1.1 * seconds)
    while (watch.phase != aim) if aim else (time.monotonic() - began < wait):
        if started.poll():
            break
        assert not any(started.codes.values()), f"the run failed: {started.codes}"
        assert time.monotonic() - began < patience(started.kind), "the run hangs"
        time.sleep(0.0002)
    if aim:
        time.sleep(draw.uniform(0, 0.004))
    phase = watch.phase
    for rank in victims:
        started.kill(rank)
    # Before the processes have met there is nobody to miss: the launcher ends the others then.
    if not started.wait(GRACE):
        assert phase == "start", f"killed in {phase}, the others still wait after {GRACE} s"
        for rank in range(len(watches)):
            started.kill(rank)
        started.wait(patience(started.kind))
    assert set(started.codes.values()) <= {0, -signal.SIGKILL, LOST}, f"the run failed: {started.codes}"
    return phase if -signal.SIGKILL in started.codes.values() else None


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
    stored = [out / "reference.safetensors" for out in (one, two)]
    if stored[0].exists() and _content(stored[0]) != _content(stored[1]):
        found.append("the stored reference")
    newest = [latest_complete(out / "checkpoints") for out in (one, two)]
    for name in ("weights", "optimizer"):
        ours, theirs = (getattr(load_checkpoint(latest.path), name) for latest in newest if latest.path)
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[key], theirs[key]) for key in ours):
            found.append(f"{name} of the last checkpoint")
    if sorted(path.name for path in (one / "checkpoints").iterdir()) != sorted(
        path.name for path in (two / "checkpoints").iterdir()
    ):
        found.append("the checkpoints that are kept")
    return found


def _content(file: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """What a safetensors file holds; the order of its metadata is by chance."""
    with safe_open(file, framework="numpy") as opened:
        return opened.metadata(), {name: opened.get_tensor(name).tobytes() for name in opened.keys()}  # noqa: SIM118


def measure(
    kills: int, seed: int, folder: Path, processes: int, model: Path | None, pairs: bool = False
) -> list[dict[str, Any]]:
    """Kill and resume runs of every kind in turn until there were enough kills; a row per kind."""
    uneven = {"intermediate_size": 45} if processes > 1 else {}
    base = model or tiny_run.save_base(folder / "base", **uneven)
    draw, watches = random.Random(seed), [Watch() for _ in range(processes)]
    kinds = PAIRS if pairs else REAL if model else IN_PARTS if processes > 1 else KINDS
    rows = [{"kind": kind, "runs": 0, "kills": 0, "phases": Counter(), "differences": []} for kind in kinds]
    seconds = {}
    number = 0
    while sum(row["kills"] for row in rows) < kills:
        row = rows[number % len(rows)]
        kind, straight, out = row["kind"], folder / f"straight-{number % len(rows)}", folder / f"run-{number}"
        if kind not in seconds:
            began = time.monotonic()
            through(Processes(base, straight, kind, watches))
            seconds[kind] = time.monotonic() - began
        done, before = False, 0
        while not done:
            started = Processes(base, out, kind, watches)
            if sum(row["kills"] for row in rows) < kills:
                phase = attempt(started, watches, draw, seconds[kind], before)
            else:
                phase = None
                through(started)
            require_undamaged(out)
            before += 1
            done = phase is None
            if phase is not None:
                row["kills"] += 1
                row["phases"][phase] += 1
        row["runs"] += 1
        row["differences"] += differences(straight, out)
        number += 1
    return rows


def patience(kind: str) -> float:
    return REAL_PATIENCE if kind in REAL else PATIENCE


def through(started: Processes) -> None:
    assert started.wait(patience(started.kind)), "the run hangs"
    assert not any(started.codes.values()), f"the run failed: {started.codes}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--model", type=Path, help="a model's directory in place of a tiny random one")
    parser.add_argument("--pairs", action="store_true", help="runs of dpo, with a stored reference")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.model and options.processes > 1:
        parser.error("--model is for one process")
    if options.pairs and (options.model or options.processes > 1):
        parser.error("--pairs is for one process and the tiny model")
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        rows = measure(options.kills, options.seed, Path(folder), options.processes, options.model, options.pairs)
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
