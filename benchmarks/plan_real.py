"""Planned against actual RAM on a CPU: `surefit train` on a real model, and on families of random ones.

    python benchmarks/plan_real.py [--model PATH] [--families] [--case PARTS] [--out DIR] [--replan] [--list] [--json]

--families: random models of 13 families (Llama, which the plan was fitted to, and 12 others; plan_real_models.py) of
some 20, 120 and 500 million parameters, with LoRA, LoRA over NF4, and all weights trained, in place of the real model.

Each case is `surefit train` in a process of its own: plan, dry pass, two steps, held-out loss, checkpoint, result. What
the process took at its fullest (`VmHWM`, as Linux counts it) stands beside the figure and the interval of the
plan.json it wrote before. Rows are of made-up words, the longest of them exactly `data.max_length` tokens. A case takes
half a minute to three on one core, and up to 9 GB; one of 500 million parameters more. Results are kept line by line in
FOLDER/plan_real.jsonl, so a second call goes on where the first stopped; `--replan` plans those runs anew, for who
changes the plan. The exit code is 1 where a goal is missed: for families, that each is within its interval.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # also where a test loads this file by its path

from plan_real_models import FAMILIES, SIZES, make

MODEL = "surefit/smollm2-135m-instruct"
STEPS = 2
TEMPLATE_TOKENS = 32
"""What the chat template of the real model adds to a pair, at most."""
WORDS = "a the of and to in is you that it he was for on are as with his they at be this have from or one had by word"
MEDIAN, WIDEST = 0.03, 0.10
"""The goals: the median error, and how far the interval may reach to either side of the figure."""


@dataclass(frozen=True)
class Case:
    """One configuration: `rows` × `length` tokens a micro batch, `micro` of them a step; `set` are other values."""

    name: str
    length: int
    rows: int = 1
    micro: int = 1
    packed: bool = False
    set: dict[str, Any] = field(default_factory=dict)
    family: str = ""
    size: str = ""


FULL = {"train.method": "full", "train.learning_rate": 1e-5}
KEPT, SELECTIVE = {"train.gradient_checkpointing": False}, {"train.gradient_checkpointing": "selective"}
RECOMPUTED, OFFLOADED = {"train.gradient_checkpointing": True}, {"train.gradient_checkpointing": "offload"}
NF4, WHOLE = {"model.quantization": "nf4"}, {"speed.chunked_loss": False}
DPO = {"objective.name": "dpo", "objective.beta": 0.1}
"""Runs on pairs: `rows` counts pairs, and each answer with its prompt is as long as a row."""
CASES = (
    Case("lora-256x4-padded", 256, 4, set=KEPT),
    Case("lora-1024x2-padded", 1024, 2, set=KEPT),
    Case("lora-512-accumulated", 512, 1, 2, set=KEPT),
    Case("lora-512x2-packed", 512, 2, packed=True, set=KEPT),
    Case("lora-4096-recomputed", 4096, set=RECOMPUTED),
    Case("lora-256x2-packed-selective", 256, 2, packed=True, set=SELECTIVE),
    Case("lora-1024-offload", 1024, set=OFFLOADED),
    Case("lora-512-whole-logits", 512, set=KEPT | WHOLE),
    Case("lora-256x2-bfloat16", 256, 2, set=KEPT | {"model.dtype": "bfloat16"}),
    Case("full-256x2-padded", 256, 2, set=FULL | KEPT),
    Case("full-256x2-packed-recomputed", 256, 2, packed=True, set=FULL | RECOMPUTED),
    Case("full-256-accumulated-selective", 256, 1, 2, set=FULL | SELECTIVE),
    Case("full-256-whole-logits", 256, set=FULL | KEPT | WHOLE),
    Case("nf4-256x2-padded", 256, 2, set=NF4 | KEPT),
    Case("nf4-256x2-packed-recomputed", 256, 2, packed=True, set=NF4 | RECOMPUTED),
    Case("fp8-256x2-padded", 256, 2, set={"model.quantization": "fp8"} | KEPT),
    Case("dpo-256x2-padded", 256, 2, set=DPO | KEPT),
    Case("dpo-512x1-packed", 512, 1, packed=True, set=DPO | KEPT),
)
METHODS: dict[str, dict[str, Any]] = {"lora": {}, "full": FULL, "nf4": NF4}
FAMILY_CASES = tuple(
    Case(f"{family}-{size}-{method}", 512, 4, packed=True, set=KEPT | values, family=family, size=size)
    for size in SIZES
    for method, values in METHODS.items()
    for family in FAMILIES
)
"""The small ones first. Packed, where a family can be: what `surefit train` does by itself."""


def like_words(model: str) -> tuple[list[str], int]:
    """Words, each with the blank before it, of as few tokens of the model's tokenizer as there are; and how many.

    Args:
        model: its directory, here as below.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    lengths = {f" {word}": len(tokenizer.encode(f" {word}", add_special_tokens=False)) for word in WORDS.split()}
    fewest = min(lengths.values())
    return [word for word, tokens in lengths.items() if tokens == fewest], fewest


