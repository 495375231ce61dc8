"""SureFit beside TRL and PEFT on a real model: the same rows, order, learning rates and steps, and the same merge.

    python benchmarks/real_peer.py [--model DIR] [--steps 20] [--json] [--out DIR]

Training: float32 on the CPU, LoRA of rank 16 on all linear layers from the same factors, function-calling rows in the
same order, four to a step, the loss of the answers only, a cosine from 1e-3. Each run is a process of its own, in the
order SureFit, TRL, TRL, SureFit; a stack whose first loss misses that of plain transformers is void (throughput.py,
whose stacks these are). TRL is tuned: without gradient checkpointing, which it has by default and which takes time, and
a row at a time, because it would pad four.

The loss curves must agree within what the order of the sums explains. How much that is is measured in the same runs:
the second run of each stack starts with every weight moved by about as much as rounding does (the share of itself by
which the certificate of a merge moves it, docs/merge.md), and Adam, which divides a gradient by its own size, makes
more of it with every step. A loss may differ between the stacks by four times the largest difference that this movement
has made within either up to that step, and always by a share of 1e-4.

Merge: TRL's adapter, by `surefit merge` with its certificate and by PEFT's merge_and_unload and save_pretrained
(merge_memory.py).

Exits with 1 where a stack is void or the curves disagree. The rows are those of the shared data beside this repository,
or else the package's own samples.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import merge_memory
import numpy as np
import throughput
from throughput import Workload

from surefit.core.rundir import read_json, write_json

SHARED = Path(__file__).parents[2] / "shared/data/function_calling/xlam/xlam_shape_from_bfcl.jsonl"
SAMPLES = "surefit/function-calling-train"
ORDER = ("surefit", "trl-tuned", "trl-tuned", "surefit")
LENGTH, BATCH, WARMUP = 512, 4, 2
SAFETY, LEAST = 4.0, throughput.TOLERANCE["float32"][0]
READ = 16
"""Rows that the merged models read."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="surefit/smollm2-135m-instruct", help="a name that SureFit knows, or a path")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--out", type=Path, help="where everything is kept; called again, it goes on where it was killed"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="real-peer-") as temporary:
        folder = options.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report = compare(folder, options.model, options.steps)
    print(json.dumps(report) if options.json else text(report))
    sys.exit(any(row["void"] for row in report["rows"]) or not report["curves"]["agree"])


def compare(folder: Path, model: str, steps: int) -> dict[str, Any]:
    from surefit.model.tokenizer import model_path

    workload = Workload(
        model_path(model), LENGTH, BATCH, 1, 16, "float32", "none", WARMUP, steps - WARMUP, None, 1e-3, "cosine"
    )
    rows = kept(folder, "rows", lambda: write_rows(folder, workload))
    job: dict[str, Any] = {"workload": asdict(workload), "folder": str(folder), "set": [], "seed": 0}
    if rows["job"] != job["workload"]:
        sys.exit(f"{folder} is of another comparison: name another folder")
    reference, ceiling = (
        kept(folder, name, partial(throughput.run_child, name, job)) for name in ("reference", "ceiling")
    )
    runs: dict[str, list[dict[str, Any]]] = {stack: [] for stack in ORDER}
    for place, stack in enumerate(ORDER, 1):
        run = partial(throughput.run_child, stack, job | {"nudged": bool(runs[stack])})
        runs[stack].append(kept(folder, f"{place}-{stack}", run))
    found = [
        throughput.summary(stack, results, reference, ceiling, throughput.TOLERANCE["float32"])
        for stack, results in runs.items()
    ]
    return {
        "model": model, "data": rows["source"], "tokens": rows["tokens"], "steps": steps, "reference": reference,
        "ceiling": ceiling, "rows": found,
        "curves": curves(*(runs[stack] for stack in ("surefit", "trl-tuned"))),
        "merge": kept(folder, "merges", lambda: merges(folder)),
        "versions": throughput.versions(),
    }  # fmt: skip


