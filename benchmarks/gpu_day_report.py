"""What a GPU day found, as the tables of docs/gpu.md: every figure beside its goal, measured or not yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_lines import lines

NOT_YET = "not yet measured"
MINIATURE = (
    "A miniature on a CPU, with tiny models in place of those named: the stages run, and no figure below counts."
)
GIB = 2**30
PHASES = ("load", "first step", "step", "eval")
TRAINING = (
    ("lora-1b", "eager", "LoRA on Llama 3.2 1B, 2,048 tokens, eager", 95_000),
    ("lora-1b", "kernels", "the same with fused kernels", 95_000),
    ("lora-1b", "compile", "compiled, without them", 95_000),
    ("lora-8b", "eager", "LoRA on Llama 3.1 8B, 2,048 tokens, eager", 18_500),
    ("lora-8b", "kernels", "the same with fused kernels", 18_500),
    ("lora-8b", "compile", "compiled, without them", 18_500),
    ("qlora-7b", "eager", "LoRA over NF4 on Qwen2.5 7B, 2,048 tokens", 19_000),
    ("qlora-7b", "kernels", "the same with fused kernels", 19_000),
    ("trl", "lora-1b, tuned", "TRL, tuned, on the 1B", None),
    ("trl", "lora-8b, tuned", "TRL, tuned, on the 8B", None),
    ("long", "one step", "LoRA on Qwen3 4B, one row of 200,000 tokens", 2_500),
)
"""(stage, item, what it is, tokens per second that SureFit is meant to reach on one H200)."""
PREFERENCES = (
    ("dpo", "dpo-1b, surefit", "dpo with LoRA on Llama 3.2 1B, pairs of 2 × 1,024 tokens"),
    ("dpo", "dpo-1b, trl-tuned", "TRL's DPOTrainer, tuned, on the 1B"),
    ("dpo", "dpo-8b, surefit", "dpo with LoRA on Llama 3.1 8B"),
    ("dpo", "dpo-8b, trl-tuned", "TRL's DPOTrainer, tuned, on the 8B"),
    ("qlora-dpo", "surefit", "dpo over NF4 on Qwen2.5 7B"),
)
"""(stage, item, what it is)."""
ATTENTION = (
    ("grad_q at 704", "NaN in the gradient of padded attention, 704 tokens", "none but with cuDNN"),
    ("new shape, cuDNN on", "first call of a new length, cuDNN", None),
    ("new shape, cuDNN off", "first call of a new length, without cuDNN", None),
    ("decode, cuDNN on", "64 tokens of the 1B, cuDNN", None),
    ("decode, cuDNN off", "64 tokens of the 1B, without cuDNN", None),
)
GOALS = {"allocated": "0.3 %", "reserved": "0.3 %", "time": "5 %"}
"""How far they may be off, in the median."""


class Found:
    """What a day's folder has; of what was measured again, the last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stages = {line["stage"]: line for line in lines(folder / "day.jsonl")}
        self.items: dict[tuple[str, str], dict[str, Any]] = {}
        for line in lines(folder / "items.jsonl"):
            key = line["stage"], line["item"]
            if "error" not in line or key not in self.items:
                self.items[key] = line

    def of(self, stage: str, item: str) -> dict[str, Any] | None:
        return self.items.get((stage, item))

    def missing(self, stage: str, item: str) -> str:
        """Why a figure is not there."""
        found, line = self.of(stage, item), self.stages.get(stage)
        if found is not None:
            return f"failed: {found['error']}"
        if line is None or line["status"] == "ended":
            return NOT_YET
        return f"{NOT_YET}: {line['status']}, {line['reason']}"

    def text(self, stage: str, item: str, say: Any) -> str:
        """What `say` makes of an item, or why there is none."""
        found = self.of(stage, item)
        return str(say(found)) if found is not None and "error" not in found else self.missing(stage, item)


def text(folder: Path) -> str:
    """All tables, in the order of the page."""
    found = Found(folder)
    parts = [
        heading(found),
        table("Training", [(label, goal(aim), found.text(*key, speed)) for *key, label, aim in TRAINING]),
        table("The plan", [*plan_rows(folder), *first_run_rows(found)]),
        table("Preferences", list(preference_rows(found))),
        table("Attention", list(attention_rows(found))),
        table("Rates", list(rate_rows(found))),
        table("Tests", list(test_rows(found))),
        stages_table(found),
    ]
    return "\n\n".join(parts)


