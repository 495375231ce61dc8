"""Predicted against published training times: the results of PEFT's method comparison on an L40S, one row each.

    python benchmarks/time_published.py --data FILE [--length 240] [--only NAMES] [--json]

FILE has the rows of `plan_published.py`, with `train_time_s` for `max_steps` steps. Not published, and therefore
assumed: the mean length of the padded batches (240 tokens, as in `plan_published.py`; what is wrong with it goes into
the fitted efficiency), that all time is spent in steps, and the data sheet's rates. Every row is predicted from a fit
on all others: seconds = roofline × a, for the GPU works while kernels are launched. So the rows say only what a launch
takes at most. The last lines compare the same with launches added, + kernels × b, and with four free features
(bfloat16 FLOP, float32 FLOP, other bytes, kernels).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plan_published import build

from surefit.facts.gpus import GPUS
from surefit.plan.operations import Operations, Tally
from surefit.plan.profile import Rates
from surefit.plan.simulate import record_run
from surefit.plan.time import roofline
from surefit.plan.trace import Recorder

LENGTH = 240
TERAFLOP, GIGABYTE = 1e12, 1e9


def operations(row: dict[str, Any], length: int) -> Operations:
    """The operators of the second step of the row's own loop, method_comparison/MetaMathQA/run.py."""
    train, tally = row["train_config"], Tally({"second"})

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


def features(counted: Operations) -> list[float]:
    """Roofline seconds at the data sheet's rates, kernels, and the four free features."""
    sheet = GPUS["l40s"]
    assert sheet.bandwidth is not None
    peak = {dtype: rate for dtype in ("bfloat16", "float32") if (rate := sheet.flops(dtype)) is not None}
    rates = Rates(
        {k: [(1, v)] for k, v in peak.items()}, [(1, sheet.bandwidth)], 0.0, peak, 0.0, "data sheet",
        products=peak, capability=sheet.compute_capability,
    )  # fmt: skip
    kernels = sum(times * operation.kernels for operation, times in counted.items())
    half, single = (
        sum(times * o.flops for o, times in counted.items() if (o.dtype == "bfloat16") == is_half) / TERAFLOP
        for is_half in (True, False)
    )
    others = sum(times * o.bytes for o, times in counted.items() if not o.flops) / GIGABYTE
    return [roofline(counted, rates)[0], kernels, half, single, others]


def fit(table: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The coefficients with the least squared relative error."""
    coefficients, *_ = np.linalg.lstsq(table / seconds[:, None], np.ones(len(seconds)), rcond=None)
    return np.asarray(coefficients)


def left_out(table: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The relative error of each row, predicted from a fit on all others."""
    errors = []
    for row in range(len(seconds)):
        others = np.arange(len(seconds)) != row
        errors.append(table[row] @ fit(table[others], seconds[others]) / seconds[row] - 1)
    return np.array(errors)


def simulate(rows: list[dict[str, Any]], length: int) -> tuple[list[tuple[str, float, list[float]]], dict[str, str]]:
    """(name, measured seconds per step, features) of the rows that simulate, and why the others do not."""
    done, failed = [], {}
    for row in rows:
        try:
            counted = operations(row, length)
        except Exception as error:  # a PEFT method may ask for data while it is built
            failed[row["name"]] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"
            continue
        done.append((row["name"], row["train_time_s"] / row["train_config"]["max_steps"], features(counted)))
        print(f"simulated {len(done)}: {row['name']}", file=sys.stderr, flush=True)
    return done, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="rows of published measurements, JSON lines")
    parser.add_argument("--length", type=int, default=LENGTH, help="mean tokens of a padded batch")
    parser.add_argument("--only", default="", help="comma-separated parts of names")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    asked = parser.parse_args()
    rows = [json.loads(line) for line in asked.data.read_text(encoding="utf-8").splitlines() if line.strip()]
    chosen = [row for row in rows if any(part in row["name"] for part in asked.only.split(","))]
    done, failed = simulate(chosen, asked.length)
    if len(done) < 6:
        sys.exit(f"{asked.data}: {len(done)} of {len(chosen)} rows simulate, and a fit on the others needs 6")
    seconds = np.array([measured for _, measured, _ in done])
    table = np.array([row for *_, row in done])
    errors = left_out(table[:, :1], seconds)
    for (name, measured, _), error in sorted(zip(done, errors, strict=True), key=lambda pair: -abs(pair[1])):
        print(f"{name:48} {measured:7.4f} s measured {measured * (1 + error):7.4f} predicted {error:+7.1%}")
    for name, reason in failed.items():
        print(f"{name:48} not simulated: {reason}")
    summary = {
        "rows": len(done),
        "of": len(chosen),
        "length_assumed": asked.length,
        "efficiency": round(1 / fit(table[:, :1], seconds)[0], 3),
        "launch_microseconds_at_most": round(float((seconds / table[:, 1]).min()) * 1e6, 2),
    }
    for name, columns in (("", [0]), ("launches_added_", [0, 1]), ("four_features_", [2, 3, 4, 1])):
        sizes = np.sort(np.abs(left_out(table[:, columns], seconds)))
        summary |= {
            f"{name}mean_error": round(float(sizes.mean()), 4),
            f"{name}median_error": round(statistics.median(sizes.tolist()), 4),
            f"{name}nine_in_ten_within": round(float(np.quantile(sizes, 0.9)), 4),
            f"{name}worst_error": round(float(sizes[-1]), 4),
        }
    print("\n".join(f"{key}: {value}" for key, value in summary.items()))
    if asked.json:
        results = [{"name": name, "seconds": s, "error": e} for (name, s, _), e in zip(done, errors, strict=True)]
        print(json.dumps({**summary, "results": results, "not_simulated": failed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
