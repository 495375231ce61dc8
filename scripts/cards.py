"""Writes docs/reference/cards.md: what `surefit plan` gives on the cards that people have, with every `auto` decided.

python scripts/cards.py          (or `make cards`; minutes. A test compares one row of the page with the code)
"""

from __future__ import annotations

import importlib.metadata
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from surefit import __version__
from surefit.cli.plan_search import recompute_letters
from surefit.config.load import load_text
from surefit.core.rundir import write_atomic
from surefit.core.units import GIB, duration_text
from surefit.facts.gpus import BF16_CAPABILITY, GPUS
from surefit.facts.hardware import hardware_facts
from surefit.facts.model import model_facts
from surefit.plan.build_plan import build_plan
from surefit.plan.planner import Planner
from surefit.plan.search import largest_fitting_index
from surefit.plan.step_time_cache import device_rates_for
from surefit.stages.run_context import CheckedRun, load_checked_run

PAGE = Path(__file__).parents[1] / "docs/reference/cards.md"
CARDS = (
    "t4", "l4", "a10", "rtx3090", "rtx4090", "rtx5090", "a100-40", "l40s", "a100-80", "h100", "h200", "b200",
)  # fmt: skip
MODELS = {
    "meta-llama/Llama-3.2-1B-Instruct": "Llama 3.2 1B",
    "meta-llama/Llama-3.2-3B-Instruct": "Llama 3.2 3B",
    "meta-llama/Llama-3.1-8B-Instruct": "Llama 3.1 8B",
    "Qwen/Qwen3-14B": "Qwen3 14B",
    "Qwen/Qwen3-32B": "Qwen3 32B",
    "meta-llama/Llama-3.3-70B-Instruct": "Llama 3.3 70B",
}
METHODS = {"LoRA": (), "QLoRA": ("model.quantization=nf4",), "full": ("train.method=full",)}
LENGTHS = (2_048, 8_192, 32_768, 131_072)
STEP = 1_024
"""Tokens between two lengths of which the longest that fits is looked for."""
CONFIG = """recipe: function_calling
model: {name_or_path: meta-llama/Llama-3.1-8B-Instruct}
data: {train: surefit/function-calling-train, max_length: 2048}
hardware: {gpu: l4}
output_dir: runs/card
"""


@dataclass(frozen=True)
class Cell:
    """One plan.

    Attributes:
        estimate: that of plan.json; None beyond the model's context.
        how: micro batch, and what is recomputed.
        speed: tokens per second; None where it does not fit.
    """

    estimate: dict[str, Any] | None
    how: str = ""
    speed: float | None = None

    @property
    def verdict(self) -> str:
        return self.estimate["verdict"] if self.estimate else "too long"

    def __str__(self) -> str:
        if self.estimate is None:
            return "–"
        if self.verdict == "does not fit":
            return "no"
        low, high = (self.estimate[name] / GIB for name in ("low_bytes", "high_bytes"))
        memory = f"≤ {high:.1f} GiB" if self.verdict == "fits" else f"**?** {low:.1f} to {high:.1f} GiB"
        if self.speed is None:
            return f"{memory}, {self.how}"
        return f"{memory}, {self.how}<br>{_two_digits(self.speed)}/s, {_two_digits(1e6 / self.speed / 3600)} h"


@dataclass(frozen=True)
class Row:
    """A model trained in one way on one card: a cell for each of `LENGTHS`, and the longest length that surely fits."""

    cells: tuple[Cell, ...]
    longest: int

    @property
    def possible(self) -> bool:
        return any(cell.verdict in ("fits", "too close to call") for cell in self.cells)


