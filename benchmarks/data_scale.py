"""Tokens in shards: rows/s of a core, memory, start, and `kill -9`, against `datasets.map`.

    python benchmarks/data_scale.py [--gb 1 --gb 10 | --rows-mb 100] [--kills 20] [--no-peer] [--cache DIR] [--json]

Chat rows of seeded words, one to four exchanges of log-normal lengths, are written once for each size, in eight files.
Every measurement has a process of its own. The peer renders the same template, tokenises the same segments and masks
the same tokens, a batch of 256 rows at a time, with `datasets.map(batched=True, num_proc=2)`; its first 1,000 rows are
compared with the shards'. All tokenizers have one thread, so that two workers are two cores. datatrove's
`DocumentTokenizer` writes the tokens of texts, without template and label mask: it cannot do the same work and is not
measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

MODEL = "surefit/nano"
CONFIG = """recipe: sft
model: {{name_or_path: surefit/nano, dtype: float32}}
adapter: {{r: 4}}
data: {{train: {train}, prepared: {prepared}, max_length: {longest}, eval: {scored}}}
train: {{max_steps: 1, global_batch_size: 2, per_device_train_batch_size: 1}}
evaluate: {{gate: null}}
output_dir: {output}
"""
MANY_ROWS, MANY_SHARDS = 10**9, 10_000
COMPARED = 1000
LONGEST = 4096
"""Tokens; longer rows are left out."""
FILES = 8
"""Of the rows: small ones are still several shards."""
COMMAND = [sys.executable, "-m", "surefit"]


# Rows


def conversation(words: list[str], rng: random.Random) -> list[dict[str, str]]:
    """One to four exchanges: questions of about 30 words, answers of about 120."""
    messages = []
    for _ in range(rng.randint(1, 4)):
        for role, median in (("user", 30), ("assistant", 120)):
            length = max(3, min(600, int(median * rng.lognormvariate(0, 0.7))))
            start = rng.randrange(len(words) - length)
            messages.append({"role": role, "content": " ".join(words[start : start + length])})
    return messages


def vocabulary(rng: random.Random) -> list[str]:
    """A long text of 20,000 made-up words, some far more frequent than others."""
    parts = ["ta", "re", "ing", "lo", "mi", "con", "ser", "va", "de", "pos", "ti", "er", "an", "un", "st", "all"]
    known = ["".join(rng.choices(parts, k=rng.randint(1, 4))) for _ in range(20_000)]
    return [known[int(20_000 * rng.random() ** 3)] + rng.choice(["", "", "", "", ",", "."]) for _ in range(200_000)]


def write_rows(path: Path, size: int) -> Path:
    """A directory with JSON Lines of about `size` bytes in `FILES` files, unless it is there."""
    if path.exists():
        return path
    rng = random.Random(0)
    words, temporary = vocabulary(rng), path.with_suffix(".part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for number in range(FILES):
        with (temporary / f"{number}.jsonl").open("w") as file:
            written = 0
            while written < size // FILES:
                written += file.write(json.dumps({"messages": conversation(words, rng)}) + "\n")
    temporary.rename(path)
    return path


def config_of(work: Path, name: str, train: Path) -> Path:
    """A config whose shards belong in WORK/NAME."""
    path = work / f"{name}.yaml"
    scored = work / "scored.jsonl"  # so that no row is held out, and the peer's are the same
    scored.write_text(json.dumps({"messages": conversation(vocabulary(rng := random.Random(1)), rng)}) + "\n")
    places = {"train": train, "prepared": work / name, "output": work / f"run-{name}", "scored": scored}
    path.write_text(CONFIG.format(**places, longest=LONGEST))
    return path


# Processes


def environment() -> dict[str, str]:
    return {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def descendants(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = [one for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()]
    except OSError:
        return
    for child in children:
        yield from descendants(int(child))


def peak_of(pid: int) -> int:
    """The most that a process has had in memory (VmHWM), in MiB; 0: it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM")), 0)


