"""Training speed: SureFit against TRL (its defaults, and tuned) and Unsloth, on the same weights and token ids.

    python benchmarks/throughput.py --workload cpu-mini|lora-1b|lora-8b|qlora-7b|long-4b
        [--peers trl,unsloth] [--lengths full|mixed] [--repeats 3] [--set train.gradient_checkpointing=true]
        [--results FILE] [--json]

The weights are random, normal(0, 0.02) (a product with zeros runs faster than it should); so are the token ids. Every
stack starts from the same saved model and the same saved LoRA factors, runs in a process of its own, one after the
other and then in reverse, and sees the same examples in each optimizer step. Counted are tokens that are not padding,
per second of whole optimizer steps, after the warm-up, with the device synchronised.

A stack whose first loss or first gradient norm misses a float32 reference (plain transformers and PEFT) is void. The
ceilings (a large matrix product, a copy) are measured in the same run. Full: every example has the workload's length,
so that nobody pads. Mixed: log-normal lengths up to it, as instruction data has.

With `--results` each measurement is a line of FILE as soon as it is made, and a second call takes from there what an
ended one has measured. What can be measured in minutes on a GPU machine, benchmarks/gpu_day.py does.

Without a network: `pip download -d wheels trl datasets bitsandbytes liger-kernel unsloth` where there is one, carry the
folder along, and `pip install --no-index --find-links wheels trl …` first. A peer that is not installed is named and
left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from gpu_lines import append, lines

HERE = Path(__file__).parent
CHILD = HERE / "throughput_stack.py"
TOLERANCE = {"float32": (1e-4, 1e-3), "bfloat16": (0.01, 0.05), "nf4": (0.05, 0.25)}
"""Largest relative difference of the first loss and the first gradient norm from the float32 reference."""


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        model: a name of the packaged catalogue, "mini", or the directory of a model.
        length: tokens of the longest example; batch: examples per optimizer step.
        micro: examples per forward pass of a peer that pads (SureFit packs as many tokens).
        goal: tokens per second that SureFit is meant to reach on one H200; None where there is no such goal.
    """

    model: str
    length: int
    batch: int
    micro: int
    r: int
    dtype: str
    quantization: str
    warmup: int
    steps: int
    goal: float | None = None
    learning_rate: float = 1e-4
    schedule: str = "constant"


WORKLOADS = {
    "cpu-mini": Workload("mini", 256, 16, 4, 8, "float32", "none", 2, 6),
    "lora-1b": Workload("meta-llama/Llama-3.2-1B-Instruct", 2048, 32, 8, 16, "bfloat16", "none", 20, 20, 95_000),
    "lora-8b": Workload("meta-llama/Llama-3.1-8B-Instruct", 2048, 16, 4, 16, "bfloat16", "none", 20, 10, 18_500),
    "qlora-7b": Workload("Qwen/Qwen2.5-7B-Instruct", 2048, 16, 4, 16, "bfloat16", "nf4", 20, 10, 19_000),
    "long-4b": Workload("Qwen/Qwen3-4B", 200_000, 1, 1, 64, "bfloat16", "none", 1, 3, 2_500),
}


def main() -> None:
    options = arguments()
    workload = WORKLOADS[options.workload]
    stacks = ["surefit", *(f"{peer}-{kind}" for peer in peers(options) for kind in ("default", "tuned"))]
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        job = {"workload": asdict(workload), "folder": folder, "set": options.set, "seed": 0}
        write_tokens(Path(folder), workload, options.lengths)
        reference = run_child("reference", job)  # again in any case: it writes the model
        ceiling = kept(options, "ceiling", 0, job)
        runs: dict[str, list[dict[str, Any]]] = {stack: [] for stack in stacks}
        for repeat in range(options.repeats):
            for stack in stacks if repeat % 2 == 0 else reversed(stacks):
                runs[stack].append(kept(options, stack, repeat, job))
    kind = "nf4" if workload.quantization == "nf4" else workload.dtype
    rows = [summary(stack, results, reference, ceiling, TOLERANCE[kind]) for stack, results in runs.items()]
    report = {
        "workload": options.workload, "lengths": options.lengths, **asdict(workload), "ceiling": ceiling,
        "reference": reference, "rows": rows, "versions": versions(),
    }  # fmt: skip
    print(json.dumps(report) if options.json else text(report))
    if any(row["void"] for row in rows if row["stack"] == "surefit"):
        sys.exit(1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--peers", default="trl,unsloth", help="comma-separated; empty for none")
    parser.add_argument("--lengths", choices=("full", "mixed"), default="full")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="SureFit's config, as in train")
    parser.add_argument("--results", type=Path, metavar="FILE", help="a line for each measurement as it is made")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def peers(options: argparse.Namespace) -> list[str]:
    wanted = [name for name in options.peers.split(",") if name]
    there = [name for name in wanted if importlib.util.find_spec(name)]
    for name in wanted:
        if name not in there:
            print(f"{name} is not installed: left out", file=sys.stderr)
    return there


