"""Planned against measured on a GPU: real training steps of 144 configurations that were chosen before any was run.

    python benchmarks/plan_accuracy.py [--list] [--only PARTS] [--twelve] [--results FILE] [--limit SECONDS]
        [--predictions FILE] [--json]
    python benchmarks/plan_accuracy.py --predict FILE [--gpu h200] [--only PARTS] [--twelve]

Shapes of Llama 1B, 3B and 8B with random weights × LoRA, LoRA over NF4, all weights × nothing, all but attention or
everything recomputed × packed and padded × the loss in chunks (with the allocator's default and with expandable
segments) and whole. Each configuration runs in a process of its own: the base loaded as in training, SureFit's
`train_step` five times and one held-out batch. Memory is that of PyTorch's allocator by phase, time the median of the
last four steps. Results are kept line by line in FILE (plan_accuracy.jsonl), so a second call goes on where the first
stopped. The worst comes first. Without CUDA it says so and exits with 3.

`--predict` needs no GPU and writes what the plan says, before anything is measured; `--predictions` compares with that
and calculates nothing where minutes on a GPU count. `--twelve` is a choice for a short day.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NOT_MEASURED = 3
SHAPES = {"1B": "meta-llama/Llama-3.2-1B", "3B": "meta-llama/Llama-3.2-3B", "8B": "meta-llama/Llama-3.1-8B"}
BATCHES = {"1B": (8, 1024), "3B": (4, 2048), "8B": (2, 2048)}
"""(examples, tokens of the longest) of a micro batch; a step has two of them."""
RECOMPUTED: dict[str, Any] = {"keep": False, "selective": "selective", "ckpt": True}
WAYS = (("chunked", False), ("chunked", True), ("whole", False))
"""(loss, whether the allocator's segments are expandable)."""
MICRO_BATCHES, STEPS = 2, 5
PHASES = ("load", "first step", "step", "eval")
TWELVE = (
    "1B-lora-keep-packed-chunked-expandable", "1B-lora-keep-padded-chunked-default",
    "8B-lora-keep-packed-chunked-expandable", "8B-lora-ckpt-packed-chunked-default",
    "3B-full-selective-packed-chunked-default", "3B-lora-selective-packed-chunked-expandable",
    "1B-full-keep-packed-chunked-expandable", "1B-full-ckpt-padded-whole-default",
    "8B-lora-selective-padded-whole-default", "3B-qlora-keep-packed-chunked-default",
    "8B-qlora-keep-packed-chunked-expandable", "8B-qlora-ckpt-padded-chunked-default",
)  # fmt: skip
"""Every value of every switch, and the shapes of the throughput goals first; chosen before anything was measured."""


@dataclass(frozen=True)
class Case:
    """One configuration."""

    shape: str
    kind: str
    recomputed: str
    packed: bool
    loss: str
    expandable: bool

    @property
    def name(self) -> str:
        allocator = "expandable" if self.expandable else "default"
        form = "packed" if self.packed else "padded"
        return "-".join([self.shape, self.kind, self.recomputed, form, self.loss, allocator])


def cases() -> Iterator[Case]:
    """Every combination, but all weights of 8B: 150 GiB, which no one GPU here has."""
    for shape, kind, recomputed, packed in itertools.product(
        SHAPES, ("lora", "qlora", "full"), RECOMPUTED, (True, False)
    ):
        if (shape, kind) != ("8B", "full"):
            for loss, expandable in WAYS:
                yield Case(shape, kind, recomputed, packed, loss, expandable)


def resolved(case: Case) -> Any:
    """The configuration as `surefit train` would have it."""
    from surefit.config.resolve import ResolvedConfig
    from surefit.config.schema import SureFitConfig

    rows, length = BATCHES[case.shape]
    tree = {
        "model": {
            "name_or_path": SHAPES[case.shape],
            "dtype": "bfloat16",
            "quantization": "nf4" if case.kind == "qlora" else "none",
        },
        "data": {"train": "unused", "max_length": length, "packing": case.packed},
        "train": {
            "global_batch_size": rows * MICRO_BATCHES,
            "per_device_train_batch_size": rows,
            "gradient_checkpointing": RECOMPUTED[case.recomputed],
        },
        "speed": {
            "attention": "torch_varlen" if case.packed else "sdpa",
            "chunked_loss": case.loss == "chunked",
            "fused_lora": case.kind != "full",
            "tiled_mlp": False,
        },
        "output_dir": "unused",
    }
    return ResolvedConfig(SureFitConfig.model_validate(tree), {}, MICRO_BATCHES, None)


def measure(case: Case) -> dict[str, Any]:
    """Run a configuration on the GPU of this process."""
    import torch

    from surefit.facts.hardware import hardware_facts
    from surefit.model.prepare import prepare_for_training
    from surefit.telemetry.memory import PhaseMemory
    from surefit.train.optim import make_optimizer
    from surefit.train.step import mean_loss, train_step

    config, hardware = resolved(case).config, hardware_facts("auto", Path.cwd())
    memory = PhaseMemory()
    base = _model(case, config, hardware)
    model, _ = prepare_for_training(base, config, hardware)
    model.train()
    optimizer, seconds = make_optimizer(model, config.train), []
    chunked = config.speed.chunked_loss
    batches = [_batch(case, seed) for seed in range(MICRO_BATCHES)]
    for step in range(STEPS):
        memory.enter("first step" if step == 0 else "step")
        torch.cuda.synchronize()
        start = time.perf_counter()
        train_step(model, batches, optimizer, 1.0, chunked=chunked)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    memory.enter("eval")
    mean_loss(model, batches[:1], chunked=chunked)
    memory.enter("end")
    return {"phases": memory.phases, "seconds": statistics.median(seconds[1:]), "gpu": torch.cuda.get_device_name()}


def _model(case: Case, config: Any, hardware: Any) -> Any:
    """The base as `surefit train` loads it, 4-bit or not, from files that have no weights in them; these are drawn
    afterwards, in place, for a product of zeros takes less time than one of numbers."""
    import torch

    from surefit.model.load import load_model
    from surefit.model.quantize import is_four_bit

    with tempfile.TemporaryDirectory() as folder:
        write_hollow_base(_config(case), Path(folder))
        model: Any = load_model(config.model.model_copy(update={"name_or_path": folder}), hardware)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.random_(0, 256) if parameter.dtype == torch.uint8 else parameter.normal_(0, 0.02)
        for layer in model.modules():
            if is_four_bit(layer):
                layer.weight.quant_state.offset.fill_(0.04)  # of the scales; all else of theirs is zero
    return model


def write_hollow_base(config: Any, folder: Path) -> None:
    """A model's directory: its config, and a safetensors file that says where each weight lies and has none of them.
    The file system stores nothing for what was never written, and gives zeros for it."""
    import torch
    from transformers import AutoModelForCausalLM

    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, parameter in model.named_parameters():  # of tied ones the first alone, as `save_pretrained` writes them
        start, end = end, end + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _config(case: Case) -> Any:
    from transformers import AutoConfig

    from surefit.facts.model import catalogue

    shape = dict(catalogue()[SHAPES[case.shape]]["config"])
    return AutoConfig.for_model(shape.pop("model_type"), **shape)


def _batch(case: Case, seed: int) -> dict[str, Any]:
    """Examples of random tokens, all supervised; padded ones are an eighth shorter than the first."""
    import numpy as np

    from surefit.data.tokens.collate import collate, collate_packed

    (rows, length), random = BATCHES[case.shape], np.random.default_rng(seed)
    lengths = [length if case.packed or row == 0 else length - length // 8 for row in range(rows)]
    ids = [random.integers(0, _config(case).vocab_size, size) for size in lengths]
    items = [(one, one) for one in ids]
    return collate_packed(items) if case.packed else collate(items, 0)


def predict(case: Case, gpu: str) -> dict[str, Any]:
    """What the plan says of it."""
    from surefit.facts.hardware import hardware_facts
    from surefit.facts.model import model_facts
    from surefit.plan.planner import Planner
    from surefit.plan.simulate import simulate_memory
    from surefit.plan.step_config import build_step_config

    made, model, hardware = resolved(case), model_facts(SHAPES[case.shape]), hardware_facts(gpu, Path.cwd())
    found = simulate_memory(build_step_config(made, model, hardware), expandable=case.expandable)
    step = Planner(model).step(made, hardware)
    phases = {phase.name: {"allocated": phase.allocated, "reserved": phase.reserved} for phase in found.phases}
    return {"phases": phases, "seconds": step.seconds if step else None}


def run(case: Case, limit: float, predictions: dict[str, Any] | None = None) -> dict[str, Any]:
    """A configuration in a process of its own, whose allocator is set as the case says."""
    result: dict[str, Any] = {"name": case.name, **asdict(case)}
    if case.kind == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        return {**result, "skipped": "bitsandbytes is not installed"}
    setting = f"expandable_segments:{case.expandable}"
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    command = [sys.executable, __file__, "--one", case.name]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return {**result, "failed": [f"not done after {limit:.0f} s"]}
    if done.returncode != 0:
        return {**result, "failed": done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]}
    measured = json.loads(done.stdout.splitlines()[-1])
    predicted = predictions.get(case.name) if predictions is not None else predict(case, measured["gpu"])
    return {**result, "measured": measured} | ({"predicted": predicted} if predicted else {})


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
    compared = [(errors(result), result) for result in results if "measured" in result and "predicted" in result]
    for off, result in sorted(compared, key=lambda pair: -max(map(abs, pair[0].values()))):
        print(f"{result['name']:40} {'  '.join(f'{key} {value:+8.2%}' for key, value in off.items())}")
    for result in results:
        if "failed" in result:
            print(f"{result['name']:40} failed: {result['failed'][0][:150]}")
        elif "skipped" in result:
            print(f"{result['name']:40} skipped: {result['skipped']}")
    failed = sum("failed" in result for result in results)
    summary: dict[str, Any] = {"compared": len(compared), "failed": failed}
    for key in ("allocated", "reserved", "time"):
        values = sorted(abs(off[key]) for off, _ in compared if key in off)
        if values:
            within = values[min(len(values) - 1, int(0.95 * len(values)))]
            summary[key] = {"median": statistics.median(values), "p95": within, "max": values[-1]}
            print(f"{key}: median {summary[key]['median']:.2%}, 95 % within {within:.2%}, worst {values[-1]:.2%}")
    return summary


def write_predictions(chosen: list[Case], gpu: str, file: Path) -> None:
    """What the plan says of these on that GPU, with the versions that it was said by."""
    from importlib import metadata

    found: dict[str, Any] = {}
    for number, case in enumerate(chosen, start=1):
        found[case.name] = predict(case, gpu)
        print(f"{number}/{len(chosen)} {case.name}", file=sys.stderr, flush=True)
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "peft")}
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"gpu": gpu, "versions": versions, "cases": found}, indent=1)
    file.with_suffix(".new").write_text(text + "\n", encoding="utf-8")
    file.with_suffix(".new").replace(file)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the configurations and run none")
    parser.add_argument("--only", default="", help="comma-separated parts of names")
    parser.add_argument("--twelve", action="store_true", help="twelve of them")
    parser.add_argument("--results", type=Path, default=Path("plan_accuracy.jsonl"))
    parser.add_argument("--limit", type=float, default=900, help="seconds for one configuration")
    parser.add_argument("--predict", type=Path, metavar="FILE", help="write what the plan says, and measure nothing")
    parser.add_argument("--gpu", default="h200", help="whose predictions to write")
    parser.add_argument("--predictions", type=Path, metavar="FILE", help="compare with these, made beforehand")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    chosen = [case for case in cases() if any(part in case.name for part in asked.only.split(","))]
    if asked.twelve:
        chosen = sorted((case for case in chosen if case.name in TWELVE), key=lambda case: TWELVE.index(case.name))
    if asked.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if asked.predict:
        write_predictions(chosen, asked.gpu, asked.predict)
        return 0
    import torch

    if not torch.cuda.is_available():
        print("not measured: no GPU")
        return NOT_MEASURED
    if asked.one:
        print(json.dumps(measure(next(case for case in cases() if case.name == asked.one))))
        return 0
    predictions = json.loads(asked.predictions.read_text(encoding="utf-8"))["cases"] if asked.predictions else None
    summary = report(measure_all(chosen, asked, predictions))
    if asked.json:
        print(json.dumps(summary))
    return 0


def measure_all(
    chosen: list[Case], asked: argparse.Namespace, predictions: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """The results of the chosen, a line of the file each; what has one is not run again."""
    from gpu_lines import append, lines

    done = {result["name"]: result for result in lines(asked.results)}
    for number, case in enumerate(chosen, start=1):
        if case.name not in done:
            done[case.name] = run(case, asked.limit, predictions)
            append(asked.results, done[case.name])
        print(f"{number}/{len(chosen)} {case.name}", file=sys.stderr, flush=True)
    return [done[case.name] for case in chosen]


if __name__ == "__main__":
    sys.exit(main())
