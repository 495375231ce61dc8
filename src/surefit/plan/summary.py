"""The answer of a plan in a few lines: whether it fits, the memory, time and disk that decide, and what to change."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from surefit.core.units import GIB, bytes_text, duration_text, plural

Plan = dict[str, Any]

WHILE = {"load": "loading", "save": "saving", "eval": "measuring the held-out loss"}
"""What happens in a phase other than a training step."""
PLACES = (
    (r"lm_head|embed_out|output_layer", "the output head"),
    (r"embed_tokens|wte|word_embeddings|embed_in", "the embedding"),
    (r"\.(?:self_attn|attention|attn|self_attention|linear_attn)(?:\.|$)", "the attention of {layer}"),
    (r"\.(?:mlp|feed_forward|ffn|block_sparse_moe|experts)(?:\.|$)", "the MLP of {layer}"),
    (r"\.(?:layers|h|blocks)\.\d+", "{layer}"),
    (r"norm|ln_f", "the final norm"),
)
"""Patterns of module paths, and what they are in plain words."""
LOSS_OR_UPDATE = "the loss or the optimizer's update"


def headline(plan: Plan) -> str:
    """Return the answer in one line: whether the run fits, in GB as on a card's box, and how long it takes."""
    estimate, time = plan["estimate"], plan["time"]
    if estimate is None or not estimate["capacity_bytes"]:
        known = "does not fit" if plan["does_not_fit"] else "unknown"
        return f"{known.capitalize()}: {_why_unknown(plan)}"
    low, high, capacity = estimate["low_bytes"], estimate["high_bytes"], estimate["capacity_bytes"]
    on_each = _each(plan)
    if estimate["verdict"] == "does not fit":
        return f"Does not fit: needs {_of(low, capacity)}{on_each}"
    disk = next((text for text in plan["does_not_fit"] if text.startswith("disk: ")), None)
    if disk is not None:
        return f"Does not fit on the disk: {disk.removeprefix('disk: the run ')}"
    duration = f", {about(time['total_seconds'])}" if time and time["total_seconds"] is not None else ""
    if estimate["verdict"] == "fits":
        return f"Fits: {_of(high, capacity)}{on_each}{duration}"
    return f"Too close to call: needs {_gb(low)} to {_of(high, capacity)}{on_each}{duration}"


def _why_unknown(plan: Plan) -> str:
    if plan["does_not_fit"]:
        return str(plan["does_not_fit"][0].partition(": ")[2])
    if plan["estimate"] is None:
        return f"the memory of {plan['model']['name']} cannot be estimated here"
    return f"needs {_gb(plan['estimate']['high_bytes'])} GB, and the memory of {plan['device']['name']} is not known"


def _each(plan: Plan) -> str:
    if plan["ranks"] is None:
        return ""
    unit = "process" if plan["device"]["kind"] == "cpu" else "GPU"
    return f" on each of {plural(plan['ranks']['processes'], unit)}"


def _gb(count: float) -> str:
    """Format bytes as GB of a card's box, rounded up; small amounts with a decimal."""
    size = count / GIB
    return f"{math.ceil(size):,}" if size > 9.9 else f"{size:.1f}"


def _of(needed: float, capacity: float) -> str:
    """Format `21 of 24 GB`, with a decimal where the rounded numbers would be equal."""
    if math.ceil(needed / GIB) == math.ceil(capacity / GIB):
        return f"{needed / GIB:.1f} of {capacity / GIB:.1f} GB"
    return f"{_gb(needed)} of {math.ceil(capacity / GIB):,} GB"


def about(seconds: float) -> str:
    """Format a duration in one number.

    >>> about(20), about(280), about(4 * 3600 + 300), about(75 * 3600)
    ('under a minute', 'about 5 min', 'about 4.1 h', 'about 3 days')
    """
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min" if seconds >= 50 else "under a minute"
    hours = seconds / 3600
    return f"about {hours:.1f} h" if hours < 48 else f"about {hours / 24:.0f} days"


