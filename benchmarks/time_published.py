"""Predicted against published training times: the results of PEFT's method comparison on an L40S, one row each.

    python benchmarks/time_published.py --data FILE [--only NAMES] [--json]

FILE has the rows of `plan_published.py`, with `train_time_s` for `max_steps` steps. That time is not of steps alone: it
holds tokenising and answering the 1,319 questions of the test set as well (PEFT's run.py subtracts only what it
evaluates between steps), here 350 to 630 s of 877 to 1,505. What 250 steps took is published too, as "train time"
among a run's metrics: `published_steps.jsonl` has these windows, rounded to 0.01 s, of all runs whose file was found,
eight of them the very runs of FILE (the same `train_time`).

Not published, and therefore assumed: how the lengths are distributed. Their mean is (4,198,051 tokens in 20,000
examples, one of each counted and not there), and that batches of four come from 80 sorted examples. Examples are taken
as log-normal with a standard deviation of 0.45 of the logarithm, 700 tokens at most: 82 to 595 tokens in a batch. Short
batches wait for launches and long ones do not, so the mean of the times is not the time of the mean.

Compared are

- the steps of each run with the constants of `plan.profile`, and with the rates and the launch fitted on all others;
- the whole of each run that has no windows, so that nothing of it was fitted: steps and the median of the rest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plan_published import build

from surefit.facts.gpus import GPUS
from surefit.plan.operations import Operations, OperatorCounter
from surefit.plan.profile import LAUNCH_SECONDS, MOVEMENT, PRODUCTS, to_device_rates
from surefit.plan.simulate import record_run
from surefit.plan.time import operator_time
from surefit.plan.trace import Recorder

STEPS = Path(__file__).with_name("published_steps.jsonl")
SHORT, LONG = 120, 240
"""Tokens of the batches that are simulated; others lie on the line through them."""
MEAN, DEVIATION, LONGEST = 208.9, 0.45, 700
BUCKET, BATCH = 80, 4
SCALES = np.arange(0.80, 1.26, 0.02)
"""Of the rates, to fit."""
LAUNCHES = np.arange(12, 30, 0.5) * 1e-6
"""Seconds of a launch, to fit."""


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        device: seconds of a step's operators in batches of SHORT and of LONG tokens, at the plan's rates.
        kernels: of a step.
        whole: seconds of the run, all that is not training included; steps: of it.
        windows: seconds of a step, or None where that was not found.
    """

    name: str
    device: tuple[float, float]
    kernels: float
    whole: float
    steps: int
    windows: float | None

    def step(self, scale: float = 1.0, launch: float = LAUNCH_SECONDS) -> float:
        """Predicted seconds of a step, the mean over all lengths, with the rates so many times as high."""
        short, long = self.device
        device = short + (LENGTHS - SHORT) * (long - short) / (LONG - SHORT)
        return float(np.maximum(device / scale, self.kernels * launch).mean())


def lengths() -> np.ndarray:
    """Forty tokens of padded batches that stand for all."""
    examples = np.random.default_rng(0).lognormal(0, DEVIATION, 400_000)
    examples = examples[examples < LONGEST / MEAN * examples.mean()]
    examples *= MEAN / examples.mean()
    sorted_ = np.sort(examples[: len(examples) // BUCKET * BUCKET].reshape(-1, BUCKET), axis=1)
    longest = sorted_.reshape(-1, BATCH).max(axis=1)
    return np.asarray(np.quantile(longest, (np.arange(40) + 0.5) / 40))


LENGTHS = lengths()


def operations(row: dict[str, Any], length: int) -> Operations:
    """The operators of the second step of the row's own loop, method_comparison/MetaMathQA/run.py."""
    train, tally = row["train_config"], OperatorCounter({"second"})

    def loop(model: torch.nn.Module, recorder: Recorder) -> None:
        recorder.watch = tally.note
        model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=True)
        for phase in ("first", "second"):
            recorder.start(phase)
            optimizer.zero_grad()
            ids, labels, mask = (torch.empty((train["batch_size"], length), dtype=torch.long) for _ in range(3))
            output = model(input_ids=ids, labels=labels, attention_mask=mask)
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, train["grad_norm_clip"])
            optimizer.step()

    record_run(build(train, row["peft_config"]), loop, padded=True, cuda=True)
    return tally.operations


