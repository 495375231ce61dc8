"""DPO by SureFit beside TRL's DPOTrainer: tokens per second and memory, on the same model, pairs and factors.

    python benchmarks/preference_speed.py [--model DIR] [--lengths short,long] [--repeats 3] [--more STACK,…]
        [--out FILE] [--json]

`python benchmarks/preference.py --speed` runs it, too. LoRA of rank 16 on all linear layers, float32, on the CPU with
as many threads as OMP_NUM_THREADS says; β 0.1. Every pair of a workload is equally long, so that nobody pads, and both
have as many tokens to a micro batch. Each run is a process of its own, in the order SureFit, TRL, TRL, SureFit and so
on. TRL is tuned: without gradient checkpointing, which is its default and takes time, and with stored references, as
SureFit has them. `--more trl-default` adds TRL as it comes, which computes the reference in each step, `--more
surefit-apart` SureFit without the prompt that both answers of a pair share.

Counted are the tokens of both answers with their prompts, once each, per second and per processor second: of the steps
after the first, and of an epoch, with the reference pass. A stack whose losses are not the other's is void: they start
from the same factors, so the first loss is ln 2, and the curves are compared to 1e-3. With `--out` a second call goes
on where the first was ended. The prompts are the text of this repository's pages.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gpu_lines import append, lines
from throughput import versions

HERE = Path(__file__).resolve().parent
CHILD = HERE / "preference_stack.py"
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        model: a directory, or "mini" or a name of the catalogue, drawn at random.
        prompt, answer: tokens of each prompt and each answer; length: their sum.
        batch, micro: pairs to an optimizer step and to a forward pass.
    """

    model: str
    prompt: int
    answer: int
    batch: int
    micro: int
    warmup: int = 1
    steps: int = 4
    r: int = 16
    dtype: str = "float32"
    quantization: str = "none"
    learning_rate: float = 1e-4
    schedule: str = "constant"
    in_memory: bool = False

    @property
    def length(self) -> int:
        return self.prompt + self.answer


REAL = "surefit/smollm2-135m-instruct"
WORKLOADS = {
    "short": Workload(REAL, 32, 48, 4, 4),
    "long": Workload(REAL, 448, 64, 1, 1),
}
GPU_WORKLOADS = {
    "mini": Workload("mini", 24, 24, 4, 2, 1, 2, in_memory=True),
    "dpo-1b": Workload(
        "meta-llama/Llama-3.2-1B-Instruct", 768, 256, 16, 8, 3, 8, dtype="bfloat16", in_memory=True
    ),
    "dpo-8b": Workload(
        "meta-llama/Llama-3.1-8B-Instruct", 768, 256, 8, 4, 3, 6, dtype="bfloat16", in_memory=True
    ),
    "qlora-dpo-7b": Workload(
        "Qwen/Qwen2.5-7B-Instruct", 768, 256, 8, 4, 3, 6, dtype="bfloat16", quantization="nf4", in_memory=True
    ),
}  # fmt: skip
"""Workloads of the stage in benchmarks/gpu_day.py; the miniature runs on a CPU."""


def write_pairs(folder: Path, workload: Workload) -> None:
    """Every pair, two rows each: ids and labels flat, and the lengths, as throughput.py's `write_tokens`."""
    draw = np.random.default_rng(0)
    count = workload.batch * (workload.warmup + workload.steps)
    text = words_of(workload)
    rows, labels = [], []
    for _ in range(count):
        at = draw.integers(0, len(text) - workload.length, 3)
        prompt = text[at[0] : at[0] + workload.prompt]
        for start in at[1:]:
            rows.append(np.concatenate([prompt, text[start : start + workload.answer]]))
            labels.append(np.concatenate([np.full(workload.prompt, -100), rows[-1][workload.prompt :]]))
    np.save(folder / "lengths.npy", [len(row) for row in rows])
    np.save(folder / "ids.npy", np.concatenate(rows))
    np.save(folder / "labels.npy", np.concatenate(labels))


def words_of(workload: Workload) -> np.ndarray:
    """The tokens of this repository's pages; of a model drawn at random, tokens drawn at random."""
    if workload.in_memory:
        return np.random.default_rng(1).integers(3, 500, 50_000)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(workload.model) / "tokenizer.json"))
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted((HERE.parent / "docs").glob("[a-f]*.md")))
    return np.array(tokenizer.encode(pages, add_special_tokens=False).ids)


def run_stack(stack: str, workload: Workload, **more: Any) -> dict[str, Any]:
    """What one stack measured in a process of its own, or {"error": …}."""
    with tempfile.TemporaryDirectory(prefix="preference-") as folder:
        write_pairs(Path(folder), workload)
        job = {"workload": asdict(workload) | {"length": workload.length}, "folder": folder, "set": [], **more}
        job["in_memory"] = workload.in_memory
        done = subprocess.run(
            [sys.executable, str(CHILD), stack], input=json.dumps(job), capture_output=True, text=True, check=False
        )
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == 0 and last.startswith("{"):
        found: dict[str, Any] = json.loads(last)
        return found
    print(done.stderr, file=sys.stderr)
    return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}