def config(case: Case, model: str, folder: Path) -> Path:
    """The case's rows and its config file."""
    rows, (words, each), drawn = case.rows * case.micro, like_words(model), random.Random(0)
    # Packed rows fill a micro batch; of padded ones the longest counts, and the second longest for the targets.
    lengths = {"train": [1.0] * (STEPS * rows), "eval": [0.5, 0.4]}
    if not case.packed and case.rows > 1:
        lengths["train"][1:] = [0.98] * (len(lengths["train"]) - 1)
    for part, shares in lengths.items():
        with (folder / f"{part}.jsonl").open("w", encoding="utf-8") as file:
            for share in shares:
                # The end of a text is a token of its own.
                count = (int(case.length * share) - 1) // each
                file.write(json.dumps(row_of(case, words, count, drawn)) + "\n")
    tree: dict[str, Any] = {
        "recipe": "chat",
        "model": {"name_or_path": model, "dtype": "float32"},
        "data": {
            "train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "max_length": case.length,
            "packing": "auto" if case.family else case.packed, "too_long": "error",
        },
        "train": {
            "global_batch_size": rows, "per_device_train_batch_size": case.rows, "max_steps": STEPS,
            "learning_rate": 1e-4,
        },
        "checkpoint": {"save_steps": 1},
        "hardware": {"gpu": "cpu"},
        "output_dir": str(folder / "run"),
    }  # fmt: skip
    for key, value in case.set.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    path = folder / "run.yaml"
    path.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
    return path


def row_of(case: Case, words: list[str], count: int, drawn: random.Random) -> dict[str, str]:
    """Return a row of so many words, or a pair of answers of which each has half of them."""
    if "objective.name" not in case.set:
        return {"text": "".join(drawn.choices(words, k=count))}
    half = count // 2
    parts = {"prompt": count - half - TEMPLATE_TOKENS, "chosen": half, "rejected": half}
    return {name: "".join(drawn.choices(words, k=number)).strip() for name, number in parts.items()}


def run(case: Case, model: str, out: Path) -> dict[str, Any]:
    """Train it in a process of its own, and read what that took."""
    model = model_of(case, model, out)
    with tempfile.TemporaryDirectory(prefix=f"{case.name}-", dir=out) as name:
        folder = Path(name)
        command = [sys.executable, "-m", "surefit", "train", str(config(case, model, folder)), "--json"]
        start = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        result: dict[str, Any] = {"name": case.name, **asdict(case), "seconds": time.perf_counter() - start}
        if done.returncode != 0:
            return result | {"failed": done.stdout.strip().splitlines()[-1:] or [f"exit {done.returncode}"]}
        estimate = json.loads((folder / "run/plan.json").read_text(encoding="utf-8"))["estimate"]
        dry = json.loads((folder / "run/dry_pass.json").read_text(encoding="utf-8"))
        events = [json.loads(line) for line in (folder / "run/events.jsonl").read_text(encoding="utf-8").splitlines()]
        phases = next(event["phases"] for event in reversed(events) if event["event"] == "memory")
        return result | {
            "actual": max(figures["resident"] for figures in phases.values()),
            **planned(estimate), "tokens": dry["tokens"], "phases": phases,
        }  # fmt: skip


def model_of(case: Case, model: str, out: Path) -> str:
    """The directory of the case's own random model, or `model`."""
    return str(make(case.family, case.size, out)) if case.family else model


