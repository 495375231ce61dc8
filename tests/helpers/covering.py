"""Combinations of settings in which every two values of two settings meet, where they may: all pairs, in a few hundred.

Pairwise testing: most faults of interplay need two settings only (Kuhn, Wallace & Gallo 2004, "Software Fault
Interactions and Implications for Software Testing").
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from typing import Any

from surefit.config.capabilities import conflicts, traits
from surefit.config.modes import GROUPED, MODES
from surefit.config.optimizers import OPTIMIZERS
from surefit.config.schema import SureFitConfig

FACTORS: dict[str, tuple[Any, ...]] = {
    "mode": (
        *(name + more for name in MODES for more in ("", " offload") if MODES[name].sharded or not more), "fsdp cp",
    ),
    "quantization": ("none", "nf4", "fp8"),
    "optimizer": tuple(OPTIMIZERS),
    "fused_lora": ("auto", False, True),
    "kernels": ("auto", False, True),
    "compile": (False, True),
    "adapter": ("lora", "rslora", "dora", "full"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "packing": ("auto", False, True),
    "checkpointing": ("auto", False, "selective", True, "offload"),
    "chunked_loss": (True, False),
    "tiled_mlp": ("auto", False, True),
    "neftune": (None, 5.0),
    "objective": ("sft", "dpo", "simpo"),
    "hardware": ("cpu", "t4", "l4", "rtx4090", "a100-80gb", "h100", "b200"),
}  # fmt: skip
"""Setting → its values."""
DECIDING = ("mode", "quantization", "optimizer", "fused_lora", "kernels", "compile", "adapter", "neftune", "objective")
"""Those that the table knows."""
TOO_OLD = ("kernels", True, "hardware", "t4")
"""Triton does not compile for this GPU (CFG008)."""
Row = dict[str, Any]
Pair = tuple[str, Any, str, Any]
TRIED = 20
"""Rows that are drawn for each one that is taken."""
FUTILE = 300
"""Draws in a row that are refused, after which a pair is taken to be impossible."""


def rows(at_least: int = 400, seed: int = 0) -> list[Row]:
    """Rows without a conflict, in which every pair of values occurs that may; as many more as are asked for."""
    return list(_rows(at_least, random.Random(seed)))


def _rows(at_least: int, rng: random.Random) -> Iterator[Row]:
    """Greedy: of rows that are drawn around a pair that is still missing, the one with most pairs that are."""
    two = list(combinations(FACTORS, 2))
    missing = [(a, i, b, j) for a, b in two for i, j in product(FACTORS[a], FACTORS[b])]
    rng.shuffle(missing)
    left, made = dict.fromkeys(missing), 0
    while left or made < at_least:
        # Beyond all pairs, more of each mode, of which those drawn freely would have few that take little; uncompiled,
        # because tracing takes far longer than two steps.
        fixed = next(iter(left), ("mode", rng.choice(FACTORS["mode"]), "compile", False))
        drawn = [row for _ in range(TRIED if left else 1) if (row := _drawn(fixed, rng)) is not None]
        if not drawn:
            del left[fixed]
            continue
        best = max(drawn, key=lambda row: sum(pair in left for pair in pairs(row)))
        for pair in pairs(best):
            left.pop(pair, None)
        made += 1
        yield best


def _drawn(fixed: Pair, rng: random.Random) -> Row | None:
    """A row at random with the pair in it; None where none is possible."""
    for _ in range(FUTILE):
        row = {name: rng.choice(values) for name, values in FACTORS.items()}
        row |= {name: value for name, value in (fixed[:2], fixed[2:]) if name in row}
        if TOO_OLD not in pairs(row) and _allowed(*(row[name] for name in DECIDING)):
            return row
    return None


@functools.cache
def _allowed(*values: Any) -> bool:
    row = {name: options[0] for name, options in FACTORS.items()} | dict(zip(DECIDING, values, strict=True))
    return not conflicts(traits(SureFitConfig.model_validate(as_config(row, "base", "rows", "run"))))


def pairs(row: Row) -> Iterator[Pair]:
    for a, b in combinations(row, 2):
        yield a, row[a], b, row[b]


def as_config(row: Mapping[str, Any], model: str, data: str, out: str) -> dict[str, Any]:
    """A combination as a user's file would have it; one of pairs names those that come with SureFit."""
    mode, *more = row["mode"].split()
    paired = row["objective"] != "sft"
    lora = {f"use_{row['adapter']}": True} if row["adapter"] in ("rslora", "dora") else {}
    shared = {name: 2 for name in GROUPED if name in (mode, *more)}
    return {
        **({} if paired else {"recipe": "function_calling"}),
        "objective": {"name": row["objective"]},
        "model": {"name_or_path": model, "dtype": row["dtype"], "quantization": row["quantization"]},
        "lora": lora,
        "data": {
            "train": "surefit/shorter-answers" if paired else data,
            "eval": 0.2,
            "max_length": 512,
            "packing": row["packing"],
        },
        "train": {
            "method": "full" if row["adapter"] == "full" else "lora",
            "max_steps": 2,
            "global_batch_size": 4,
            "optim": row["optimizer"],
            "gradient_checkpointing": row["checkpointing"],
            "neftune_noise_alpha": row["neftune"],
        },
        "speed": {name: row[name] for name in ("fused_lora", "kernels", "compile", "chunked_loss", "tiled_mlp")},
        "hardware": {"gpu": row["hardware"], "count": 1 if mode == "single" else 2},
        "parallel": {"mode": mode, "offload": "offload" in more} | shared,
        "output_dir": out,
    }
