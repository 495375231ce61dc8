"""The closed form of a step's memory against the simulation, worst first.

    python benchmarks/plan_closed_form.py [--models PART,PART] [--variants NAME,NAME] [--every K]
        [--kernels] [--whole] [--json]

Each model of the catalogue (0.5B to 8B) is planned in each variant, by `facts.memory_formula.peak_bytes_on_one` and by
`plan.simulate.simulate`. Compared are the memory in tensors at the fullest moment of a training step, and whether the
interval of the closed form contains what the allocator reserves. Nothing is downloaded, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import SureFitConfig
from surefit.core.units import GIB
from surefit.facts.hardware import HardwareFacts, hardware_facts
from surefit.facts.memory_formula import peak_bytes_on_one
from surefit.facts.model import model_facts
from surefit.plan.build_plan import closed_form_disagreement
from surefit.plan.memory_interval import CONTEXT, closed_form_estimate
from surefit.plan.simulate import simulate_memory
from surefit.plan.step_config import build_step_config

MODELS = (
    "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B",
    "Qwen/Qwen3-4B", "meta-llama/Llama-2-7b-hf", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B",
)  # fmt: skip
CHECKPOINTING, LONG = {"train.gradient_checkpointing": True}, {"data.max_length": 8192}
FULL = {"train.method": "full"}
FUSED = {"speed.fused_lora": True}
NF4 = {"model.quantization": "nf4"}
VARIANTS: dict[str, dict[str, Any]] = {
    # name: changes of BASE
    "lora": {},
    "lora-fused": FUSED,
    "lora-fused-4": {**FUSED, "rows": 4},
    "lora-fused-dropout": {**FUSED, "lora.lora_dropout": 0.05, "lora.r": 64},
    "lora-fused-checkpointing": {**FUSED, **LONG, **CHECKPOINTING},
    "lora-fused-selective": {**FUSED, **LONG, "train.gradient_checkpointing": "selective"},
    "lora-fused-offload": {**FUSED, **LONG, "train.gradient_checkpointing": "offload"},
    "lora-fused-tiled": {**FUSED, **LONG, **CHECKPOINTING, "speed.tiled_mlp": True, "rows": 4},
    "lora-padded": {"data.packing": False, "rows": 8, "data.max_length": 512},
    "lora-padded-selective": {"data.packing": False, "rows": 4, "train.gradient_checkpointing": "selective"},
    "lora-naive": {"speed.chunked_loss": False},
    "lora-naive-padded-checkpointing": {
        "speed.chunked_loss": False, "data.packing": False, "rows": 4, "data.max_length": 1000, **CHECKPOINTING
    },
    "lora-fp32": {"model.dtype": "float32", "rows": 4},
    "lora-fp32-padded-checkpointing": {"model.dtype": "float32", "data.packing": False, "rows": 2, **CHECKPOINTING},
    "lora-fp16-turing": {"model.dtype": "float16", "hardware.gpu": "t4", **FUSED},
    "nf4": NF4,
    "nf4-fused-checkpointing": {**NF4, **FUSED, **LONG, **CHECKPOINTING},
    "nf4-fused-short": {**NF4, **FUSED, **CHECKPOINTING, "data.max_length": 512},
    "fp8-fused": {**FUSED, "model.quantization": "fp8"},
    "fp8-hopper": {"model.quantization": "fp8", "hardware.gpu": "h100", **FUSED, **LONG},
    "fp8-hopper-checkpointing": {**FUSED, **CHECKPOINTING, "model.quantization": "fp8", "hardware.gpu": "h100"},
    "full-checkpointing": {**FULL, **CHECKPOINTING, "rows": 2, "data.max_length": 1024},
    "full-long": {**FULL, **LONG, "train.gradient_checkpointing": "selective"},
    "full-padded-accumulated": {**FULL, "data.packing": False, "rows": 4, "data.max_length": 512, "parts": 2},
    "full-fp32-accumulated": {**FULL, "model.dtype": "float32", "data.max_length": 512, "parts": 4},
    "full-naive-long": {**FULL, **LONG, **CHECKPOINTING, "speed.chunked_loss": False},
    "full-8bit": {**FULL, **CHECKPOINTING, "train.optim": "adamw_8bit"},
    "full-paged": {**FULL, **CHECKPOINTING, "train.optim": "paged_adamw_8bit"},
}  # fmt: skip
BASE: dict[str, Any] = {
    "model.dtype": "bfloat16", "lora.r": 8, "data.train": "unused", "data.packing": True, "data.max_length": 2048,
    "train.gradient_checkpointing": False, "speed.fused_lora": False, "speed.tiled_mlp": False,
    "hardware.gpu": "a100-80", "output_dir": "unused",
}  # fmt: skip


def settings(name: str, changes: dict[str, Any]) -> tuple[ResolvedConfig, HardwareFacts]:
    """A run; `rows` and `parts` among the changes are examples per micro batch and micro batches per step."""
    values = {**BASE, **changes}
    rows, parts = values.pop("rows", 1), values.pop("parts", 1)
    tree: dict[str, Any] = {"model": {"name_or_path": name}, "train": {}}
    for dotted, value in values.items():
        section, _, key = dotted.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[key] = value
    tree["train"] |= {"global_batch_size": rows * parts, "per_device_train_batch_size": rows}
    hardware = hardware_facts(tree["hardware"]["gpu"], Path.cwd())
    return ResolvedConfig(SureFitConfig.model_validate(tree), {}, parts, None), hardware


def compare(name: str, variant: str, kernels: bool, whole: bool) -> dict[str, Any]:
    resolved, hardware = settings(name, VARIANTS[variant] | {"speed.kernels": kernels})
    setting = build_step_config(resolved, model_facts(name), hardware)
    start = time.perf_counter()
    budget = peak_bytes_on_one(resolved, model_facts(name), capability=setting.capability)
    closed_seconds = time.perf_counter() - start
    assert budget is not None, "every model of the list is covered"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        memory = simulate_memory(setting, extrapolate=not whole, merge=False)
    closed, simulated = budget.phases["step"], next(p.allocated for p in memory.phases if p.name == "step")
    interval = closed_form_estimate(resolved, model_facts(name), hardware)
    assert interval is not None, "as above"
    return {
        "model": name,
        "variant": variant,
        "closed_bytes": closed,
        "simulated_bytes": simulated,
        "reserved_bytes": memory.reserved,
        "contained": interval.low <= memory.reserved + CONTEXT[1] and memory.reserved + CONTEXT[0] <= interval.high,
        # Where the context is at its largest "fits" would be false.
        "above": memory.reserved + CONTEXT[1] > interval.high,
        "error": closed / simulated - 1,
        "closed_seconds": closed_seconds,
        "seconds": time.perf_counter() - start,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", help="comma-separated parts of names")
    parser.add_argument("--variants", help=f"comma-separated: {', '.join(VARIANTS)}")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="only each K-th of all, spread evenly")
    parser.add_argument("--kernels", action="store_true", help="with fused kernels")
    parser.add_argument("--whole", action="store_true", help="simulate every layer: slower")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    asked = parser.parse_args()
    variants = asked.variants.split(",") if asked.variants else list(VARIANTS)
    if unknown := [name for name in variants if name not in VARIANTS]:
        parser.error(f"unknown variant {unknown[0]}; there are {', '.join(VARIANTS)}")
    parts = asked.models.split(",") if asked.models else [""]
    models = [name for name in MODELS if any(part in name for part in parts)]
    if not models:
        parser.error(f"no model matches {asked.models}; there are {', '.join(MODELS)}")
    pairs = [(name, variant) for name in models for variant in variants][:: asked.every]
    rows = []
    for name, variant in pairs:
        rows.append(compare(name, variant, asked.kernels, asked.whole))
        print(f"{len(rows)} of {len(pairs)}: {name} {variant} {rows[-1]['error']:+.3%}", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: -abs(row["error"]))
    for row in rows:
        outside = " (above the interval)" if row["above"] else "" if row["contained"] else " (outside)"
        print(
            f"{row['error']:+8.3%}  {row['closed_bytes'] / GIB:8.3f} GiB  {row['simulated_bytes'] / GIB:8.3f} simulated"
            f"  {row['reserved_bytes'] / GIB:8.3f} reserved{outside}  {row['model']}  {row['variant']}"
            f"  ({row['seconds']:.1f} s)"
        )
    errors = [abs(row["error"]) for row in rows]
    summary = {
        "configurations": len(rows),
        "mean_error": statistics.fmean(errors),
        "worst_error": errors[0],
        "disagreements": sum(
            closed_form_disagreement(row["closed_bytes"], row["simulated_bytes"]) is not None for row in rows
        ),
        "reserved_outside_the_interval": sum(not row["contained"] for row in rows),
        "reserved_above_the_interval": sum(row["above"] for row in rows),
        "closed_form_seconds": statistics.median(row["closed_seconds"] for row in rows),
    }
    print("\n".join(f"{key}: {value:.5g}" for key, value in summary.items()))
    if asked.json:
        print(json.dumps({"rows": rows, **summary}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