def heading(found: Found) -> str:
    record = found.of("environment", "record")
    if record is None or "error" in record:
        return f"Machine: {NOT_YET}"
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    commit = f", commit {record['commit'][:9]}" if record["commit"] else ""
    where = f"Machine: {record['device']}, {record['date']}, `python benchmarks/gpu_day.py`{commit}"
    tiny = f"**{MINIATURE}**\n\n" if record["device"] == "CPU" else ""
    return f"{tiny}{where}; Python {record['python']}, {versions}"


def table(title: str, rows: list[tuple[str, str, str]]) -> str:
    head = [f"## {title}", "", "| figure | goal | measured |", "|---|---|---|"]
    return "\n".join([*head, *(f"| {label} | {aim} | {cell(value)} |" for label, aim, value in rows)])


def cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ")


def goal(aim: float | str | None) -> str:
    return "–" if aim is None else aim if isinstance(aim, str) else f"{aim:,.0f} tokens/s"


def speed(item: dict[str, Any]) -> str:
    aim = item.get("goal")
    share = f" ({item['tokens_per_second'] / aim:.0%} of the goal)" if aim else ""
    peak = f"{item['peak_bytes'] / GIB:.1f} GiB"
    return f"{item['tokens_per_second']:,.0f} tokens/s{share}, {peak}, first loss {item['loss']:.4f}"


