"""Tokens per second alone and beside two processes that compute: the demo's training, its answers, and a real model's.

    python benchmarks/busy.py [--real] [--model surefit/smollm2-135m-instruct] [--window 15] [--json]

Each workload is one process, measured for a window alone, for one while two others multiply matrices with a thread
each, and alone again: the ratio is that of the middle window to the mean of the other two, so that a machine that gets
slower shows (`drift`, the third window to the first). Training is `surefit train` as it is, whose steps are read from
metrics.jsonl; answering is `generate`, a batch at a time. With two cores, three processes that share them fairly have
two thirds of a core each: a process of one thread can keep 0.67 of its speed, one of two threads 0.5. Below 1/3 threads
have been waiting for each other. Exits with 1 where a ratio is.

Run it on a machine that does nothing else: two minutes, four with --real.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

GOAL = 1 / 3
BESIDE = 2
DEMO = Path(__file__).parents[1] / "src/surefit/samples/demo.yaml"
REAL = "surefit/smollm2-135m-instruct"
START_SECONDS = 120
"""In which a workload must have done its first two units."""
COMPUTE = """
import numpy as np
matrix = np.random.default_rng(0).standard_normal((512, 512), dtype=np.float32)
while True:
    matrix @ matrix
"""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@contextmanager
def process(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed at the end, whatever happens here."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options) as made:
        try:
            yield made
        finally:
            made.kill()


@contextmanager
def busy() -> Iterator[None]:
    """Two processes that compute, on whatever cores the system gives them."""
    with ExitStack() as stack:
        for _ in range(BESIDE):
            stack.enter_context(process([sys.executable, "-c", COMPUTE], env=os.environ | ONE_THREAD))
        time.sleep(1)  # numpy is imported by then
        yield


Units = Callable[[], list[tuple[float, int]]]
"""What a workload has done so far: (seconds, tokens) of each unit, a step or a batch of answers."""


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON Lines file that is being written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def window(units: Units, worker: subprocess.Popen[bytes], seconds: float) -> float:
    """Tokens per second over the units that begin from now on, for at least so long and at least two units."""
    before, start = len(units()) + 1, time.monotonic()  # the next to end began before
    while len(done := units()[before:]) < 2 or time.monotonic() - start < seconds:
        if worker.poll() is not None:
            sys.exit(f"the workload ended with {worker.returncode} while it was measured")
        time.sleep(0.2)
    return sum(tokens for _, tokens in done) / sum(spent for spent, _ in done)


def measured(command: list[str], units: Units, seconds: float) -> dict[str, float]:
    """The three windows of a workload, in tokens per second."""
    with process(command) as worker:
        start = time.monotonic()
        while len(units()) < 2:
            if worker.poll() is not None or time.monotonic() - start > START_SECONDS:
                sys.exit(f"the workload ended, or did not begin within {START_SECONDS} s: {' '.join(command)}")
            time.sleep(0.2)
        first = window(units, worker, seconds)
        with busy():
            beside = window(units, worker, seconds)
        last = window(units, worker, seconds)
    alone = (first + last) / 2
    return {"alone": alone, "beside": beside, "ratio": beside / alone, "drift": last / first}


def training(directory: Path, changes: list[str], seconds: float) -> dict[str, float]:
    """The demo's training, with changes, as the command line does it."""
    sets = [
        f"output_dir={directory}",
        "train.max_steps=100000",
        "train.num_train_epochs=100000",
        "checkpoint.save_steps=100000",
    ]
    arguments = [part for change in [*sets, *changes] for part in ("--set", change)]
    command = [sys.executable, "-m", "surefit.cli.app", "train", str(DEMO), "--overwrite", *arguments]
    steps = directory / "metrics.jsonl"
    return measured(
        command, lambda: [(line["seconds"], line["tokens"]) for line in lines_of(steps) if "loss" in line], seconds
    )


def answering(directory: Path, model: str, seconds: float) -> dict[str, float]:
    """`generate` over the demo's held-out prompts, a batch at a time."""
    batches = directory / "answers.jsonl"
    command = [sys.executable, __file__, "--answer", str(batches), "--model", model]
    return measured(command, lambda: [(line["seconds"], line["tokens"]) for line in lines_of(batches)], seconds)


def answer(path: Path, model: str) -> None:
    """The process that `answering` measures: it goes on until it is killed."""
    from surefit.core import env

    env.quiet_libraries()
    env.sleep_at_barriers()
    from surefit.data.tokens.tokenize import tokenize_prompt
    from surefit.generate.engine import DecodingConfig, generate
    from surefit.model.layers import load_for_generation
    from surefit.model.tokenizer import load_tokenizer
    from surefit.stages.evaluating import load_eval_sets
    from surefit.stages.run_context import load_checked_run

    run = load_checked_run(DEMO, [f"model.name_or_path={model}", f"output_dir={path.parent}/run"])
    section = run.resolved.config.model
    tokenizer, loaded = load_tokenizer(section), load_for_generation(section, run.hardware)
    prompts = [tokenize_prompt(example, tokenizer) for example in load_eval_sets(run)["eval"]]
    size = 64 if model == "surefit/nano" else 2  # a batch has to end within the window
    with path.open("w", buffering=1) as file:
        while True:
            for start in range(0, len(prompts), size):
                began = time.perf_counter()
                made = generate(loaded, tokenizer, prompts[start : start + size], DecodingConfig(32, size))
                line = {"seconds": time.perf_counter() - began, "tokens": sum(one.tokens for one in made)}
                file.write(json.dumps(line) + "\n")


def workloads(directory: Path, real: str | None, seconds: float) -> Iterator[tuple[str, dict[str, float]]]:
    yield "demo: training", training(directory / "demo", [], seconds)
    yield "demo: answering", answering(directory, "surefit/nano", seconds)
    if real is not None:
        # Steps short enough for the window: the rows of the demo have some 300 of this model's tokens.
        small = [f"model.name_or_path={real}", "train.global_batch_size=2", "train.per_device_train_batch_size=1"]
        rate = ["train.learning_rate=1e-4", "data.max_length=512"]
        yield "real model: training", training(directory / "real", small + rate, seconds)
        yield "real model: answering", answering(directory, real, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="measure a pretrained model as well")
    parser.add_argument("--model", default=REAL, help="which; a directory, too")
    parser.add_argument("--window", type=float, default=15, metavar="SECONDS")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer(options.answer, options.model)
    found = {}
    if not options.json:
        print(f"{os.cpu_count()} cores, beside {BESIDE} processes; tokens/s")
        print(f"{'':22} {'alone':>9} {'beside':>9} {'ratio':>6} {'drift':>6}")
    with tempfile.TemporaryDirectory() as directory:
        for name, each in workloads(Path(directory), options.model if options.real else None, options.window):
            found[name] = each
            if not options.json:
                figures = f"{each['alone']:9,.0f} {each['beside']:9,.0f} {each['ratio']:6.2f} {each['drift']:6.2f}"
                print(f"{name:22} {figures}", flush=True)
    passed = all(each["ratio"] >= GOAL for each in found.values())
    if options.json:
        print(json.dumps({"workloads": found, "goal": GOAL, "passed": passed}))
    else:
        print(f"every ratio at least {GOAL:.2f}: {'yes' if passed else 'NO'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
