"""What the sinks cost a training: the step time with all of them, with their servers killed or stopped, and without.

    python benchmarks/telemetry_cost.py [--steps 200] [--rounds 15] [--json]

One process trains the same small run again and again, each round once in every way and in another order: without sinks;
with MLflow, W&B (offline), TensorBoard and Prometheus while a real MLflow server and a real Prometheus are up; with the
two killed (connections are refused); and with the two stopped by SIGSTOP (connections hang). The time of a step is the
one in metrics.jsonl, the time between the ends of two steps that of the whole loop. A run's medians are compared with
those of the run without sinks in the same round; the median of those ratios is printed, and for the time between steps
its 95 % interval over the rounds (bootstrap). The end is what comes after the last step. Every metrics.jsonl must have
every step. Exits with 1 where one has not.

Two runs of the same kind differ by a tenth and more. "waited" differs less: the share of the time between steps in
which the thread that trains did not compute, because another thread held the interpreter or the disk was asked.

A model of 20 thousand parameters makes steps of a few milliseconds: what a sink costs weighs heaviest there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/helpers"))

import tiny_run
import torch
from servers import MLflowServer, PrometheusServer, Server

from surefit.core.rundir import RunDir, read_jsonl
from surefit.telemetry.sinks import make_sinks

WAYS = ("none", "up", "killed", "stopped")
WARM_UP = 10
"""Steps at the beginning of a run that do not count."""


def stop(server: Server, number: int) -> None:
    assert server.process is not None
    os.killpg(server.process.pid, number)


def train(base: Path, out: Path, url: str, target: Path, steps: int, sinks: bool) -> dict[str, Any]:
    """One run; seconds of its steps, between their ends, and of its end."""
    settings = tiny_run.config(base, out, num_train_epochs=1e6, max_steps=steps, every=steps)
    changes = {"mlflow_uri": url, "wandb": "offline", "tensorboard": True, "prometheus_port": 0}
    telemetry = settings.telemetry.model_copy(update=changes if sinks else {})
    settings = settings.model_copy(update={"telemetry": telemetry})
    run = RunDir(out)
    run.create()
    target.unlink(missing_ok=True)
    target.symlink_to(run.path / "prometheus-target.json")
    ends: list[tuple[float, float]] = []
    notes: list[str] = []
    job = tiny_run.training(
        settings, sinks=make_sinks(telemetry, run), on_note=notes.append,
        on_progress=lambda progress: ends.append((time.perf_counter(), time.thread_time())),
    )  # fmt: skip
    job.fit()
    end = time.perf_counter() - ends[-1][0]
    between = [b - a for (a, _), (b, _) in pairwise(ends[WARM_UP:])]
    computed = [b - a for (_, a), (_, b) in pairwise(ends[WARM_UP:])]
    lines = [line for line in read_jsonl(run.metrics) if "loss" in line]
    return {
        "whole": [line["step"] for line in lines] == list(range(1, steps + 1)),
        "steps": [line["seconds"] for line in lines[WARM_UP:]],
        "between": between,
        "waited": 1 - sum(computed) / sum(between),
        "end": end,
        "notes": [note for note in notes if "did not get" in note or "failed" in note],
    }


def measure(directory: Path, steps: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    base = tiny_run.save_base(directory / "base")
    target = directory / "target.json"
    mlflow, prometheus = MLflowServer(directory / "mlflow"), PrometheusServer(directory / "prometheus", target)
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    servers = (mlflow, prometheus)
    try:
        for number in range(rounds):
            for way in WAYS[number % 4 :] + WAYS[: number % 4]:
                for server in servers:
                    server.kill() if way == "killed" else server.process or server.start()
                    if way == "stopped":
                        stop(server, signal.SIGSTOP)
                out = directory / f"{way}-{number}"
                results[way].append(train(base, out, mlflow.url, target, steps, way != "none"))
                if way == "stopped":
                    for server in servers:
                        stop(server, signal.SIGCONT)
                print(f"round {number + 1} of {rounds}: {way}", file=sys.stderr, flush=True)
    finally:
        for server in servers:
            server.kill()
    return results


def summary(results: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Per way: the median over all its steps, and over the rounds the ratio to the run without sinks of that round."""

    def ratios(way: str, key: str) -> list[float]:
        pairs = zip(results[way], results["none"], strict=True)
        return [statistics.median(run[key]) / statistics.median(none[key]) for run, none in pairs]

    intervals = {way: interval(ratios(way, "between")) for way in results}
    return {
        way: {
            "step_ms": 1e3 * statistics.median(value for run in runs for value in run["steps"]),
            "step_ratio": statistics.median(ratios(way, "steps")),
            "between_ms": 1e3 * statistics.median(value for run in runs for value in run["between"]),
            "between_ratio": statistics.median(ratios(way, "between")),
            "between_ratio_low": intervals[way][0],
            "between_ratio_high": intervals[way][1],
            "waited": statistics.median(run["waited"] for run in runs),
            "end_s": statistics.median(run["end"] for run in runs),
        }
        for way, runs in results.items()
    }


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of their median, over the rounds drawn again."""
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(2_000))
    return medians[50], medians[-51]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if missing := MLflowServer.missing() or PrometheusServer.missing():
        print(f"nothing measured: {missing}")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end, too
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        results = measure(Path(directory), options.steps, options.rounds)
    found = summary(results)
    whole = all(run["whole"] for runs in results.values() for run in runs)
    if options.json:
        print(json.dumps({"ways": found, "nothing_lost": whole}))
    else:
        print(f"{'sinks':8} {'step':>9} {'ratio':>6} {'between':>9} {'ratio':>6} {'95 %':>14} {'waited':>7} {'end':>7}")
        for way, each in found.items():
            print(
                f"{way:8} {each['step_ms']:6.2f} ms {each['step_ratio']:6.3f} {each['between_ms']:6.2f} ms "
                f"{each['between_ratio']:6.3f} {each['between_ratio_low']:6.3f} – {each['between_ratio_high']:5.3f} "
                f"{each['waited']:6.1%} {each['end_s']:5.1f} s"
            )
        print(f"every step is in metrics.jsonl: {'yes' if whole else 'NO'}")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