def plan_rows(folder: Path) -> Iterator[tuple[str, str, str]]:
    """How far the predictions were off: (figure, goal, median, worst of so many)."""
    results = lines(folder / "plan.jsonl")
    compared = [result for result in results if "measured" in result and "predicted" in result]
    lost = len([result for result in results if "failed" in result])
    for key, label in (("allocated", "memory in tensors"), ("reserved", "memory reserved"), ("time", "time of a step")):
        off = sorted((abs(worst(result, key)), result["name"]) for result in compared)
        aim = f"within {GOALS[key]}"
        if not off:
            yield label, aim, NOT_YET
            continue
        median = off[len(off) // 2][0]
        failed = f"; {lost} failed" if lost else ""
        yield label, aim, f"median {median:.2%}, worst {off[-1][0]:.2%} ({off[-1][1]}), of {len(off)}{failed}"


def first_run_rows(found: Found) -> Iterator[tuple[str, str, str]]:
    """What a newcomer's run took beside its plan."""
    label = "`init --data`, then `run`, 7B in NF4"
    yield f"{label}: memory", "in the plan's range", found.text("first-run", "run", first_run_memory)
    yield f"{label}: time in steps", f"within {GOALS['time']}", found.text("first-run", "run", first_run_time)


def preference_rows(found: Found) -> Iterator[tuple[str, str, str]]:
    """dpo beside TRL's, its first batch, and the plan of a run."""
    for stage, item, label in PREFERENCES:
        yield label, "–", found.text(stage, item, preference_speed)
    label = "first batch of dpo over NF4"
    yield label, "ln 2 = 0.693147", found.text("qlora-dpo", "surefit", lambda item: first_batch(item["first_batch"]))
    label = "`train` with dpo, 7B in NF4"
    yield f"{label}: memory", "in the plan's range", found.text("dpo-plan", "run", first_run_memory)
    yield f"{label}: time in steps", f"within {GOALS['time']}", found.text("dpo-plan", "run", first_run_time)


def preference_speed(item: dict[str, Any]) -> str:
    speeds = f"{item['step_tokens_per_second']:,.0f} tokens/s in the steps, {item['tokens_per_second']:,.0f} with the"
    return f"{speeds} reference, {item['peak_bytes'] / GIB:.1f} GiB, first loss {item['loss']:.4f}"


def first_batch(found: dict[str, Any]) -> str:
    return f"{found['loss']:.6f}, at most {found['offset']:.1e} nats per token from the reference"


def first_run_memory(item: dict[str, Any]) -> str:
    low, high, taken = item["planned"]["low_bytes"], item["planned"]["high_bytes"], item["measured"]["bytes"]
    if None in (low, high, taken):
        return NOT_YET
    return f"{taken / GIB:.2f} GiB, planned {low / GIB:.2f} to {high / GIB:.2f} GiB ({item['setting']})"


def first_run_time(item: dict[str, Any]) -> str:
    planned, taken = item["planned"]["seconds"], item["measured"]["seconds"]
    if not taken:
        return NOT_YET
    beside = f"planned {planned:.1f} s ({planned / taken - 1:+.1%})" if planned else "no time planned"
    return f"{taken:.1f} s for {item['measured']['steps']} steps, {beside}"


def worst(result: dict[str, Any], key: str) -> float:
    """The relative error of a plan's memory in its worst phase, or of its time."""
    measured, predicted = result["measured"], result["predicted"]
    if key == "time":
        return float(predicted["seconds"] / measured["seconds"] - 1) if predicted["seconds"] else 0.0
    return max((predicted["phases"][name][key] / measured["phases"][name][key] - 1 for name in PHASES), key=abs)


def attention_rows(found: Found) -> Iterator[tuple[str, str, str]]:
    for item, label, aim in ATTENTION:
        yield label, aim or "–", found.text("attention", item, attention_text)


def attention_text(item: dict[str, Any]) -> str:
    if "non_finite" in item:
        counts = (f"{name} {count if count is not None else 'no kernel'}" for name, count in item["non_finite"].items())
        return f"{', '.join(counts)} of {item['numbers']:,} numbers"
    if "first_ms" in item:
        first, second = (sorted(item[key])[len(item[key]) // 2] for key in ("first_ms", "second_ms"))
        return f"{first:.1f} ms, then {second:.1f} ms (medians of {len(item['first_ms'])} lengths)"
    first, second = (item["tokens"] / item[key] for key in ("first_seconds", "second_seconds"))
    return f"{first:.1f} tokens/s, the second time {second:.1f}"


def rate_rows(found: Found) -> Iterator[tuple[str, str, str]]:
    ceiling = "largest product and copy, before training"
    yield ceiling, "–", found.text("lora-1b", "ceiling", ceiling_text)
    yield "bfloat16 product, copy, launch", "–", found.text("calibration", "rates", rates_text)
    for width in (64, 128):
        for length in (2048, 8192, 32_768):
            cells = []
            for kernel in ("varlen", "flash", "cudnn"):
                item = f"attention {kernel}, head {width}, {length} tokens"
                cells.append(f"{kernel} {found.text('calibration', item, kernel_text)}")
            nothing = all(each.endswith(NOT_YET) for each in cells)
            label = f"attention, head {width}, {length:,} tokens: forward / backward"
            yield label, "–", NOT_YET if nothing else "; ".join(cells)


def ceiling_text(item: dict[str, Any]) -> str:
    return f"{item['gemm_flops'] / 1e12:,.0f} TFLOP/s, {item['copy_bytes'] / 1e9:,.0f} GB/s"


def rates_text(item: dict[str, Any]) -> str:
    product = max(speed for _, speed in item["matmul"]["bfloat16"])
    copied = max(speed for _, speed in item["copy"])
    return f"{product / 1e12:,.0f} TFLOP/s, {copied / 1e9:,.0f} GB/s, {item['launch'] * 1e6:.1f} µs"


def kernel_text(item: dict[str, Any]) -> str:
    if "unavailable" in item:
        return "no kernel"
    return f"{item['forward_flops'] / 1e12:,.0f} / {item['backward_flops'] / 1e12:,.0f} TFLOP/s"


def test_rows(found: Found) -> Iterator[tuple[str, str, str]]:
    """A row for each file of tests that was run."""
    files = [(stage, item) for stage, item in found.items if stage == "tests"]
    if not files:
        yield "the tests marked gpu", "all pass", found.missing("tests", "")
    for stage, item in files:
        yield f"`{item}`", "passes", found.text(stage, item, lambda each: each["summary"].strip("= "))
    yield (
        "the table of attention kernels",
        "torch says the same",
        found.text("attention", "policy", lambda each: each["summary"].strip("= ")),
    )


def stages_table(found: Found) -> str:
    if not found.stages:
        return f"## Stages\n\nNone has run: {NOT_YET}."
    rows = ["## Stages", "", "| stage | what became of it | seconds | why |", "|---|---|---|---|"]
    for name, line in found.stages.items():
        again = ", run again" if line["again"] else ""
        rows.append(f"| {name} | {line['status']}{again} | {line['seconds']:.0f} | {cell(line['reason'])} |")
    return "\n".join(rows)
