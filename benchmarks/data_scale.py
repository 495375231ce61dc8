"""Tokens in shards: rows/s of a core, memory, start, training and `kill -9`, against `datasets.map` and datatrove.

    python benchmarks/data_scale.py [--gb 1 --gb 10 | --rows-mb 100] [--kills 20] [--no-peer] [--anew] [--docs] [--json]

Chat rows of seeded words, one to four exchanges of log-normal lengths, are written once for each size, in eight files.
Every measurement has a process of its own, and every one that has ended is kept in CACHE/measured.json: the same
command goes on behind it, `--anew` begins again. Shards and rows are deleted as soon as nothing needs them.

Both peers render the same template and mask the same tokens, 256 rows at a time, with two processes
(data_scale_parts.py); their first 1,000 rows are compared with the shards'. All tokenizers have one thread, so that two
workers are two cores. Above 2 GB the peers and the single worker are left out: the peers' copies need the room that
the shards are in, and the ratios are those of 1 GB.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from data_scale_parts import LONGEST, conversation, vocabulary, write_rows

from surefit.core.rundir import write_json
from surefit.core.units import duration_text

PARTS = Path(__file__).with_name("data_scale_parts.py")
DOCS = Path(__file__).parents[1] / "docs" / "data-at-scale.md"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
CONFIG = """recipe: chat
model: {{name_or_path: surefit/nano, dtype: float32}}
lora: {{r: 4}}
data: {{train: {train}, {prepared}max_length: {longest}, eval: {scored}}}
train: {{max_steps: {steps}, global_batch_size: 2, per_device_train_batch_size: 2}}
evaluate: {{gate: null}}
output_dir: {output}
"""
MANY_ROWS, MANY_SHARDS = 10**9, 10_000
STEPS = 16
"""Of a training; the first four are not looked at."""
WITH_PEERS = 2 * 10**9
"""Bytes of rows up to which the peers and the single worker are measured."""
TOLD_SECONDS = 30.0
COMMAND = [sys.executable, "-m", "surefit"]
SECONDS_PER_GB = {
    "rows": 60, "one_worker": 420, "two_workers": 240, "datasets_map": 420, "datatrove": 420, "feed": 5, "training": 5,
}  # fmt: skip
"""Guesses of two quiet cores, until a smaller size has been measured."""
SECONDS = {"feed": 20, "training": 150, "many": 20, "killed": 420}
"""Likewise, whatever the size."""


def config_of(work: Path, name: str, train: Path, shards: Path | None, steps: int = 1) -> Path:
    """WORK/NAME.yaml, whose run is WORK/run-NAME."""
    path, scored = work / f"{name}.yaml", work / "scored.jsonl"
    # A file of its own is scored on, so that no row is held out and the peers' rows are the same.
    scored.write_text(json.dumps({"messages": conversation(vocabulary(rng := random.Random(1)), rng)}) + "\n")
    prepared = f"tokenized: {shards}, " if shards else ""
    places = {"train": train, "prepared": prepared, "output": work / f"run-{name}", "scored": scored}
    path.write_text(CONFIG.format(**places, longest=LONGEST, steps=steps))
    return path


# Processes


def environment() -> dict[str, str]:
    fixed = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # Without its cache of bytecode every process would compile what it imports: no user's does.
    return {**os.environ, **fixed, "PYTHONDONTWRITEBYTECODE": ""}


def descendants(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = [one for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()]
    except OSError:
        return
    for child in children:
        yield from descendants(int(child))


def memory_of(pid: int) -> dict[str, int]:
    """VmHWM (the most so far) and VmRSS (now) of a process in MiB; empty: it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    found = (line.split() for line in lines if line.startswith(("VmHWM", "VmRSS")))
    return {words[0].rstrip(":"): int(words[1]) // 1024 for words in found}


class Watch:
    """Memory of a command's processes, and what is told while it runs."""

    def __init__(self, child: subprocess.Popen[bytes], say: Callable[[float], None]) -> None:
        self.peaks: dict[int, int] = {}
        self.together = 0
        self._child, self._say, self._start = child, say, time.monotonic()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        told = self._start
        while self._child.poll() is None:
            now = {pid: memory_of(pid) for pid in descendants(self._child.pid)}
            for pid, one in now.items():
                self.peaks[pid] = max(self.peaks.get(pid, 0), one.get("VmHWM", 0))
            self.together = max(self.together, sum(one.get("VmRSS", 0) for one in now.values()))
            if time.monotonic() - told > TOLD_SECONDS:
                told = time.monotonic()
                self._say(told - self._start)
            time.sleep(0.1)

    def ended(self) -> dict[str, int]:
        """The peak of the largest process, and the most that all had at once (pages that they share counted twice)."""
        self._thread.join()
        return {"peak_mib": max(self.peaks.values(), default=0), "together_mib": self.together}


def run(command: list[str], cwd: Path, say: Callable[[float], None]) -> dict[str, Any]:
    """A command to its end: wall and processor seconds (all its processes), memory in MiB, output."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with subprocess.Popen(command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        watch = Watch(child, say)
        try:
            out, err = child.communicate()
        except BaseException:
            child.terminate()
            raise
        memory = watch.ended()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}:\n{(err or out).decode()[-3000:]}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.monotonic() - start, "cpu_seconds": used, **memory, "out": out.decode()}


# Measurements


@dataclass(frozen=True)
class Size:
    """One size, its places, and how its stages tell how far they are."""

    size: int
    cache: Path
    say: Callable[[float], None]

    @property
    def rows(self) -> Path:
        return self.cache / f"rows-{self.size}"

    @property
    def work(self) -> Path:
        return self.cache / f"work-{self.size}"

    @property
    def shards(self) -> Path:
        return self.work / "shards"

    def part(self, name: str, *arguments: object) -> dict[str, Any]:
        done = run([sys.executable, str(PARTS), name, *map(str, arguments)], self.work, self.say)
        return done | json.loads(done.pop("out").splitlines()[-1])


def prepared(at: Size, workers: int) -> dict[str, Any]:
    """`surefit prepare`, begun anew; the shards of two workers stay."""
    shutil.rmtree(at.shards, ignore_errors=True)
    config = config_of(at.work, "prepare", at.rows, at.shards)
    done = run([*COMMAND, "prepare", str(config), "--workers", str(workers), "--json"], at.work, at.say)
    made = json.loads(done.pop("out").splitlines()[-1])
    return done | paces(made["rows"], made["tokens"], done) | {"sha256": content(at.shards)}


def paces(rows: int, tokens: int, done: dict[str, Any]) -> dict[str, Any]:
    return {
        "rows": rows,
        "tokens": tokens,
        "rows_s": rows / done["seconds"],
        "rows_cpu_s": rows / done["cpu_seconds"],
    }


def peer(at: Size, part: str) -> dict[str, Any]:
    place = at.work / "peer"
    try:
        done = at.part(part, at.rows, place, at.shards)
    finally:
        for left in at.work.glob("peer*"):
            shutil.rmtree(left, ignore_errors=True)
    assert done["same"], f"the tokens of {part} are not those of the shards"
    return done | paces(done["rows"], done["tokens"], done)


def trained(at: Size, name: str, rows: Path, shards: Path | None) -> dict[str, Any]:
    """`surefit train`: seconds from its start to the line of its first step, and tokens/s of its steps."""
    config = config_of(at.work, name, rows, shards, STEPS)
    metrics, start = at.work / f"run-{name}" / "metrics.jsonl", time.monotonic()
    shutil.rmtree(metrics.parent, ignore_errors=True)
    found = None
    with subprocess.Popen(
        [*COMMAND, "train", str(config), "--json"],
        cwd=at.work, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        watch = Watch(child, at.say)
        while child.poll() is None and found is None:
            if metrics.is_file() and '"loss"' in metrics.read_text():
                found = time.monotonic() - start
            time.sleep(0.02)
        _, err = child.communicate()
        memory = watch.ended()
    if child.returncode:
        raise SystemExit(f"train ended with {child.returncode}:\n{err.decode()[-3000:]}")
    steps = [one for one in map(json.loads, metrics.read_text().splitlines()) if "tokens_per_second" in one][4:]
    pace = {"tokens_s": median(one["tokens_per_second"] for one in steps)}
    pace["step_seconds"] = median(one["seconds"] for one in steps)
    return {"first_step_seconds": found or time.monotonic() - start, **pace, **memory}


def training(at: Size, few: Path) -> dict[str, Any]:
    """From the shards, and from few rows in memory, whose second start is looked at: their tokens are in the cache."""
    trained(at, "memory", few, None)
    return {"shards": trained(at, "shards", at.rows, at.shards), "memory": trained(at, "memory", few, None)}


def killed(at: Size, rows: Path, kills: int) -> dict[str, Any]:
    """`kill -9` of all processes of `prepare` at moments over its whole length; then the same command to its end."""
    whole, again = at.work / "whole", at.work / "killed"
    command = [*COMMAND, "prepare", "--workers", "2"]
    seconds = run([*command, str(config_of(at.work, "whole", rows, whole))], at.work, at.say)["seconds"]
    expected, same, hit = content(whole), 0, 0
    config = config_of(at.work, "killed", rows, again)
    for number in range(kills):
        shutil.rmtree(again, ignore_errors=True)
        with subprocess.Popen(
            [*command, str(config)],
            cwd=at.work, env=environment(), start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as child:  # fmt: skip
            time.sleep(seconds * (number + 0.5) / kills)
            hit += child.poll() is None
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)
        run([*command, str(config)], at.work, at.say)
        same += content(again) == expected
        tell(f"  killed {number + 1} of {kills}: {same} with the same bytes")
    return {"moments": kills, "while_it_ran": hit, "same_bytes": same}


def content(directory: Path) -> str:
    """The hash of all files of all shards."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("shard-*/*")):
        if path.name != "meta.json":  # it names the place of the rows
            digest.update(f"{path.relative_to(directory)}".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def many(at: Size) -> dict[str, Any]:
    """10^9 rows in 10,000 shards that all are one, under as many names."""
    manifest = json.loads((at.shards / "manifest.json").read_text())
    place, per_shard = at.work / "many", MANY_ROWS // MANY_SHARDS
    shutil.rmtree(place, ignore_errors=True)
    real = place / "real"
    real.mkdir(parents=True)
    np.save(real / "input_ids.npy", np.resize(np.arange(20, dtype="<i4"), per_shard * 20))
    np.save(real / "supervised.npy", np.resize(np.array([0, 1], "u1"), per_shard * 20))
    np.save(real / "offsets.npy", np.arange(per_shard + 1, dtype="<i8") * 20)
    for number in range(MANY_SHARDS):
        (place / f"shard-{number:06d}").symlink_to("real")
    one = {"rows": per_shard, "tokens": per_shard * 20, "longest": 20, "repeat": 1, "sha256": "0" * 64}
    (place / "manifest.json").write_text(json.dumps(manifest | {"shards": [one] * MANY_SHARDS}))
    return at.part("many", place)


# Together


Measured = dict[str, dict[str, Any]]
"""Stage → what was measured, with `wall_seconds` and `load`."""


def stages_of(size: int, with_peer: bool, first: bool, kills: int) -> list[str]:
    """In their order; what does not depend on the size is measured with the smallest."""
    small = size <= WITH_PEERS
    names = ["rows", *(["one_worker"] if small else []), "two_workers"]
    names += ["datasets_map", "datatrove"] if small and with_peer else []
    return [*names, "feed", "training", *(["many", *(["killed"] if kills else [])] if first else [])]


def expected(stage: str, size: int, known: dict[str, Measured]) -> float:
    """Seconds that a stage takes, from the largest size that was measured, else as guessed."""
    for text in sorted(known, key=int, reverse=True):
        if stage in known[text] and stage in SECONDS_PER_GB and stage not in SECONDS:
            return float(known[text][stage]["wall_seconds"]) * size / int(text)
    return SECONDS.get(stage, 0) + SECONDS_PER_GB.get(stage, 0) * size / 1e9


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(size: int, options: argparse.Namespace, known: dict[str, Measured], names: list[str]) -> None:
    """The stages of one size that have not been measured, each kept as soon as it has ended."""
    own, cache = known.setdefault(str(size), {}), options.cache
    few = Size(min(size, int(options.kill_mb * 1e6)), cache, lambda _: None)

    def say(stage: str, seconds: float) -> None:
        done, of = len(list(at.shards.glob("shard-*"))), planned_shards(at.shards)
        left = seconds / done * (of - done) if done and stage in ("one_worker", "two_workers") else None
        left = max(0.0, expected(stage, size, known) - seconds) if left is None else left
        tell(f"  {stage}: {duration_text(seconds)}, about {duration_text(left)} left")

    for stage in [name for name in names if name not in own]:
        at = Size(size, cache, partial(say, stage))
        at.work.mkdir(parents=True, exist_ok=True)
        tell(f"{size / 1e9:g} GB, {stage}: about {duration_text(expected(stage, size, known))}")
        if stage != "rows":
            write_rows(at.rows, size)
            write_rows(few.rows, few.size)
        if stage in ("datasets_map", "datatrove", "feed", "training", "many") and not planned_shards(at.shards):
            prepared(at, 2)  # they have gone since they were measured
        start = time.monotonic()
        found = STAGES[stage](at, few.rows, options.kills)
        own[stage] = found | {"wall_seconds": time.monotonic() - start, "load": os.getloadavg()[0]}
        write_json(cache / "measured.json", known)
        tell(f"  {stage}: {duration_text(own[stage]['wall_seconds'])}")
    if "one_worker" in own:
        assert own["one_worker"]["sha256"] == own["two_workers"]["sha256"], "the bytes depend on the number of workers"
    shutil.rmtree(cache / f"work-{size}", ignore_errors=True)
    if size > WITH_PEERS:
        shutil.rmtree(cache / f"rows-{size}", ignore_errors=True)


def planned_shards(directory: Path) -> int:
    """How many there will be; 0 where none are begun."""
    try:
        return len(json.loads((directory / "plan.json").read_text())["tasks"])
    except (OSError, ValueError):
        return 0


def rows_written(at: Size) -> dict[str, Any]:
    return {"bytes": sum(path.stat().st_size for path in write_rows(at.rows, at.size).iterdir())}


STAGES: dict[str, Callable[[Size, Path, int], dict[str, Any]]] = {
    "rows": lambda at, few, kills: rows_written(at),
    "one_worker": lambda at, few, kills: prepared(at, 1),
    "two_workers": lambda at, few, kills: prepared(at, 2),
    "datasets_map": lambda at, few, kills: peer(at, "map"),
    "datatrove": lambda at, few, kills: peer(at, "trove"),
    "feed": lambda at, few, kills: at.part("feed", at.shards),
    "training": lambda at, few, kills: training(at, few),
    "many": lambda at, few, kills: many(at),
    "killed": lambda at, few, kills: killed(at, few, kills),
}


# The table


WORKERS = {
    "one_worker": "one worker", "two_workers": "two workers",
    "datasets_map": "`datasets.map(num_proc=2)`", "datatrove": "datatrove, two workers",
}  # fmt: skip


def ratios(one: Measured) -> Iterator[tuple[str, str]]:
    """Of rows/s, and of rows per processor second."""
    for name in ("one_worker", "datasets_map", "datatrove"):
        if name in one:
            wall, cpu = (one["two_workers"][key] / one[name][key] for key in ("rows_s", "rows_cpu_s"))
            yield f"two workers to {WORKERS[name]}", f"{wall:.2f} × its rows/s, {cpu:.2f} × per processor second"


def lines(known: dict[str, Measured], sizes: list[int]) -> Iterator[tuple[str, str]]:
    """(what, how much) of every measurement."""
    for size in sizes:
        one = known[str(size)]
        gb = f"{one['rows']['bytes'] / 1e9:.2g} GB: "
        for name, words in WORKERS.items():
            if name in one:
                of = one[name]
                paces = f"{of['rows_s']:,.0f} rows/s, {of['rows_cpu_s']:,.0f} per processor second"
                memory = f"largest process {of['peak_mib']:,} MiB, all {of['together_mib']:,}"
                tokens = f"{of['rows']:,} rows, {of['tokens']:,} tokens"
                yield (
                    gb + words,
                    f"{tokens} in {duration_text(of['seconds'])}: {paces}; {memory}; load {of['load']:.1f}",
                )
        yield from ((gb + what, much) for what, much in ratios(one))
        feed, run = one["feed"], one["training"]
        yield (
            f"{gb}rows of {feed['bytes'] / 1e9:.2g} GB of shards",
            f"first batch after {feed['ready_seconds']:.2f} s; a row {feed['row_seconds'] * 1e6:.0f} µs, from memory "
            f"{feed['memory_row_seconds'] * 1e6:.0f}; peak {feed['peak_mib']:,} MiB",
        )
        for name, words in (("shards", "training from them"), ("memory", "training from few rows in memory")):
            of = run[name]
            yield (
                gb + words,
                f"first step after {of['first_step_seconds']:.1f} s, {of['tokens_s']:,.0f} tokens/s, a step "
                f"{of['step_seconds']:.2f} s; peak {of['peak_mib']:,} MiB",
            )
        if "many" in one:
            of = one["many"]
            yield (
                f"{of['rows']:,} virtual rows in {of['shards']:,} shards",
                f"open in {of['open_seconds']:.2f} s, {of['rows_s']:,.0f} shuffled rows/s, peak {of['peak_mib']:,} MiB "
                f"({of['start_mib']:,} at the start)",
            )
        if "killed" in one:
            of = one["killed"]
            yield (
                f"`kill -9` at {of['moments']} moments",
                f"{of['while_it_ran']} while it ran; {of['same_bytes']} times the same bytes",
            )
    if len(sizes) > 1:
        peaks = [known[str(size)]["two_workers"]["peak_mib"] for size in sizes]
        yield "peak of the largest size to the smallest", f"{peaks[-1] / peaks[0]:.2f}"


def into_docs(found: list[tuple[str, str]]) -> None:
    """Put the table, and how it was made, between its two marks in docs/data-at-scale.md."""
    before, mark, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (mark and end):
        raise SystemExit(f"{DOCS} has no {BEGIN.strip()} and {END.strip()}")
    cores = len(os.sched_getaffinity(0))
    command = re.sub(r" --cache[ =]\S+", "", " ".join(["python", "benchmarks/data_scale.py", *sys.argv[1:]]))
    head = f"`{command}` on {time.strftime('%Y-%m-%d')}, {cores} cores; the start of the processes is included.\n\n"
    table = "| | |\n| --- | --- |\n" + "".join(f"| {what} | {much} |\n" for what, much in found)
    DOCS.write_text(before + BEGIN + head + table + END + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, action="append")
    parser.add_argument("--rows-mb", type=float, action="append")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--kill-mb", type=float, default=32)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "surefit-data-scale")
    parser.add_argument("--no-peer", action="store_true", help="leave out datasets.map and datatrove")
    parser.add_argument("--anew", action="store_true", help="forget what was measured before")
    parser.add_argument("--docs", action="store_true", help=f"write the table into {DOCS.name}")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = sorted([int(gb * 1e9) for gb in options.gb or ()] + [int(mb * 1e6) for mb in options.rows_mb or ()])
    sizes = sizes or [10**9, 10**10]
    options.cache = options.cache.resolve()
    kept = options.cache / "measured.json"
    known: dict[str, Measured] = json.loads(kept.read_text()) if kept.is_file() and not options.anew else {}
    todo = {size: stages_of(size, not options.no_peer, size == sizes[0], options.kills) for size in sizes}
    left = [(name, size) for size, names in todo.items() for name in names if name not in known.get(str(size), {})]
    tell(f"{len(left)} stages, about {duration_text(math.fsum(expected(*one, known) for one in left))}")
    for size, names in todo.items():
        if any(name not in known.get(str(size), {}) for name in names):
            measure(size, options, known, names)
    found = list(lines(known, sizes))
    if options.docs:
        into_docs(found)
    if options.json:
        print(json.dumps({str(size): known[str(size)] for size in sizes}))
    else:
        print("\n".join(f"{what}: {much}" for what, much in found))


if __name__ == "__main__":
    main()
