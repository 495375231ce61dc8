"""Writes the figures of plans into the pages that quote them: docs/**/*.md, between markers that say what is planned.

python scripts/recipe_figures.py          (or `make figures`; a minute a config. A test compares the pages)

A marker names a config, its overrides, `rows=N` where the page speaks of so many rows, and the figure:

    <!-- plan configs/run.yaml rows=15000 step -->5.8 s<!-- /plan -->

memory is the interval and what the GPU has, closed the same by the closed form; step the seconds of an optimizer step,
total those of the whole run, steps their number. Every row is taken to have `data.max_length` tokens, whatever rows and
tokenizers are on this machine.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from surefit.config.load import load_config
from surefit.config.schema import decided
from surefit.core.rundir import write_atomic
from surefit.core.units import GIB, duration_text
from surefit.plan.build_plan import build_plan
from surefit.stages.run_context import load_checked_run

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- plan (?P<config>\S+)(?P<given>(?: \S+=\S+)*) (?P<figure>[a-z]+) -->)(.*?)(<!-- /plan -->)")
FIGURES = ("memory", "closed", "step", "total", "steps")


@cache
def plan_of(config: str, given: tuple[str, ...], quick: bool) -> dict[str, Any]:
    """The content of plan.json for rows of `data.max_length` tokens."""
    rows = next((int(text.removeprefix("rows=")) for text in given if text.startswith("rows=")), None)
    overrides = [text for text in given if not text.startswith("rows=")]
    loaded = load_config(ROOT / config, overrides)
    if rows is not None:  # rows that are not here are as many as they are said to be
        steps = -(
            -rows * decided(loaded.config.train.num_train_epochs) // decided(loaded.config.train.global_batch_size)
        )
        overrides.append(f"train.max_steps={int(steps)}")
    run = load_checked_run(
        load_config(ROOT / config, [*overrides, "data.train=elsewhere/rows", "data.eval=elsewhere/held-out"])
    )
    return build_plan(run.resolved, run.model, run.hardware, rows, quick=quick)


def figure(config: str, given: tuple[str, ...], name: str) -> str:
    """Return the text of one figure."""
    made = plan_of(config, given, name == "closed")
    estimate, time = made["estimate"], made["time"]
    match name:
        case "memory" | "closed":
            low, high = (estimate[end] / GIB for end in ("low_bytes", "high_bytes"))
            return f"{low:.1f} to {high:.1f} GiB of {estimate['capacity_bytes'] / GIB:.1f}"
        case "step":
            return duration_text(time["seconds_per_step"])
        case "total":
            return duration_text(time["total_seconds"])
    return f"{made['steps']['total_steps']:,}"


def pages() -> list[Path]:
    """Return the pages that quote a plan."""
    return [path for path in sorted((ROOT / "docs").rglob("*.md")) if MARKED.search(path.read_text(encoding="utf-8"))]


def current(text: str) -> str:
    """Return a page with its figures as they are now."""

    def written(found: re.Match[str]) -> str:
        given = tuple(found["given"].split())
        return f"{found[1]}{figure(found['config'], given, found['figure'])}{found[6]}"

    return MARKED.sub(written, text)


if __name__ == "__main__":
    for page in pages():
        before = page.read_text(encoding="utf-8")
        if (after := current(before)) != before:
            write_atomic(page, after)
            print(f"wrote {page.relative_to(ROOT)}")