def plan_row(planner: Planner, card: str, method: str) -> Row:
    """Every plan of a row. The closed form decides; what it finds too close to call is simulated."""
    context = planner.model.max_position_embeddings or LENGTHS[-1]

    def fits(index: int) -> bool:
        run = _run(planner.model.name, card, method, STEP * (index + 1))
        return bool(_document(planner, run, quick=True)["estimate"]["verdict"] == "fits")

    cells = tuple(
        _cell(planner, _run(planner.model.name, card, method, length)) if length <= context else Cell(None)
        for length in LENGTHS
    )
    simulated = [length for length, cell in zip(LENGTHS, cells, strict=True) if cell.verdict == "fits"]
    return Row(cells, max(STEP * (1 + largest_fitting_index(fits, context // STEP)), *simulated, 0))


def _run(model: str, card: str, method: str, length: int) -> CheckedRun:
    named = (f"model.name_or_path={model}", f"hardware.gpu={card}", f"data.max_length={length}")
    kernels = ("speed.kernels=true",) if (GPUS[card].compute_capability or (0, 0)) >= BF16_CAPABILITY else ()
    return load_checked_run(load_text(CONFIG, Path("card.yaml"), [*named, *METHODS[method], *kernels]))


def _document(planner: Planner, run: CheckedRun, *, quick: bool) -> dict[str, Any]:
    return build_plan(run.resolved, run.model, run.hardware, quick=quick, planner=planner)


def _cell(planner: Planner, run: CheckedRun) -> Cell:
    config = run.resolved.config
    kept = {"checkpointing": config.train.gradient_checkpointing, "tiled_mlp": config.speed.tiled_mlp}
    how = f"{config.train.per_device_train_batch_size}{recompute_letters(kept)}"
    estimate = _document(planner, run, quick=True)["estimate"]
    if estimate["verdict"] == "too close to call":
        estimate = _document(planner, run, quick=False)["estimate"]
    step = None if estimate["verdict"] == "does not fit" else planner.step(run.resolved, run.hardware)
    return Cell(estimate, how, step.tokens_per_second if step else None)


@cache
def planner_of(model: str) -> Planner:
    """Cards run the same operators, so what was simulated for one counts for others."""
    return Planner(model_facts(model))


def row_line(model: str, method: str, row: Row) -> str:
    """A row as the page has it."""
    longest = f"{row.longest:,}" if row.longest else "–"
    return f"| {MODELS[model]} | {method} | {longest} | {' | '.join(map(str, row.cells))} |"


def page(rows: dict[tuple[str, str, str], Row], seconds: float) -> str:
    """The whole page, from a row for every (card, model, method)."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "peft"))
    made = f"{datetime.now(UTC):%-d %B %Y}, SureFit {__version__}, {versions}; {duration_text(seconds)}"
    rates = device_rates_for(hardware_facts(CARDS[0]))
    assert rates
    lines = [HEAD.format(config=CONFIG, made=made, margin=rates.margin), "## How long rows may be", "", LONGEST, ""]
    lines += [f"| card | {' | '.join(MODELS.values())} |", "|---|" + "---|" * len(MODELS)]
    for card in CARDS:
        longest = (" / ".join(_thousands(rows[card, model, method].longest) for method in METHODS) for model in MODELS)
        lines.append(f"| [{GPUS[card].name}](#{GPUS[card].name.lower().replace(' ', '-')}) | {' | '.join(longest)} |")
    for card in CARDS:
        lines += ["", *_section(card, rows)]
    return "\n".join(lines) + "\n"


def _section(card: str, rows: dict[tuple[str, str, str], Row]) -> Iterator[str]:
    gpu = GPUS[card]
    yield f"## {gpu.name}"
    yield ""
    yield f"{gpu.architecture}, {gpu.memory_bytes / GIB:.2f} GiB; `--gpu {card}`. Planned, not measured."
    yield ""
    yield f"| model | | longest | {' | '.join(f'{length:,}' for length in LENGTHS)} |"
    yield "|---|---|---:|" + "---|" * len(LENGTHS)
    none = []
    for model, label in MODELS.items():
        for method in METHODS:
            row = rows[card, model, method]
            if row.possible:
                yield row_line(model, method, row)
            else:
                assert row.cells[0].estimate is not None
                none.append(f"{label} {method} (at least {row.cells[0].estimate['low_bytes'] / GIB:.1f} GiB)")
    if none:
        yield ""
        yield f"Not on one of them, with rows of {LENGTHS[0]:,} tokens: {', '.join(none)}."


def _thousands(tokens: int) -> str:
    return f"{tokens // STEP}k" if tokens else "–"


def _two_digits(number: float) -> str:
    return f"{float(f'{number:.2g}'):,.12g}"


HEAD = """# Cards that people have

**Planned, not measured.** What one card can train, and how fast, with every `auto` decided by SureFit. Speed is that of
data sheets, ± {margin:.0%} ([how](../plan-method.md)); no training run stands behind any figure here. Written by
`make cards` on {made}.

A cell is what `surefit plan` says of this config, with `--set` for card, model, length and method. The methods are LoRA
(rank 16, all linear layers), QLoRA (the same over NF4: `model.quantization=nf4`) and full (`train.method=full`).

```yaml
{config}```

- **≤ 18.3 GiB**: it fits, with this as the upper end of what training takes of the card. **?** is too close to call,
  between these two; **no** does not fit. All by the closed form (`--quick`), which is cautious; what that finds too
  close to call is simulated, unless it is too long for that. A dash: beyond the model's context.
- **2 s**: two rows per micro batch; s: all but attention is recomputed, c: whole layers, no letter: nothing; t: MLPs in
  tiles. The global batch is 64 rows, packed.
- From Ampere on with fused kernels (`speed.kernels=true`), which a machine with the GPU and the extra `kernels` takes
  by itself. Without them, runs take more memory and time.
- **690/s, 0.4 h**: tokens per second, and hours per million tokens: times the price of an hour, what a million tokens
  cost. SureFit has no list of prices.
- **longest**: tokens of the longest row that certainly fits, in steps of 1,024, up to the model's context.
  `surefit plan --solve max_length` is more exact, and `train.gradient_checkpointing: offload`, which `auto` never
  takes, fits longer ones.

Several cards: `surefit plan run.yaml --gpus 4`. Other cards: [GPUs](gpus.md).
"""
LONGEST = "In thousands of tokens (1k: 1,024), LoRA / QLoRA / full."


def main() -> None:
    start, rows = time.monotonic(), {}
    wanted = [(card, model, method) for model in MODELS for method in METHODS for card in CARDS]
    for done, (card, model, method) in enumerate(wanted, 1):
        rows[card, model, method] = plan_row(planner_of(model), card, method)
        spent = time.monotonic() - start
        left = duration_text(spent / done * (len(wanted) - done))
        print(f"{done}/{len(wanted)} {card} {MODELS[model]} {method}: about {left} left", file=sys.stderr, flush=True)
    write_atomic(PAGE, page(rows, time.monotonic() - start))


if __name__ == "__main__":
    main()