def simulate(row: dict[str, Any], windows: list[float] | None) -> Run:
    """A row's operators in both lengths, and what was measured."""
    rates, steps = to_device_rates(GPUS["l40s"]), row["train_config"]["max_steps"]
    found = [operator_time(operations(row, length), rates) for length in (SHORT, LONG)]
    device = (found[0].arithmetic + found[0].movement, found[1].arithmetic + found[1].movement)
    each = sum(windows) / steps if windows else None
    return Run(row["name"], device, found[1].launches / LAUNCH_SECONDS, row["train_time_s"], steps, each)


def simulate_all(rows: list[dict[str, Any]]) -> tuple[list[Run], dict[str, str]]:
    """The rows that simulate, and why the others do not."""
    windows = {each["name"]: each["windows"] for each in map(json.loads, STEPS.read_text("utf-8").splitlines())}
    runs, failed = [], {}
    for row in rows:
        try:
            runs.append(simulate(row, windows.get(row["name"])))
        except Exception as error:  # a PEFT method may ask for data while it is built
            failed[row["name"]] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"
            continue
        print(f"simulated {len(runs)}: {row['name']}", file=sys.stderr, flush=True)
    return runs, failed


def fit(errors: np.ndarray) -> tuple[int, ...]:
    """Where the squares of `errors[run, scale, launch]` add up to the least."""
    sums = (errors**2).sum(axis=0)
    return np.unravel_index(sums.argmin(), sums.shape)  # type: ignore[return-value]


def left_out(runs: list[Run]) -> tuple[np.ndarray, tuple[int, ...]]:
    """The relative error of each run's step, predicted from a fit on all others; and the fit on all."""
    table = [[[run.step(a, b) / (run.windows or 0) - 1 for b in LAUNCHES] for a in SCALES] for run in runs]
    errors = np.array(table)
    others = [fit(np.delete(errors, run, axis=0)) for run in range(len(runs))]
    return np.array([errors[run][best] for run, best in enumerate(others)]), fit(errors)


def rest() -> float:
    """Seconds of a run that are not steps: the median of those whose windows and whole are of one run."""
    found = map(json.loads, STEPS.read_text("utf-8").splitlines())
    return statistics.median(each["train_time"] - sum(each["windows"]) for each in found if "train_time" in each)


def summed_up(prefix: str, errors: np.ndarray) -> dict[str, float]:
    """Of relative errors."""
    sizes = np.sort(np.abs(errors))
    return {
        f"{prefix}mean_error": round(float(sizes.mean()), 4),
        f"{prefix}median_error": round(statistics.median(sizes.tolist()), 4),
        f"{prefix}nine_in_ten_within": round(float(np.quantile(sizes, 0.9)), 4),
        f"{prefix}worst_error": round(float(sizes[-1]), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="rows of published measurements, JSON lines")
    parser.add_argument("--only", default="", help="comma-separated parts of names")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    asked = parser.parse_args()
    rows = [json.loads(line) for line in asked.data.read_text(encoding="utf-8").splitlines() if line.strip()]
    chosen = [row for row in rows if any(part in row["name"] for part in asked.only.split(","))]
    runs, failed = simulate_all(chosen)
    measured, unseen = [run for run in runs if run.windows], [run for run in runs if not run.windows]
    if len(measured) < 3 or not unseen:
        sys.exit(f"{asked.data}: {len(measured)} of {len(chosen)} rows have steps, and a fit on the others needs 3")
    steps = np.array([run.step() / (run.windows or 0) - 1 for run in measured])
    wholes = np.array([(run.steps * run.step() + rest()) / run.whole - 1 for run in unseen])
    lone, best = left_out(measured)
    for run, error, alone in zip(measured, steps, lone, strict=True):
        print(f"{run.name:58} step {run.windows:7.4f} s measured, {error:+7.1%}, fitted on the others {alone:+7.1%}")
    for run, error in zip(unseen, wholes, strict=True):
        print(f"{run.name:58} whole {run.whole:6.0f} s measured, {error:+7.1%}")
    for name, reason in failed.items():
        print(f"{name:58} not simulated: {reason}")
    summary = {
        "rows": len(runs), "of": len(chosen), "with_steps": len(measured), "rest_seconds": round(rest(), 1),
        "fitted_products": round(PRODUCTS * float(SCALES[best[0]]), 3),
        "fitted_movement": round(MOVEMENT * float(SCALES[best[0]]), 3),
        "fitted_launch_microseconds": round(float(LAUNCHES[best[1]]) * 1e6, 1),
        **summed_up("", steps), **summed_up("left_out_", lone), **summed_up("whole_", wholes),
    }  # fmt: skip
    print("\n".join(f"{key}: {value}" for key, value in summary.items()))
    if asked.json:
        print(json.dumps({**summary, "not_simulated": failed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
