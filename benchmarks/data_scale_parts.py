"""The rows of benchmarks/data_scale.py, and what it measures in a process of its own: the peers, and training's reader.

    python benchmarks/data_scale_parts.py map|trove|many|feed ARGUMENT…

The last line of the output is a JSON object.
"""

from __future__ import annotations

import glob
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

MODEL = "surefit/nano"
COMPARED = 1000
"""Rows of a peer that are compared with those of the shards."""
LONGEST = 4096
"""Tokens; longer rows are left out."""
FILES = 8
"""Of the rows: small ones are still several shards."""
BATCH = 256
"""Rows that a peer tokenises at once, as SureFit does."""
_TOKENIZERS: dict[str, Any] = {}


# Rows


def conversation(words: list[str], rng: random.Random) -> list[dict[str, str]]:
    """One to four exchanges: questions of about 30 words, answers of about 120."""
    messages = []
    for _ in range(rng.randint(1, 4)):
        for role, typical in (("user", 30), ("assistant", 120)):
            length = max(3, min(600, int(typical * rng.lognormvariate(0, 0.7))))
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
    temporary = path.with_suffix(".part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(partial(write_file, temporary, size // FILES), range(FILES)))
    temporary.rename(path)
    return path


def write_file(directory: Path, size: int, number: int) -> None:
    """One of the files."""
    words, rng = vocabulary(random.Random(0)), random.Random(number)
    with (directory / f"{number}.jsonl").open("w") as file:
        written = 0
        while written < size:
            written += file.write(json.dumps({"messages": conversation(words, rng)}) + "\n")


# Tokens


def tokenizer_of(model: str) -> Any:
    """The tokenizer, loaded once in each process."""
    from surefit.config.schema import ModelSection
    from surefit.model.tokenizer import load_tokenizer

    if model not in _TOKENIZERS:
        _TOKENIZERS[model] = load_tokenizer(ModelSection(name_or_path=model))
    return _TOKENIZERS[model]


def segments(tokenizer: Any, messages: list[dict[str, str]]) -> Iterator[tuple[str, bool]]:
    """Template and mask of a conversation, as a careful user writes it: (text, whether it is learnt)."""
    done = 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
        yield whole[done : len(prompt)], False
        yield whole[len(prompt) :], True
        done = len(whole)


# datasets.map


def peer_batch(batch: dict[str, list[Any]], model: str) -> dict[str, list[Any]]:
    """Ids and labels of conversations; each segment is tokenised by itself."""
    tokenizer = tokenizer_of(model)
    pieces = [(n, text, learnt) for n, one in enumerate(batch["messages"]) for text, learnt in segments(tokenizer, one)]
    encoded = tokenizer([text for _, text, _ in pieces], add_special_tokens=False)["input_ids"]
    ids: list[list[int]] = [[] for _ in batch["messages"]]
    labels: list[list[int]] = [[] for _ in batch["messages"]]
    for (number, _, learnt), piece in zip(pieces, encoded, strict=True):
        ids[number] += piece
        labels[number] += piece if learnt else [-100] * len(piece)
    fitting = [number for number, one in enumerate(ids) if len(one) <= LONGEST]
    return {"input_ids": [ids[n] for n in fitting], "labels": [labels[n] for n in fitting]}


def part_map(rows: str, cache: str, shards: str) -> dict[str, Any]:
    """`datasets.map` with two processes: rows, tokens, and whether the first are those of the shards."""
    import datasets
    import numpy as np

    from surefit.data.tokens.shard_manifest import ShardedTokens

    found = datasets.load_dataset("json", data_files=f"{rows}/*.jsonl", split="train", cache_dir=cache)
    kind = datasets.Features({name: datasets.Sequence(datasets.Value("int32")) for name in ("input_ids", "labels")})
    made = found.map(
        peer_batch, batched=True, batch_size=BATCH, num_proc=2, remove_columns=found.column_names,
        features=kind, load_from_cache_file=False, fn_kwargs={"model": MODEL},
    )  # fmt: skip
    own_rows, total = ShardedTokens(Path(shards)), 0
    for batch in made.with_format("arrow").iter(10_000):
        total += len(batch["input_ids"].combine_chunks().flatten())
    same = all(
        np.array_equal(own_rows[i][0], made[i]["input_ids"]) and np.array_equal(own_rows[i][1], made[i]["labels"])
        for i in range(min(COMPARED, len(own_rows)))
    )
    return {"rows": len(made), "tokens": total, "same": same}


# datatrove


def adapted(_: Any, row: dict[str, Any], path: str, number: int | str) -> dict[str, Any]:
    """A row as datatrove's document: the text that the template writes, and where the loss does not fall."""
    text, given = "", []
    for piece, learnt in segments(tokenizer_of(MODEL), row["messages"]):
        if not learnt:
            given.append((len(text), len(text) + len(piece)))
        text += piece
    return {"text": text, "id": f"{path}/{number}", "metadata": {"no_loss_ranges": given}}


def part_trove(rows: str, out: str, shards: str) -> dict[str, Any]:
    """datatrove's reader and `DocumentTokenizer` with two workers, its masks made from `no_loss_ranges`."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    from surefit import nano

    steps = [
        JsonlReader(rows, adapter=adapted, glob_pattern="*.jsonl"),
        DocumentTokenizer(
            out, str(nano.PATH / "tokenizer.json"), shuffle_documents=False, save_loss_metadata=True,
            save_final_metadata=False, batch_size=BATCH,
        ),
    ]  # fmt: skip
    # Spawned, because the processor time of a fork server's children reaches nobody.
    LocalPipelineExecutor(steps, tasks=FILES, workers=2, logging_dir=f"{out}-logs", start_method="spawn").run()
    made = list(troved(out, shards))
    return {"rows": sum(rows for rows, _, _ in made), "tokens": sum(n for _, n, _ in made), "same": made[0][2]}


def troved(out: str, shards: str) -> Iterator[tuple[int, int, bool]]:
    """(rows, tokens, whether the first are those of the shards) of each of datatrove's files."""
    import numpy as np

    from surefit.data.tokens.shard_manifest import ShardedTokens

    own_rows = ShardedTokens(Path(shards))
    for path in sorted(glob.glob(f"{out}/*.ds")):
        ids, learnt = np.memmap(path, "<u2", "r"), np.memmap(f"{path}.loss", "?", "r")
        ends = np.fromfile(f"{path}.index", "<u8").astype(np.int64)
        pairs = [(a, b) for a, b in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True) if b - a <= LONGEST]
        compared = zip(pairs[:COMPARED], range(len(own_rows)), strict=False)
        same = all(
            np.array_equal(own_rows[n][0], ids[a:b]) and np.array_equal(own_rows[n][1] != -100, learnt[a:b])
            for (a, b), n in compared
        )
        yield len(pairs), sum(b - a for a, b in pairs), same


