"""Planned against measured on a GPU: real training steps of 80 configurations that were chosen before any was run.

    python benchmarks/plan_accuracy.py [--list] [--only PARTS] [--results FILE] [--json]

Shapes of Llama 1B, 3B and 8B with random weights, normal(0, 0.02) × LoRA and all weights × gradient checkpointing ×
padded and not × the allocator's default and expandable segments × two lengths. Each configuration runs in a process of
its own: SureFit's `train_step` five times and one held-out batch. Memory is that of PyTorch's allocator by phase, time
the median of the last four steps. Results are kept line by line in FILE (plan_accuracy.jsonl), so a second call goes on
where the first stopped. The worst comes first. Without CUDA it says so and exits with 3.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NOT_MEASURED = 3
SHAPES = {"1B": "meta-llama/Llama-3.2-1B", "3B": "meta-llama/Llama-3.2-3B", "8B": "meta-llama/Llama-3.1-8B"}
BATCHES = ((2, 512), (4, 2048))
"""(rows, tokens) of a micro batch; a step has two of them."""
MICRO_BATCHES, STEPS = 2, 5
PHASES = ("load", "first step", "step", "eval")


@dataclass(frozen=True)
class Case:
    """One configuration."""

    shape: str
    kind: str
    checkpointing: bool
    padded: bool
    expandable: bool
    rows: int
    length: int

    @property
    def name(self) -> str:
        parts = [self.shape, self.kind, "ckpt" if self.checkpointing else "keep", "pad" if self.padded else "even"]
        return "-".join([*parts, "expandable" if self.expandable else "default", f"{self.rows}x{self.length}"])


def cases() -> Iterator[Case]:
    """Every combination, but all weights of 8B: 150 GiB, which no one GPU here has."""
    switches = (False, True)
    for shape, kind, batch in itertools.product(SHAPES, ("lora", "full"), BATCHES):
        if (shape, kind) != ("8B", "full"):
            for checkpointing, padded, expandable in itertools.product(switches, switches, switches):
                yield Case(shape, kind, checkpointing, padded, expandable, *batch)


def measure(case: Case) -> dict[str, Any]:
    """Run a configuration on the GPU of this process."""
    import torch

    from surefit.model.compat import checkpoint_activations
    from surefit.telemetry.memory import PhaseMemory
    from surefit.train.optim import MasterAdamW
    from surefit.train.step import mean_loss, train_step

    memory = PhaseMemory()
    model = _model(case)
    if case.checkpointing:
        checkpoint_activations(model)
    model.train()
    optimizer, seconds = MasterAdamW(model), []
    batches = [_batch(case, seed) for seed in range(MICRO_BATCHES)]
    for step in range(STEPS):
        memory.enter("first step" if step == 0 else "step")
        torch.cuda.synchronize()
        start = time.perf_counter()
        train_step(model, batches, optimizer, 1.0)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    memory.enter("eval")
    mean_loss(model, batches[:1])
    memory.enter("end")
    return {"phases": memory.phases, "seconds": statistics.median(seconds[1:]), "gpu": torch.cuda.get_device_name()}


def _model(case: Case) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from surefit.config.schema import AdapterSection
    from surefit.model.adapter import add_adapter

    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(_config(case), dtype=torch.bfloat16, attn_implementation="sdpa")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.02)  # a product of zeros takes less time than one of numbers
        return add_adapter(model, AdapterSection(kind="lora")) if case.kind == "lora" else model


def _config(case: Case) -> Any:
    from transformers import AutoConfig

    from surefit.facts.model import catalogue

    shape = dict(catalogue()[SHAPES[case.shape]]["config"])
    return AutoConfig.for_model(shape.pop("model_type"), **shape)


def _batch(case: Case, seed: int) -> dict[str, Any]:
    import torch

    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, _config(case).vocab_size, (case.rows, case.length), generator=made)
    mask = torch.ones_like(ids)
    if case.padded:
        mask[1:, -case.length // 8 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def predict(case: Case, gpu: str) -> dict[str, Any]:
    """What the plan says of it."""
    from surefit.config.schema import AdapterSection
    from surefit.facts.gpus import find_gpu
    from surefit.plan.setting import Setting
    from surefit.plan.simulate import simulate
    from surefit.plan.time import step_time

    adapter = AdapterSection(kind="lora" if case.kind == "lora" else "full")
    setting = Setting(
        _config(case), "bfloat16", adapter, case.rows, case.length, case.padded, MICRO_BATCHES, case.checkpointing
    )
    found, known = simulate(setting, expandable=case.expandable), find_gpu(gpu)
    phases = {phase.name: {"allocated": phase.allocated, "reserved": phase.reserved} for phase in found.phases}
    return {"phases": phases, "seconds": step_time(setting, known).seconds if known else None}


def run(case: Case) -> dict[str, Any]:
    """A configuration in a process of its own, whose allocator is set as the case says."""
    setting = f"expandable_segments:{case.expandable}"
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    command = [sys.executable, __file__, "--one", case.name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    result: dict[str, Any] = {"name": case.name, **asdict(case)}
    if done.returncode != 0:
        return {**result, "failed": done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]}
    measured = json.loads(done.stdout.splitlines()[-1])
    return {**result, "measured": measured, "predicted": predict(case, measured["gpu"])}


def errors(result: dict[str, Any]) -> dict[str, float]:
    """How far the plan is off, as a share of what was measured: the worst phase of each kind, and the time."""
    measured, predicted = result["measured"], result["predicted"]
    found = {}
    for key in ("allocated", "reserved"):
        off = [predicted["phases"][name][key] / measured["phases"][name][key] - 1 for name in PHASES]
        found[key] = max(off, key=abs)
    if predicted["seconds"] is not None:
        found["time"] = predicted["seconds"] / measured["seconds"] - 1
    return found


def report(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Print every configuration, the worst first; return the summary."""
    compared = [(errors(result), result) for result in results if "measured" in result]
    for off, result in sorted(compared, key=lambda pair: -max(map(abs, pair[0].values()))):
        print(f"{result['name']:40} {'  '.join(f'{key} {value:+8.2%}' for key, value in off.items())}")
    for result in results:
        if "failed" in result:
            print(f"{result['name']:40} failed: {result['failed'][0][:150]}")
    summary: dict[str, Any] = {"compared": len(compared), "failed": len(results) - len(compared)}
    for key in ("allocated", "reserved", "time"):
        values = sorted(abs(off[key]) for off, _ in compared if key in off)
        if values:
            within = values[min(len(values) - 1, int(0.95 * len(values)))]
            summary[key] = {"median": statistics.median(values), "p95": within, "max": values[-1]}
            print(f"{key}: median {summary[key]['median']:.2%}, 95 % within {within:.2%}, worst {values[-1]:.2%}")
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the configurations and run none")
    parser.add_argument("--only", default="", help="comma-separated parts of names")
    parser.add_argument("--results", type=Path, default=Path("plan_accuracy.jsonl"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    asked = parser.parse_args()
    chosen = [case for case in cases() if any(part in case.name for part in asked.only.split(","))]
    if asked.list:
        print("\n".join(case.name for case in chosen))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("not measured: no GPU")
        return NOT_MEASURED
    if asked.one:
        print(json.dumps(measure(next(case for case in cases() if case.name == asked.one))))
        return 0
    lines = asked.results.read_text(encoding="utf-8").splitlines() if asked.results.exists() else []
    done = {result["name"]: result for result in map(json.loads, lines)}
    for number, case in enumerate(chosen, start=1):
        if case.name not in done:
            done[case.name] = run(case)
            with asked.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(done[case.name]) + "\n")
        print(f"{number}/{len(chosen)} {case.name}", file=sys.stderr, flush=True)
    summary = report([done[case.name] for case in chosen])
    if asked.json:
        print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