def figures(result: dict[str, Any], total: int) -> dict[str, Any]:
    """Return tokens per second and per processor second, of the steps and of an epoch with its reference.

    Args:
        total: steps of the run, the warm-up included, whose pairs the reference's seconds are of.
    """
    share = len(result["seconds"]) / total
    seconds, cpu = sum(result["seconds"]), result["cpu_seconds"]
    whole, whole_cpu = (
        each + share * result[key]
        for each, key in ((seconds, "reference_seconds"), (cpu, "reference_cpu_seconds"))
    )  # fmt: skip
    tokens = result["tokens"]
    return {
        "step_tokens_per_second": tokens / seconds, "step_tokens_per_cpu_second": tokens / cpu,
        "tokens_per_second": tokens / whole, "tokens_per_cpu_second": tokens / whole_cpu,
        "peak_bytes": result["peak_bytes"],
    }  # fmt: skip


def row_of(stack: str, results: list[dict[str, Any]], workload: Workload, reference: list[float]) -> dict[str, Any]:
    """The medians of a stack's runs; void where one failed or its losses are not the reference's."""
    failed = [result["error"] for result in results if "error" in result]
    if failed:
        return {"stack": stack, "void": failed[0]}
    allowed = TOLERANCE[workload.dtype]
    losses = results[0]["losses"]
    void = None
    if abs(losses[0] - math.log(2)) > allowed:
        void = f"the first loss is {losses[0]:.6f}, not ln 2"
    elif apart := [i for i, (a, b) in enumerate(zip(losses, reference, strict=True), 1) if abs(a - b) > allowed]:
        void = f"the losses differ in step {apart[0]}: {losses[apart[0] - 1]:.6f}, {reference[apart[0] - 1]:.6f}"
    each = [figures(result, workload.warmup + workload.steps) for result in results]
    medians = {key: statistics.median(figure[key] for figure in each) for key in each[0]}
    spread = [min(f["tokens_per_cpu_second"] for f in each), max(f["tokens_per_cpu_second"] for f in each)]
    return {"stack": stack, "void": void, **medians, "spread": spread, "losses": losses, "how": results[0]["how"]}


def measured(name: str, workload: Workload, stacks: list[str], repeats: int, out: Path | None) -> dict[str, Any]:
    """All runs of a workload, in turns."""
    runs: dict[str, list[dict[str, Any]]] = {stack: [] for stack in stacks}
    kept = {tuple(line["key"]): line["result"] for line in (lines(out) if out else [])}
    for repeat in range(repeats):
        for stack in stacks if repeat % 2 == 0 else reversed(stacks):
            key = (name, stack, repeat)
            found = kept.get(key) or run_stack(stack, workload)
            if out and key not in kept and "error" not in found:
                append(out, {"key": key, "result": found})
            runs[stack].append(found)
    reference = runs["surefit"][0].get("losses", [])
    return {
        "workload": name, **asdict(workload), "length": workload.length,
        "rows": [row_of(stack, results, workload, reference) for stack, results in runs.items()],
    }  # fmt: skip


def text(report: dict[str, Any]) -> str:
    lines_ = [
        f"{report['workload']}: prompts of {report['prompt']} tokens, answers of {report['answer']}, {report['batch']} "
        f"pairs a step, {report['micro']} a micro batch",
        f"{'stack':<13}{'tokens/cpu s':>14}{'in the steps':>14}{'tokens/s':>10}{'peak GiB':>10}",
    ]
    for row in report["rows"]:
        if row["void"]:
            lines_.append(f"{row['stack']:<13}  VOID: {row['void']}")
            continue
        lines_.append(
            f"{row['stack']:<13}{row['tokens_per_cpu_second']:>14.1f}{row['step_tokens_per_cpu_second']:>14.1f}"
            f"{row['tokens_per_second']:>10.1f}{row['peak_bytes'] / 2**30:>10.2f}   {row['how']}"
        )
    sound = {row["stack"]: row for row in report["rows"] if not row["void"]}
    for peer in (name for name in sound if name != "surefit" and "surefit" in sound):
        ours, theirs = sound["surefit"], sound[peer]
        keys = ("tokens_per_cpu_second", "step_tokens_per_cpu_second", "peak_bytes")
        speed, steps, memory = (ours[key] / theirs[key] for key in keys)
        lines_.append(
            f"SureFit over {peer}: {speed:.2f} x the tokens per processor second of an epoch, {steps:.2f} x in the "
            f"steps, {memory:.2f} x the memory"
        )
    return "\n".join(lines_)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=REAL, help="a name that SureFit knows, or a directory")
    parser.add_argument("--lengths", default="short,long")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--more", default="", metavar="STACK,…", help="trl-default, surefit-apart")
    parser.add_argument("--out", type=Path, help="a file that keeps each run's line")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    from surefit.model.tokenizer import model_path

    stacks = ["surefit", "trl-tuned", *filter(None, asked.more.split(","))]
    model, reports = model_path(asked.model), []
    for name in asked.lengths.split(","):
        reports.append(measured(name, replace(WORKLOADS[name], model=model), stacks, asked.repeats, asked.out))
        print(json.dumps(reports[-1]) if asked.json else text(reports[-1]), flush=True)
    print(", ".join(f"{name} {version}" for name, version in versions().items()), file=sys.stderr)
    return int(any(row["void"] for report in reports for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