def kept(folder: Path, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What an earlier call has found out, or what is found out now."""
    file = folder / f"{name}.json"
    if file.is_file():
        found: dict[str, Any] = read_json(file)
        return found
    made = make()
    if "error" in made:
        sys.exit(f"{name} failed: {made['error']}")
    write_json(file, made)
    return made


def write_rows(folder: Path, workload: Workload) -> dict[str, Any]:
    """The first rows that are short enough, as the stacks read them."""
    import yaml

    from surefit.data.rows.layouts import read_splits
    from surefit.data.tokens.dataset import build_dataset
    from surefit.model.tokenizer import load_tokenizer
    from surefit.stages.run_context import load_checked_run

    source = SHARED if SHARED.is_file() else SAMPLES
    settings = {
        "recipe": "function_calling", "model": {"name_or_path": workload.model, "dtype": workload.dtype},
        "data": {"train": str(source), "max_length": LENGTH}, "hardware": {"gpu": "cpu"},
        "output_dir": str(folder / "run"),
    }  # fmt: skip
    path = folder / "rows.yaml"
    path.write_text(yaml.safe_dump(settings))
    run = load_checked_run(path)
    config = run.resolved.config
    examples, held_out = read_splits(config.data, run.recipe, config.train.seed, run.rows, run.mixed)
    tokenizer = load_tokenizer(config.model)
    wanted = BATCH * (workload.warmup + workload.steps)
    data = build_dataset(examples, tokenizer, max_length=LENGTH)
    if len(data) < wanted:
        sys.exit(f"{source} has {len(data)} rows of at most {LENGTH} tokens, and {wanted} are needed: fewer --steps")
    rows = [data[index] for index in range(wanted)]
    np.save(folder / "lengths.npy", [len(ids) for ids, _ in rows])
    for place, name in enumerate(("ids", "labels")):
        np.save(folder / f"{name}.npy", np.concatenate([row[place] for row in rows]))
    read = build_dataset(held_out, tokenizer, max_length=LENGTH)
    chosen = [read[index][0].tolist() for index in range(min(READ, len(read)))]
    (folder / "sequences.json").write_text(json.dumps(chosen))
    tokens = sum(len(ids) for ids, _ in rows)
    return {"source": Path(source).name, "tokens": tokens, "job": asdict(workload)}


def curves(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """The losses of both first runs, step by step, with how far they may be apart."""
    pairs = list(zip(ours[0]["losses"], theirs[0]["losses"], strict=True))
    moved = [
        max(abs(first - second) for first, second in each)
        for each in zip(*(zip(*(run["losses"] for run in runs), strict=True) for runs in (ours, theirs)), strict=True)
    ]
    steps = [
        {"surefit": our, "trl": their, "apart": abs(our - their), "allowed": max(SAFETY * most, LEAST * our)}
        for (our, their), most in zip(pairs, accumulate(moved, max), strict=True)
    ]
    return {"agree": all(step["apart"] <= step["allowed"] for step in steps), "steps": steps}


def merges(folder: Path) -> dict[str, Any]:
    """Both merges of the adapter that TRL trained."""
    place = folder / "merge"
    place.mkdir(exist_ok=True)
    for name, target in (("base", "model"), ("adapter", "peer"), ("sequences.json", "sequences.json")):
        (place / name).unlink(missing_ok=True)
        (place / name).symlink_to((folder / target).resolve())
    return merge_memory.compared(place)


def text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['model']}: {report['steps']} steps of {BATCH} rows, {report['tokens']:,} tokens of {report['data']}, "
        f"on {report['ceiling']['device']}",
        f"{'stack':<12}{'tokens/s':>10}{'lowest':>9}{'of GEMM':>9}{'of a core':>11}{'peak GiB':>10}",
    ]
    for row in report["rows"]:
        lines.append(
            f"{row['stack']:<12}{row['tokens_per_second']:>10,.0f}{row['lowest']:>9,.0f}{row['of_gemm']:>9.1%}"
            f"{row['tokens_per_cpu_second']:>11,.0f}{row['peak_bytes'] / 2**30:>10.2f}   {row['how']}"
        )
        if row["void"]:
            lines.append(f"{row['stack']:<12}  VOID: {row['void']}")
    ours, theirs = report["rows"]
    measures = ("tokens_per_second", "tokens_per_cpu_second", "peak_bytes")
    speed, work, memory = (ours[key] / theirs[key] for key in measures)
    lines.append(
        f"SureFit over TRL: {speed:.2f} x the tokens/s, {work:.2f} x the tokens per second of a core, "
        f"{memory:.2f} x the memory"
    )
    lines.append(f"{'step':>4}{'SureFit':>11}{'TRL':>11}{'apart':>10}{'allowed':>10}")
    lines += [
        f"{number:>4}{step['surefit']:>11.5f}{step['trl']:>11.5f}{step['apart']:>10.1e}{step['allowed']:>10.1e}"
        for number, step in enumerate(report["curves"]["steps"], 1)
    ]
    lines.append(f"the curves {'agree' if report['curves']['agree'] else 'DO NOT AGREE'}")
    lines.append(merge_memory.text(report["merge"]))
    lines.append(", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