def replanned(result: dict[str, Any], case: Case, model: str, out: Path) -> dict[str, Any]:
    """A run that is kept, beside what the plan says of it now."""
    model = model_of(case, model, out)
    with tempfile.TemporaryDirectory(prefix=f"{case.name}-", dir=out) as name:
        command = [sys.executable, "-m", "surefit", "plan", str(config(case, model, Path(name))), "--json"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return result | planned(json.loads(said.splitlines()[-1])["estimate"])


def planned(estimate: dict[str, Any]) -> dict[str, Any]:
    """Of the process that trains; the one that merges comes later."""
    ends = {end: estimate["training"][f"{end}_bytes"] for end in ("likely", "low", "high")}
    return {"planned": ends.pop("likely"), **ends, "how": estimate["how"], "planned_phases": estimate["phases"]}


def error(result: dict[str, Any]) -> float:
    return float(result["planned"] / result["actual"] - 1)


def width(result: dict[str, Any]) -> float:
    """How far the interval reaches, to the side where it reaches farther."""
    return float(max(result["high"] / result["planned"] - 1, 1 - result["low"] / result["planned"]))


def report(results: Sequence[dict[str, Any]], families: bool = False) -> dict[str, Any]:
    """Print the table, and say what became of the goals; of small `families` the process itself is half of the run, so
    for them the interval is the goal."""
    print("| case | tokens | planned, GB | interval, GB | actual, GB | plan is off by | seconds |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for result in results:
        if "failed" in result:
            print(f"| {result['name']} | failed: {result['failed'][0][:120]} |")
            continue
        interval = f"{result['low'] / 1e9:.2f} to {result['high'] / 1e9:.2f}"
        print(
            f"| {result['name']} | {result['tokens']:,} | {result['planned'] / 1e9:.2f} | {interval} "
            f"| {result['actual'] / 1e9:.2f} | {error(result):+.1%} | {result['seconds']:.0f} |"
        )
    done = [result for result in results if "failed" not in result]
    if not done:
        return {"cases": 0, "failed": len(results), "reached": False}
    summary = {
        "cases": len(done),
        "failed": len(results) - len(done),
        "median_error": statistics.median(abs(error(result)) for result in done),
        "worst_error": max((error(result) for result in done), key=abs),
        "above_the_upper_end": [result["name"] for result in done if result["actual"] > result["high"]],
        "below_the_lower_end": [result["name"] for result in done if result["actual"] < result["low"]],
        "widest_interval": max(width(result) for result in done),
    }
    within = not (summary["above_the_upper_end"] or summary["failed"])
    narrow = summary["median_error"] <= MEDIAN and summary["widest_interval"] <= WIDEST
    summary["reached"] = within and (not summary["below_the_lower_end"] if families else narrow)
    print(
        f"\n{summary['cases']} cases: median error {summary['median_error']:.1%} (goal {MEDIAN:.0%}), the worst "
        f"{summary['worst_error']:+.1%}; above the upper end: {', '.join(summary['above_the_upper_end']) or 'none'}; "
        f"below the lower end: {', '.join(summary['below_the_lower_end']) or 'none'}; "
        f"the widest interval ± {summary['widest_interval']:.1%} (goal {WIDEST:.0%})"
    )
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=MODEL, help="a model's name or directory")
    parser.add_argument("--families", action="store_true", help="random models of 13 families in three sizes")
    parser.add_argument("--case", default="", metavar="PARTS", help="comma-separated parts of names")
    parser.add_argument("--out", type=Path, default=Path("runs/plan_real"))
    parser.add_argument("--replan", action="store_true", help="plan the runs that are kept anew")
    parser.add_argument("--list", action="store_true", help="name the cases and run none")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    asked = parser.parse_args()
    chosen = [
        case
        for case in (FAMILY_CASES if asked.families else CASES)
        if any(part in case.name for part in asked.case.split(","))
    ]
    if asked.list:
        print("\n".join(case.name for case in chosen))
        return 0
    from surefit.model.tokenizer import model_path

    model = "" if asked.families else model_path(asked.model)
    asked.out.mkdir(parents=True, exist_ok=True)
    kept = asked.out / "plan_real.jsonl"
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    done = {result["name"]: result for result in map(json.loads, lines) if "failed" not in result}
    for number, case in enumerate(chosen, start=1):
        if case.name not in done:
            done[case.name] = run(case, model, asked.out)
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(done[case.name]) + "\n")
        elif asked.replan:
            done[case.name] = replanned(done[case.name], case, model, asked.out)
        print(f"{number}/{len(chosen)} {case.name}", file=sys.stderr, flush=True)
    summary = report([done[case.name] for case in chosen], asked.families)
    if asked.json:
        print(json.dumps(summary))
    return 0 if summary["reached"] else 1


if __name__ == "__main__":
    sys.exit(main())