# Training's reader


def part_many(shards: str) -> dict[str, Any]:
    """10^9 rows, which are one shard's again and again: seconds and MiB."""
    from surefit.data.tokens.shard_manifest import ShardedTokens, read_shard_manifest
    from surefit.train.sampler import batch_rows, fingerprint_training_rows

    directory = Path(shards)
    before, start = peak_mib(), time.monotonic()
    rows = ShardedTokens(directory, read_shard_manifest(directory))
    found = fingerprint_training_rows(rows)
    opened = time.monotonic() - start
    first = rows[batch_rows(0, 0, len(rows), 256)[0]]
    one = time.monotonic() - start
    batches = 100
    tokens = sum(len(rows[row][0]) for step in range(batches) for row in batch_rows(step, 0, len(rows), 256))
    spent = time.monotonic() - start - one
    assert len(found.lengths) == len(rows)
    assert len(first[0])
    about = {"rows": len(rows), "shards": len(rows.rows), "open_seconds": opened, "first_row_seconds": one}
    return about | {"rows_s": batches * 256 / spent, "tokens_read": tokens, "start_mib": before, "peak_mib": peak_mib()}


def part_feed(shards: str) -> dict[str, Any]:
    """Training's rows from shards and from memory: seconds to the first batch, and for each row that is read."""
    from surefit.data.tokens.shard_manifest import ShardedTokens, read_shard_manifest
    from surefit.train.sampler import batch_rows, fingerprint_training_rows

    start = time.monotonic()
    rows = ShardedTokens(Path(shards), read_shard_manifest(Path(shards)))
    fingerprint_training_rows(rows)
    wanted = [row for step in range(64) for row in batch_rows(step, 0, len(rows), 64)]
    held = {row: rows[row] for row in wanted[:64]}
    ready = time.monotonic() - start
    start = time.monotonic()
    held |= {row: rows[row] for row in wanted[64:]}
    cold = (time.monotonic() - start) / len(wanted[64:])
    start = time.monotonic()
    for row in wanted:
        ids, labels = held[row]
        ids.copy(), labels.copy()  # as a row from shards is one
    memory = (time.monotonic() - start) / len(wanted)
    sizes = {
        "tokens": rows.stats.tokens,
        "bytes": sum(one.stat().st_size for one in Path(shards).glob("shard-*/*.npy")),
    }
    return sizes | {"ready_seconds": ready, "row_seconds": cold, "memory_row_seconds": memory, "peak_mib": peak_mib()}


def peak_mib() -> int:
    """The most that this process has had in memory (VmHWM)."""
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    PARTS = {"map": part_map, "trove": part_trove, "many": part_many, "feed": part_feed}
    print(json.dumps(PARTS[sys.argv[1]](*sys.argv[2:])))