def run(command: list[str], cwd: Path) -> dict[str, Any]:
    """A command to its end: wall and processor seconds (all its processes), the peak of the largest process in MiB."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    print(" ".join(command[1:]), file=sys.stderr)  # what is being measured
    peaks: dict[int, int] = {}
    with subprocess.Popen(command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        watch = threading.Thread(target=_watch, args=(child, peaks))
        watch.start()
        out, err = child.communicate()
        watch.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}:\n{(err or out).decode()[-3000:]}")
    return {
        "seconds": time.monotonic() - start,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_mib": max(peaks.values(), default=0),
        "out": out.decode(),
    }


def _watch(child: subprocess.Popen[bytes], peaks: dict[int, int]) -> None:
    while child.poll() is None:
        for pid in descendants(child.pid):
            peaks[pid] = max(peaks.get(pid, 0), peak_of(pid))
        time.sleep(0.1)


def own(part: str, *arguments: str) -> list[str]:
    return [sys.executable, __file__, "--part", part, *arguments]


# Measurements


def prepared(work: Path, rows: Path, workers: int) -> dict[str, Any]:
    name = f"shards-{workers}"
    config = config_of(work, name, rows)
    done = run([*COMMAND, "prepare", str(config), "--workers", str(workers), "--json"], work)
    made = json.loads(done.pop("out"))
    return done | _paces(made["rows"], made["tokens"], done, workers) | {"sha256": content(work / name)}


def _paces(rows: int, tokens: int, done: dict[str, Any], workers: int) -> dict[str, Any]:
    return {
        "rows": rows,
        "tokens": tokens,
        "rows_s": rows / done["seconds"],
        "rows_s_core": rows / done["seconds"] / workers,
        "rows_cpu_s": rows / done["cpu_seconds"],
    }


def mapped(work: Path, rows: Path) -> dict[str, Any]:
    cache = work / "datasets"
    done = run(own("map", str(rows), str(cache), str(work / "shards-1")), work)
    made = json.loads(done.pop("out").splitlines()[-1])
    shutil.rmtree(cache, ignore_errors=True)
    return done | _paces(made["rows"], made["tokens"], done, 2) | {"same_rows": made["same"]}


def first_step(work: Path, rows: Path) -> dict[str, Any]:
    """From the start of `surefit train` to the line of its first step."""
    config = config_of(work, "shards-1", rows)
    metrics, start = work / "run-shards-1" / "metrics.jsonl", time.monotonic()
    found = None
    with subprocess.Popen(
        [*COMMAND, "train", str(config), "--json"],
        cwd=work, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        while child.poll() is None and found is None:
            if metrics.is_file() and '"loss"' in metrics.read_text():
                found = time.monotonic() - start
            time.sleep(0.02)
        _, err = child.communicate()
    if child.returncode:
        raise SystemExit(f"train ended with {child.returncode}:\n{err.decode()[-3000:]}")
    return {"seconds": found or time.monotonic() - start}


def killed(work: Path, rows: Path, kills: int) -> dict[str, Any]:
    """`kill -9` of all processes of `prepare` at moments over its whole length; then the same command to its end."""
    whole = config_of(work, "whole", rows)
    command = [*COMMAND, "prepare", "--workers", "2"]
    seconds = run([*command, str(whole)], work)["seconds"]
    expected, same, hit = content(work / "whole"), 0, 0
    for number in range(kills):
        config = config_of(work, "killed", rows)
        shutil.rmtree(work / "killed", ignore_errors=True)
        with subprocess.Popen(
            [*command, str(config)],
            cwd=work, env=environment(), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as child:  # fmt: skip
            time.sleep(seconds * (number + 0.5) / kills)
            hit += child.poll() is None
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)
        run([*command, str(config)], work)
        same += content(work / "killed") == expected
    return {"moments": kills, "while_it_ran": hit, "same_bytes": same, "seconds": seconds}


def content(directory: Path) -> str:
    """The hash of all files of all shards."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("shard-*/*")):
        if path.name != "meta.json":  # it names the place of the rows
            digest.update(f"{path.relative_to(directory)}".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


# What runs in a process of its own


def part_map(rows: str, cache: str, shards: str) -> None:
    """The peer; prints rows, tokens, and whether the first are those of the shards."""
    import datasets

    from surefit.data.sharded import ShardedTokens

    found = datasets.load_dataset("json", data_files=f"{rows}/*.jsonl", split="train", cache_dir=cache)
    made = found.map(
        _peer_batch, batched=True, batch_size=256, num_proc=2, remove_columns=found.column_names,
        load_from_cache_file=False, fn_kwargs={"model": MODEL},
    )  # fmt: skip
    own_rows, total = ShardedTokens(Path(shards)), 0
    for batch in made.with_format("arrow").iter(10_000):
        total += len(batch["input_ids"].combine_chunks().flatten())
    same = all(
        np.array_equal(own_rows[i][0], made[i]["input_ids"]) and np.array_equal(own_rows[i][1], made[i]["labels"])
        for i in range(min(COMPARED, len(own_rows)))
    )
    print(json.dumps({"rows": len(made), "tokens": total, "same": same}))


_TOKENIZERS: dict[str, Any] = {}


def _peer_batch(batch: dict[str, list[Any]], model: str) -> dict[str, list[Any]]:
    """Template, tokens and labels of conversations, as a careful user writes it."""
    from surefit.config.schema import ModelSection
    from surefit.model.tokenizer import load_tokenizer

    if model not in _TOKENIZERS:
        _TOKENIZERS[model] = load_tokenizer(ModelSection(name_or_path=model))
    tokenizer = _TOKENIZERS[model]
    segments: list[tuple[int, str, bool]] = []
    for number, messages in enumerate(batch["messages"]):
        done = 0
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True, tokenize=False)
            whole = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
            segments += [(number, whole[done : len(prompt)], False), (number, whole[len(prompt) :], True)]
            done = len(whole)
    encoded = tokenizer([text for _, text, _ in segments], add_special_tokens=False)["input_ids"]
    ids: list[list[int]] = [[] for _ in batch["messages"]]
    labels: list[list[int]] = [[] for _ in batch["messages"]]
    for (number, _, learnt), piece in zip(segments, encoded, strict=True):
        ids[number] += piece
        labels[number] += piece if learnt else [-100] * len(piece)
    fitting = [number for number, one in enumerate(ids) if len(one) <= LONGEST]
    return {"input_ids": [ids[n] for n in fitting], "labels": [labels[n] for n in fitting]}


def part_many(shards: str) -> None:
    """Training's reader over 10^9 rows, which are one shard's again and again; prints seconds and MiB."""
    from surefit.data.sharded import ShardedTokens, read_manifest
    from surefit.train.sampler import batch_rows, survey

    directory = Path(shards)
    before, start = peak_of(os.getpid()), time.monotonic()
    rows = ShardedTokens(directory, read_manifest(directory))
    found = survey(rows)
    opened = time.monotonic() - start
    first = rows[batch_rows(0, 0, len(rows), 256)[0]]
    one = time.monotonic() - start
    batches = 100
    tokens = sum(len(rows[row][0]) for step in range(batches) for row in batch_rows(step, 0, len(rows), 256))
    spent = time.monotonic() - start - one
    assert len(found.lengths) == len(rows)
    assert len(first[0])
    about = {"rows": len(rows), "shards": len(rows.rows), "open_seconds": opened, "first_row_seconds": one}
    memory = {"start_mib": before, "peak_mib": peak_of(os.getpid())}
    print(json.dumps(about | {"rows_s": batches * 256 / spent, "tokens_read": tokens} | memory))


def virtual(work: Path) -> Path:
    """10^9 rows in 10,000 shards that all are one, under as many names."""
    from surefit.data.sharded import read_manifest

    manifest = json.loads((work / "shards-1" / "manifest.json").read_text())
    place, per_shard = work / "many", MANY_ROWS // MANY_SHARDS
    real = place / "real"
    real.mkdir(parents=True)
    np.save(real / "input_ids.npy", np.resize(np.arange(20, dtype="<i4"), per_shard * 20))
    np.save(real / "supervised.npy", np.resize(np.array([0, 1], "u1"), per_shard * 20))
    np.save(real / "offsets.npy", np.arange(per_shard + 1, dtype="<i8") * 20)
    for number in range(MANY_SHARDS):
        (place / f"shard-{number:06d}").symlink_to("real")
    one = {"rows": per_shard, "tokens": per_shard * 20, "longest": 20, "repeat": 1, "sha256": "0" * 64}
    (place / "manifest.json").write_text(json.dumps(manifest | {"shards": [one] * MANY_SHARDS}))
    assert len(read_manifest(place).shards) == MANY_SHARDS
    return place


# Together


def measure(size: int, cache: Path, kills: int, kill_size: int, with_peer: bool) -> dict[str, Any]:
    rows, work = write_rows(cache / f"rows-{size}", size), cache / f"work-{size}-{os.getpid()}"
    few = write_rows(cache / f"rows-{min(size, kill_size)}", min(size, kill_size))
    work.mkdir()
    try:
        one, two = prepared(work, rows, 1), prepared(work, rows, 2)
        shutil.rmtree(work / "shards-2")
        peer = mapped(work, rows) if with_peer else None
        step = first_step(work, rows)
        many = json.loads(run(own("many", str(virtual(work))), work)["out"])
        kill = killed(work, few, kills)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    ratios = {"two_workers_to_one": two["rows_s"] / one["rows_s"]}
    assert one["sha256"] == two["sha256"], "the bytes depend on the number of workers"
    if peer is not None:
        assert peer["same_rows"], "the peer's tokens are not those of the shards"
        ratios["to_datasets_map"] = two["rows_s"] / peer["rows_s"]
        ratios["to_datasets_map_per_cpu_second"] = two["rows_cpu_s"] / peer["rows_cpu_s"]
    return {
        "bytes": sum(path.stat().st_size for path in rows.iterdir()),
        "load": os.getloadavg()[0], "one_worker": one, "two_workers": two,
        "datasets_map": peer, "first_step": step, "many": many, "killed": kill, "ratios": ratios,
    }  # fmt: skip


def lines(found: list[dict[str, Any]]) -> Iterator[str]:
    for one in found:
        yield f"{one['bytes'] / 1e9:.2f} GB of rows, load {one['load']:.1f}"
        for name in ("one_worker", "two_workers", "datasets_map"):
            if (of := one[name]) is None:
                continue
            paces = f"{of['rows_s']:,.0f} rows/s, {of['rows_cpu_s']:,.0f} rows per processor second"
            yield f"  {name:14} {of['seconds']:8.1f} s  {paces}, peak {of['peak_mib']:,} MiB"
        yield "  ratios: " + ", ".join(f"{name} {value:.2f}" for name, value in one["ratios"].items())
        yield f"  first training step after {one['first_step']['seconds']:.1f} s"
        many, kill = one["many"], one["killed"]
        yield (
            f"  {many['rows']:,} rows: open in {many['open_seconds']:.2f} s, peak {many['peak_mib']:,} MiB "
            f"(at the start {many['start_mib']:,}), {many['rows_s']:,.0f} shuffled rows/s"
        )
        yield f"  killed at {kill['moments']} moments ({kill['while_it_ran']} at work): {kill['same_bytes']} same bytes"
    if len(found) > 1:
        peaks = [one["two_workers"]["peak_mib"] for one in found]
        yield f"peak of the largest to the smallest: {peaks[-1] / peaks[0]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, action="append")
    parser.add_argument("--rows-mb", type=float, action="append")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--kill-mb", type=float, default=32)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "surefit-data-scale")
    parser.add_argument("--no-peer", action="store_true", help="leave out datasets.map, which needs the room twice")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        parts: dict[str, Callable[..., None]] = {"map": part_map, "many": part_many}
        parts[options.part[0]](*options.part[1:])
        return
    sizes = [int(gb * 1e9) for gb in options.gb or ()] + [int(mb * 1e6) for mb in options.rows_mb or ()]
    kill_size = int(options.kill_mb * 1e6)
    cache = options.cache.resolve()
    found = [
        measure(size, cache, options.kills, kill_size, not options.no_peer) for size in sorted(sizes or [10**9, 10**10])
    ]
    print(json.dumps(found, indent=2) if options.json else "\n".join(lines(found)))


if __name__ == "__main__":
    main()