def summary_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the lines below the headline."""
    yield "run", _run_text(plan)
    yield "memory", _memory_text(plan)
    yield "time", _time_text(plan)
    if plan["disk_total_bytes"] is not None:
        yield "disk", _disk_text(plan)
    if plan["estimate"]:
        yield "rows", measured_rows_text(plan["estimate"])
    if assumed := plan["device"].get("assumed"):
        yield "assumed", assumed
    impossible = plan["estimate"] is not None and plan["estimate"]["verdict"] == "does not fit"
    if not impossible and (scoring := _scoring_text(plan["answering"])):
        yield "scoring", scoring
    if advice := plan.get("advice"):
        yield "change", advice["text"]


def _run_text(plan: Plan) -> str:
    steps, estimate = plan["steps"], plan["estimate"]
    total = plural(steps["total_steps"], "step") if steps["total_steps"] else "an unknown number of steps"
    setting = re.sub(r" in \w+", "", estimate["setting"].partition(",")[0]) + ", " if estimate else ""
    return (
        f"{plan['model']['name']} on {plan['device']['name']}; {setting}{total} of "
        f"{plural(steps['global_batch_size'], 'row')}"
    )


def _memory_text(plan: Plan) -> str:
    estimate, device = plan["estimate"], plan["device"]
    if estimate is None:
        return "not known: --verbose lists the parts that are"
    kind = " of RAM" if device["kind"] == "cpu" else ""
    capacity = f" of {estimate['capacity_bytes'] / GIB:.1f} GiB{kind}" if estimate["capacity_bytes"] else " GiB"
    interval = f"{estimate['low_bytes'] / GIB:.1f} to {estimate['high_bytes'] / GIB:.1f}{capacity}"
    if estimate["phases"]:
        return f"{interval}; most in {peak_place(estimate)}"
    largest = max(plan["memory"], key=lambda term: term["bytes"], default=None)
    part = f"; largest part: {largest['term']}, {bytes_text(largest['bytes'])}" if largest else ""
    return f"{interval}, by the formula{part}"


def peak_place(estimate: dict[str, Any]) -> str:
    """Return, in plain words, where a simulated run needs most memory: a part of the model, or what is done."""
    fullest = max(estimate["phases"], key=lambda phase: phase["reserved_bytes"])["name"]
    if fullest.startswith("merge: "):
        return "merging"
    return WHILE.get(fullest) or module_in_words(estimate["peak"]["module"])


def module_in_words(module: str) -> str:
    """Return what a module path is.

    >>> module_in_words("base_model.model.lm_head"), module_in_words("base_model.model.model.layers.27.mlp")
    ('the output head', 'the MLP of layer 28')
    """
    numbers = re.search(r"\.(?:layers|h|blocks)\.(\d+)", module)
    layer = f"layer {int(numbers[1]) + 1}" if numbers else "a layer"
    for pattern, words in PLACES:
        if re.search(pattern, module):
            return words.format(layer=layer)
    return module.rpartition(".")[2] or LOSS_OR_UPDATE


def _time_text(plan: Plan) -> str:
    time, device = plan["time"], plan["device"]
    if time is None:
        if plan["estimate"] is not None and plan["estimate"]["not_simulated"] == "--quick was given":
            return "left out by --quick"
        if device.get("assumed") and device["kind"] == "cuda":
            return "unknown: name the card instead of its size, such as --gpu rtx3060-12"
        where = "" if device["source"] == "detected" else f" on the machine with the {device['name']}"
        return f"unknown: run `surefit calibrate` once{where}"
    seconds = time["seconds_per_step"]
    step = f"{duration_text(seconds) if seconds >= 1 else f'{seconds:.2g} s'} per step"
    if time["total_seconds"] is None:
        return f"{step}; the number of steps is not known"
    low, high = duration_text(time["total_seconds_low"]), duration_text(time["total_seconds_high"])
    total = low if low == high else f"{low} to {high}"
    scoring = plan["scoring"]
    after = f"; scoring {about(scoring['seconds_high'])} more" if scoring else ""
    return f"{total} of training, {step}{after}"


def _disk_text(plan: Plan) -> str:
    largest = sorted(plan["disk"], key=lambda term: -term["bytes"])[:2]
    total = bytes_text(plan["disk_total_bytes"])
    unit = total[total.index(" ") :]
    parts = ", ".join(f"{term['term']} {bytes_text(term['bytes']).removesuffix(unit)}" for term in largest)
    free = plan["disk_free_bytes"]
    free_text = f"{bytes_text(free)} free" if free is not None else "free space unknown: set hardware.disk"
    return f"{total} ({parts}); {free_text}"


def measured_rows_text(estimate: dict[str, Any]) -> str:
    """Return, in words, which rows the plan has measured, and the longest of them."""
    longest, rows = estimate["longest_row"], estimate["lengths_rows"]
    if longest is None or rows is None:
        return f"assumed to be max_length long ({estimate['length']:,} tokens): they are not on this machine"
    cut = f", of which {estimate['length']:,} count" if longest > estimate["length"] else ""
    match estimate["lengths_known"]:
        case "all":
            return f"from all {rows:,}; longest {longest:,} tokens{cut}"
        case "sample":
            return f"from {rows:,}, the largest among them; longest {longest:,} tokens{cut}"
    return f"from {rows:,}; longest at most {longest:,} tokens, by its bytes (no tokenizer here)"


def _scoring_text(answers: dict[str, Any] | None) -> str | None:
    """Return a line where generating answers may not fit, or fits only without the merged model; else None."""
    if answers is None or answers["fewer"] is None:
        return None
    needed = bytes_text(answers["bytes"])
    if answers.get("without_merged"):
        return f"base and adapter are scored, quantized as in training; not the merged model, which needs {needed}"
    if answers["fewer"]:
        return f"{answers['rows']} prompts may not fit ({needed}): set evaluate.batch_size: {answers['fewer']}"
    return f"may not fit, {needed} even for one prompt: see `surefit check`"
