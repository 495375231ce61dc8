"""The closed form of a step's memory against the simulation, worst first.

    python benchmarks/plan_closed_form.py [--models PART,PART] [--variants NAME,NAME] [--whole] [--json]

Each model of the catalogue (0.5B to 8B) is planned in each variant, by `facts.budget.peak_bytes` and by
`plan.simulate.simulate`; what is compared is the memory in tensors at the fullest moment of a training step. Nothing is
downloaded, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from typing import Any

from transformers import AutoConfig

from surefit.config.resolve import Resolved
from surefit.config.schema import Config
from surefit.core.units import GIB
from surefit.facts.budget import disagreement, peak_bytes
from surefit.facts.model import catalogue, model_facts
from surefit.plan.setting import Setting
from surefit.plan.simulate import simulate

MODELS = (
    "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B",
    "Qwen/Qwen3-4B", "meta-llama/Llama-2-7b-hf", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B",
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "lora-bf16": {"r": 8, "length": 2048},
    "lora-bf16-long": {"r": 64, "length": 8192, "checkpointing": True},
    "lora-bf16-padded": {"r": 8, "rows": 8, "length": 512, "padded": True},
    "lora-bf16-padded-checkpointing": {"r": 64, "rows": 4, "length": 1000, "padded": True, "checkpointing": True},
    "lora-fp32": {"r": 64, "rows": 8, "length": 512, "dtype": "float32"},
    "lora-fp32-padded-checkpointing": {
        "r": 8, "rows": 2, "length": 2048, "dtype": "float32", "padded": True, "checkpointing": True
    },
    "full-bf16-checkpointing": {"kind": "full", "rows": 2, "length": 1024, "checkpointing": True},
    "full-bf16-long": {"kind": "full", "length": 8192, "checkpointing": True},
    "full-bf16-padded-accumulated": {"kind": "full", "rows": 4, "length": 512, "padded": True, "micro_batches": 2},
    "full-fp32-accumulated": {"kind": "full", "length": 512, "dtype": "float32", "micro_batches": 4},
}  # fmt: skip


def settings(
    name: str,
    kind: str = "lora",
    r: int = 16,
    rows: int = 1,
    length: int = 2048,
    dtype: str = "bfloat16",
    padded: bool = False,
    checkpointing: bool = False,
    micro_batches: int = 1,
) -> tuple[Resolved, Setting]:
    """The same run as the closed form and as the simulation take it."""
    config = Config.model_validate(
        {
            "model": {"name_or_path": name, "dtype": dtype},
            "adapter": {"kind": kind, "r": r},
            "data": {"train": "unused", "max_length": length},
            "train": {
                "global_batch_size": rows * micro_batches,
                "per_device_train_batch_size": rows,
                "gradient_checkpointing": checkpointing,
            },
            "output_dir": "unused",
        }
    )
    shape = dict(catalogue()[name]["config"])
    architecture = AutoConfig.for_model(shape.pop("model_type"), **shape)
    setting = Setting(
        architecture, dtype, config.adapter, rows, length, padded, micro_batches=micro_batches,
        checkpointing=checkpointing,
    )  # fmt: skip
    return Resolved(config, {}, micro_batches, None), setting


def compare(name: str, variant: str, whole: bool) -> dict[str, Any]:
    options = VARIANTS[variant]
    resolved, setting = settings(name, **options)
    start = time.perf_counter()
    budget = peak_bytes(resolved, model_facts(name), padded=setting.padded)
    closed_seconds = time.perf_counter() - start
    assert budget is not None, "every model of the list is covered"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        phases = {phase.name: phase.allocated for phase in simulate(setting, extrapolate=not whole).phases}
    closed, simulated = budget.phases["step"], phases["step"]
    return {
        "model": name,
        "variant": variant,
        "closed_bytes": closed,
        "simulated_bytes": simulated,
        "error": closed / simulated - 1,
        "closed_seconds": closed_seconds,
        "seconds": time.perf_counter() - start,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", help="comma-separated parts of names")
    parser.add_argument("--variants", help=f"comma-separated: {', '.join(VARIANTS)}")
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
    rows = [compare(name, variant, asked.whole) for name in models for variant in variants]
    rows.sort(key=lambda row: -abs(row["error"]))
    for row in rows:
        print(
            f"{row['error']:+8.3%}  {row['closed_bytes'] / GIB:8.3f} GiB  {row['simulated_bytes'] / GIB:8.3f} simulated"
            f"  {row['model']}  {row['variant']}  ({row['seconds']:.1f} s)"
        )
    errors = [abs(row["error"]) for row in rows]
    summary = {
        "configurations": len(rows),
        "mean_error": statistics.fmean(errors),
        "worst_error": errors[0],
        "disagreements": sum(disagreement(row["closed_bytes"], row["simulated_bytes"]) is not None for row in rows),
        "closed_form_seconds": statistics.median(row["closed_seconds"] for row in rows),
    }
    print("\n".join(f"{key}: {value:.5g}" for key, value in summary.items()))
    if asked.json:
        print(json.dumps({"rows": rows, **summary}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
