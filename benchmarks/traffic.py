"""Bytes and launches per token of a LoRA training step, by operator, and where the processor waits for the GPU.

    python benchmarks/traffic.py [--model 1b|8b] [--sm 75|80|89|90] [--kernels] [--fp8] [--json]

Counted on tensors of a GPU that have no data, as `surefit plan` simulates it: no GPU is needed, and **nothing is
measured**. The step is that of the throughput workloads (`throughput.py`): Llama 3.2 1B or Llama 3.1 8B, LoRA of rank
16 on all linear layers with fused factors, nothing recomputed, packed examples of 2,048 tokens, 16 of them in two
micro batches; float16 before Ampere. Bytes are those that operators read and write, each argument once, whatever a
cache may save.

The goal is stated of elementwise traffic: all that is neither a matrix product nor attention. Reading a value out of a
tensor (`_local_scalar_dense`, or an operator whose result is as long as its values say) makes the processor wait for
all that was launched; each such place is named with the line that asked, per step, per micro batch and per layer.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import surefit
from surefit.config.schema import LoraSection
from surefit.core.gc_pause import pause_gc
from surefit.facts.model import catalogue
from surefit.model import kernels
from surefit.plan import time
from surefit.plan.operations import Operation, Operations
from surefit.plan.simulate import record_training
from surefit.plan.step_config import StepConfig
from surefit.plan.time import count_step_operations

MODELS = {"1b": "meta-llama/Llama-3.2-1B", "8b": "meta-llama/Llama-3.1-8B"}
ROWS, LENGTH, MICRO_BATCHES = 8, 2048, 2
GOALS = {"1b": (18.3, 8.0), "8b": (60.0, 26.0)}
"""MB of elementwise traffic per token: in November 2026 (docs/gpu.md), and what it is to become at most."""
SYNCHRONISING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
SUREFIT, PACKAGES = str(Path(surefit.__file__).parent), sysconfig.get_paths()["purelib"]
MEGA = 1e6


@dataclass(frozen=True)
class Row:
    """What an operator does in a step; `kind` is product, attention or elementwise."""

    operator: str
    kind: str
    launches: int
    megabytes_per_token: float


@dataclass(frozen=True)
class Wait:
    """A place that reads a value: how often in a step, beside that in each micro batch, and in each layer of each."""

    place: str
    per_step: int
    per_micro_batch: int
    per_layer: int


def setting_of(name: str, capability: tuple[int, int], **changes: Any) -> StepConfig:
    """The step of a model of the catalogue."""
    from transformers import AutoConfig

    shape = dict(catalogue()[MODELS[name]]["config"])
    setting = StepConfig(
        AutoConfig.for_model(shape.pop("model_type"), **shape), "bfloat16" if capability >= (8, 0) else "float16",
        LoraSection(r=16), ROWS, LENGTH, micro_batches=MICRO_BATCHES, packed=True, fused_lora=True,
        capability=capability,
    )  # fmt: skip
    return replace(setting, **changes)


def kind_of(operation: Operation) -> str:
    return "attention" if operation.attention else "product" if operation.flops else "elementwise"


def rows_of(counted: Operations, tokens: int) -> list[Row]:
    """By operator, the most bytes first."""
    launches, moved = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for operation, times in counted.items():
        key = operation.name, kind_of(operation)
        launches[key] += times * operation.kernels
        moved[key] += times * operation.bytes
    return [Row(*key, launches[key], size / tokens / MEGA) for key, size in moved.most_common()]


class _Places:
    """Counts the places that wait; give `note` to a simulation as its `watch`."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._list: FrameType | None = None

    def note(self, phase: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if phase != "step" or func._overloadpacket.__name__ not in SYNCHRONISING:
            return
        frames = list(_frames(sys._getframe(1)))
        # `tolist` reads a tensor without data number by number, and a GPU's in one transfer.
        whole = next((frame for frame in frames if frame.f_code.co_name == "tolist"), None)
        if whole is None or whole is not self._list:
            self.found[place_of(frames)] += 1
        self._list = whole


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def place_of(frames: Iterable[FrameType]) -> str:
    """The innermost line of SureFit's that asked, and, where it asked through another package than torch, that line as
    well."""
    inner = ""
    for frame in frames:
        file, line = frame.f_code.co_filename, f"{frame.f_lineno} {frame.f_code.co_name}"
        if file.startswith(SUREFIT):
            own = Path(file).relative_to(SUREFIT)
            if own.parts[0] != "plan":
                return f"{inner and inner + ', for '}surefit/{own}:{line}"
        elif file.startswith(PACKAGES) and not inner:
            named = Path(file).relative_to(PACKAGES)
            inner = "" if named.parts[0] == "torch" else f"{named}:{line}"
    return inner or "?"


def waits_of(setting: StepConfig) -> list[Wait]:
    """The places that wait, from shallow models: with one micro batch, with two, and with one layer more."""

    def count(layers: int, micro_batches: int) -> Counter[str]:
        places = _Places()
        shallow = replace(setting.with_layers(layers), micro_batches=micro_batches)
        record_training(shallow, places.note)
        return places.found

    one, two, deeper = count(2, 1), count(2, 2), count(3, 1)
    found = []
    for place in sorted(one.keys() | two.keys() | deeper.keys()):
        layer, micro = deeper[place] - one[place], two[place] - one[place]
        found.append(Wait(place, one[place] - micro, micro - 2 * layer, layer))
    return found


def traffic(setting: StepConfig) -> dict[str, Any]:
    """Everything, as plain values."""
    with pause_gc():
        counted, _ = count_step_operations(setting)
        waits = waits_of(setting)
    tokens = setting.tokens * setting.micro_batches
    rows = rows_of(counted, tokens)
    kinds: defaultdict[str, dict[str, float]] = defaultdict(lambda: {"launches": 0, "megabytes_per_token": 0.0})
    for row in rows:
        kinds[row.kind]["launches"] += row.launches
        kinds[row.kind]["megabytes_per_token"] += row.megabytes_per_token
    launches = sum(row.launches for row in rows)
    return {
        "tokens": tokens,
        "launches": launches,
        "launches_per_thousand_tokens": 1000 * launches / tokens,
        "kinds": dict(kinds),
        "operators": [asdict(row) for row in rows],
        "waits": [asdict(wait) for wait in waits],
    }


def lines_of(found: dict[str, Any], model: str) -> Iterator[str]:
    """What is printed."""
    before, goal = GOALS[model]
    yield "Counted, not measured: MB per token (10^6 bytes read and written) and launches per step"
    yield f"{'operator':44}{'kind':13}{'launches':>9}{'MB/token':>10}"
    for row in found["operators"]:
        if row["megabytes_per_token"] >= 0.0005:
            yield f"{row['operator']:44}{row['kind']:13}{row['launches']:9,}{row['megabytes_per_token']:10.3f}"
    yield ""
    for kind, sums in sorted(found["kinds"].items(), key=lambda pair: -pair[1]["megabytes_per_token"]):
        aim = f"   goal: from {before:g} to at most {goal:g}" if kind == "elementwise" else ""
        yield f"{'all: ' + kind:57}{sums['launches']:9,}{sums['megabytes_per_token']:10.3f}{aim}"
    each = found["launches_per_thousand_tokens"]
    yield f"{found['launches']:,} launches for {found['tokens']:,} tokens, {each:.0f} per 1,000"
    yield ""
    yield "The processor waits for the GPU: per step, and per micro batch, and per layer of each"
    for wait in found["waits"]:
        counts = f"{wait['per_step']:3}{wait['per_micro_batch']:3}{wait['per_layer']:3}"
        yield f"{counts}  {wait['place']}"


def savings(setting: StepConfig) -> dict[str, tuple[float, int]]:
    """Kernel → the MB per token and the launches per step that it alone saves."""

    def sums(*without: str) -> tuple[float, int]:
        with ExitStack() as stack, pause_gc():
            stack.callback(time._operations.cache_clear)
            time._operations.cache_clear()
            for name in without:
                stack.enter_context(patch.object(kernels, name, lambda *_: None))
            rows = rows_of(count_step_operations(setting)[0], setting.tokens * setting.micro_batches)
        return sum(row.megabytes_per_token for row in rows), sum(row.launches for row in rows)

    finders = {"RMS norm": "norm_of", "rope": "rotation_of", "SwiGLU with LoRA": "gates_of"}
    moved, launched = sums(*finders.values())
    found = {}
    for kernel, finder in finders.items():
        alone = sums(*(other for other in finders.values() if other != finder))
        found[kernel] = moved - alone[0], launched - alone[1]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=list(MODELS), default="1b")
    parser.add_argument("--sm", choices=("75", "80", "89", "90"), default="90", help="compute capability of the GPU")
    parser.add_argument("--kernels", action="store_true", help="with fused kernels, and what each of them saves")
    parser.add_argument("--fp8", action="store_true", help="over frozen weights in float8; the goals are bfloat16's")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    asked = parser.parse_args()
    capability = int(asked.sm[0]), int(asked.sm[1])
    quantization = "fp8" if asked.fp8 else "none"
    setting = setting_of(asked.model, capability, kernels=asked.kernels, quantization=quantization)
    found = traffic(setting)
    print("\n".join(lines_of(found, asked.model)))
    if asked.kernels:
        found["saved"] = savings(setting)
        print("\nEach kernel alone saves, of all traffic")
        for kernel, (megabytes, launches) in found["saved"].items():
            print(f"{kernel:57}{launches:9,}{megabytes:10.3f}")
    if asked.json:
        before, goal = GOALS[asked.model]
        stated = {"model": MODELS[asked.model], "sm": asked.sm, "quantization": quantization, "goal": goal}
        stated |= {"counted": True, "measured": False}
        print(json.dumps({**stated, "before": before, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