def write_tokens(folder: Path, workload: Workload, lengths: str) -> None:
    """Every example of every step, in the order in which all stacks see them: ids and labels flat, and the lengths."""
    draw = np.random.default_rng(0)
    count = workload.batch * (workload.warmup + workload.steps)
    if lengths == "full":
        tokens = np.full(count, workload.length)
    else:
        tokens = np.clip(draw.lognormal(np.log(workload.length / 6), 0.8, count), 16, workload.length).astype(int)
    ids = draw.integers(3, 500, tokens.sum())
    for name, values in (("lengths", tokens), ("ids", ids), ("labels", ids)):
        np.save(folder / f"{name}.npy", values)


def kept(options: argparse.Namespace, stack: str, repeat: int, job: dict[str, Any]) -> dict[str, Any]:
    """What a stack measures, or has measured in a call that was ended; an error is no measurement."""
    if options.results is None:
        return run_child(stack, job)
    key = [options.workload, options.lengths, options.set, stack, repeat]
    before = [line["result"] for line in lines(options.results) if line["key"] == key]
    if before:
        found: dict[str, Any] = before[-1]
        return found
    found = run_child(stack, job)
    if "error" not in found:
        append(options.results, {"key": key, "result": found})
    return found


def run_child(stack: str, job: dict[str, Any], loud: bool = False) -> dict[str, Any]:
    """What one stack measured in a process of its own, or {"error": …}; loud: with all that it said on stderr."""
    command = [sys.executable, str(CHILD), stack]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1:] or [""]
    if done.returncode == 0 and last[0].startswith("{"):
        found: dict[str, Any] = json.loads(last[0])
        return found
    said = done.stderr.strip().splitlines() or ["no message"]
    if loud:
        print(done.stderr, file=sys.stderr)
    if stack in ("reference", "ceiling"):
        raise SystemExit(f"{stack} failed:\n{done.stderr}")
    return {"error": said[-1][:300]}


def summary(
    stack: str,
    results: list[dict[str, Any]],
    reference: dict[str, Any],
    ceiling: dict[str, Any],
    tolerance: tuple[float, float],
) -> dict[str, Any]:
    """One row of the table; void where it failed or did not compute what the reference computes."""
    failed = [result["error"] for result in results if "error" in result]
    if failed:
        return {"stack": stack, "void": failed[0]}
    speeds = [sum(result["tokens"]) / sum(result["seconds"]) for result in results]
    off = [abs(results[0][key] / reference[key] - 1) for key in ("loss", "grad_norm")]
    void = None
    if any(difference > allowed for difference, allowed in zip(off, tolerance, strict=True)):
        void = f"loss off by {off[0]:.2%}, gradient norm by {off[1]:.2%}"
    speed = statistics.median(speeds)
    per_second = reference["flops_per_token"] * speed
    peak = ceiling["datasheet_flops"]
    return {
        "stack": stack, "void": void, "tokens_per_second": speed, "lowest": min(speeds), "highest": max(speeds),
        "tokens_per_cpu_second": statistics.median(sum(each["tokens"]) / each["cpu_seconds"] for each in results),
        "mfu": per_second / peak if peak else None, "of_gemm": per_second / ceiling["gemm_flops"],
        "peak_bytes": max(result["peak_bytes"] for result in results), "loss_off": off[0], "grad_norm_off": off[1],
        "how": results[0]["how"],
    }  # fmt: skip


def versions() -> dict[str, str]:
    names = ("torch", "transformers", "peft", "trl", "unsloth", "bitsandbytes", "liger-kernel")
    return {name: metadata.version(name) for name in names if importlib.util.find_spec(name.replace("-", "_"))}


def text(report: dict[str, Any]) -> str:
    ceiling = report["ceiling"]
    ours = next((row.get("tokens_per_second") for row in report["rows"] if row["stack"] == "surefit"), None)
    lines = [
        f"{report['workload']} ({report['lengths']} lengths, up to {report['length']:,} tokens) on {ceiling['device']}",
        f"GEMM {ceiling['gemm_flops'] / 1e12:,.2f} TFLOP/s, copy {ceiling['copy_bytes'] / 1e9:,.0f} GB/s",
        f"{'stack':<16}{'tokens/s':>12}{'lowest':>11}{'MFU':>8}{'of GEMM':>9}{'peak GiB':>10}{'SureFit is':>12}",
    ]
    for row in report["rows"]:
        if "tokens_per_second" not in row:
            lines.append(f"{row['stack']:<16}  void: {row['void']}")
            continue
        mfu = f"{row['mfu']:.1%}" if row["mfu"] is not None else "-"
        ratio = f"{ours / row['tokens_per_second']:.2f} x" if ours and row["stack"] != "surefit" else ""
        lines.append(
            f"{row['stack']:<16}{row['tokens_per_second']:>12,.0f}{row['lowest']:>11,.0f}{mfu:>8}"
            f"{row['of_gemm']:>9.1%}{row['peak_bytes'] / 2**30:>10.2f}{ratio:>12}"
            + (f"  VOID: {row['void']}" if row["void"] else "")
        )
        lines.append(f"{'':<16}  {row['how']}")
    lines.append(", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
