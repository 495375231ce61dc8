"""Every "auto", decided once, with its reason; and `resolved.yaml`, which says where each value came from.

Each `_decide_*` function returns the value *and the reason*; nothing else in SureFit replaces an "auto". The facts it
decides from are passed in as plain attributes (`facts/` stands above `config/`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml
from pydantic import BaseModel

from surefit import __version__
from surefit.config.load import OVERRIDE, Loaded
from surefit.config.schema import Config
from surefit.core.errors import ConfigError
from surefit.core.rundir import write_atomic
from surefit.core.units import GIB, bytes_text, count_text

LOGIT_SHARE = 0.1
"""The share of a GPU's memory that the automatic micro batch lets the logits take."""
CPU_LOGIT_BYTES = GIB
SMALL_MODEL = 100_000_000
"""Parameters below which activations are no reason to recompute them on a GPU."""


class ModelLike(Protocol):
    """What resolving needs of `facts.model.ModelFacts`."""

    @property
    def parameters(self) -> int | None: ...
    @property
    def vocab_size(self) -> int: ...


class HardwareLike(Protocol):
    """What resolving needs of `facts.hardware.HardwareFacts`."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def memory_bytes(self) -> int | None: ...
    @property
    def bf16(self) -> bool: ...


@dataclass(frozen=True)
class Origin:
    """Where a value came from: `kind` is user, --set, default or auto; `detail` the file and line, or the reason."""

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        if self.kind == "auto":
            return f"auto: {self.detail}"
        return f"{self.kind} {self.detail}".strip()


@dataclass(frozen=True)
class Resolved:
    """A config without "auto".

    Attributes:
        config: every value decided.
        provenance: dotted key → where the value came from.
        gradient_accumulation_steps: micro batches per optimizer step.
        total_steps: optimizer steps of the whole run; None while the number of rows is not known.
    """

    config: Config
    provenance: dict[str, Origin]
    gradient_accumulation_steps: int
    total_steps: int | None


def resolve(loaded: Loaded, model: ModelLike, hardware: HardwareLike, rows: int | None) -> Resolved:
    """Replace every "auto" in `loaded.config`.

    Args:
        loaded: the valid config.
        model: facts about the base model.
        hardware: facts about the device.
        rows: rows to train on, before any is left out for its length; None where they are not counted yet.
    """
    config = loaded.config
    steps = total_steps(config, rows)
    decisions: dict[str, Callable[[], tuple[Any, str]]] = {
        "model.dtype": lambda: _decide_dtype(hardware),
        "train.per_device_train_batch_size": lambda: _decide_micro_batch(config, model, hardware),
        "train.gradient_checkpointing": lambda: _decide_checkpointing(model, hardware),
        "checkpoint.every": lambda: _decide_save_every(steps),
        "evaluate.batch_size": lambda: _decide_eval_batch(hardware),
    }
    provenance = {dotted: _origin(dotted, loaded) for dotted, _ in leaves(config)}
    changes: dict[str, Any] = {}
    for dotted, decide in decisions.items():
        if lookup(config, dotted) == "auto":
            changes[dotted], reason = decide()
            provenance[dotted] = Origin("auto", reason)
    decided = _replace(config, changes)
    micro = decided.train.per_device_train_batch_size
    assert isinstance(micro, int)
    if decided.train.global_batch_size % micro:
        raise ConfigError(
            f"global_batch_size {decided.train.global_batch_size} is not a multiple of the micro batch {micro}",
            path=loaded.path,
            line=loaded.lines.get("train.per_device_train_batch_size"),
            field="train.per_device_train_batch_size",
            help="choose a divisor of global_batch_size, or leave it at auto",
        )
    return Resolved(decided, provenance, decided.train.global_batch_size // micro, steps)


def total_steps(config: Config, rows: int | None) -> int | None:
    """Optimizer steps of the run.

    3,000 rows, 2 % held out, batches of 64, two epochs: ceil(2 × 2,940 / 64) = 92.
    """
    if rows is None:
        return config.train.max_steps
    trained = rows - round(rows * config.data.eval) if isinstance(config.data.eval, float) else rows
    steps = max(1, math.ceil(trained * config.train.epochs / config.train.global_batch_size))
    return min(steps, config.train.max_steps or steps)


def _decide_dtype(hardware: HardwareLike) -> tuple[str, str]:
    if hardware.kind == "cpu":
        return "float32", "on a CPU float32 is exact and no slower for small models"
    if hardware.bf16:
        return "bfloat16", f"{hardware.name} computes bfloat16 natively"
    return "float32", f"{hardware.name} has no bfloat16, and float16 needs loss scaling"


def _decide_micro_batch(config: Config, model: ModelLike, hardware: HardwareLike) -> tuple[int, str]:
    """The largest divisor of the global batch whose logits (value, fp32 copy, gradient) stay within a budget.

    Vocabulary 128,256 at 2,048 tokens: 12 bytes × 128,256 × 2,048 = 2.94 GiB per example, so 2 on an 80 GiB GPU.
    """
    budget = (
        LOGIT_SHARE * hardware.memory_bytes if hardware.kind == "cuda" and hardware.memory_bytes else CPU_LOGIT_BYTES
    )
    per_example = 12 * model.vocab_size * config.data.max_length
    whole = config.train.global_batch_size
    fitting = [d for d in range(1, whole + 1) if whole % d == 0 and d * per_example <= budget]
    micro = max(fitting, default=1)
    return micro, (
        f"the largest divisor of {whole} whose logits ({bytes_text(per_example)} per example) stay within "
        f"{bytes_text(budget)}; activations are not counted yet"
    )


def _decide_checkpointing(model: ModelLike, hardware: HardwareLike) -> tuple[bool, str]:
    if hardware.kind == "cpu":
        return False, "on a CPU time is short, not memory"
    if model.parameters is not None and model.parameters < SMALL_MODEL:
        return False, f"{count_text(model.parameters)} parameters leave room for the activations"
    return True, "activations are not planned yet, and running out of memory costs more than a third of the speed"


def _decide_save_every(steps: int | None) -> tuple[int, str]:
    if steps is None:
        return 200, "the number of steps is not known yet"
    return max(1, math.ceil(steps / 4)), f"a quarter of {steps} steps"


def _decide_eval_batch(hardware: HardwareLike) -> tuple[int, str]:
    if hardware.kind == "cuda" and (hardware.memory_bytes or 0) < 30 * GIB:
        return 16, "a GPU under 30 GiB"
    return 64, "answers are short and the prompts are sorted by length"


def _origin(dotted: str, loaded: Loaded) -> Origin:
    if any(dotted == key or dotted.startswith(f"{key}.") for key in loaded.overridden):
        return Origin(OVERRIDE)
    key = dotted
    while key and key not in loaded.lines:
        key = key.rpartition(".")[0]
    section_only = key != dotted and not dotted.startswith("evaluate.also.")
    return Origin("default") if not key or section_only else Origin("user", f"{loaded.path.name}:{loaded.lines[key]}")


def leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value) of a config, in the order of the schema."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        dotted = f"{prefix}{name}"
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{dotted}.")
        elif isinstance(value, dict) and value:
            yield from ((f"{dotted}.{key}", item) for key, item in value.items())
        else:
            yield dotted, value


def lookup(config: BaseModel, dotted: str) -> Any:
    """The value at a dotted key."""
    here: Any = config
    for name in dotted.split("."):
        here = getattr(here, name)
    return here


def _replace(config: Config, changes: dict[str, Any]) -> Config:
    tree = config.model_dump()
    for dotted, value in changes.items():
        *parents, leaf = dotted.split(".")
        here = tree
        for name in parents:
            here = here[name]
        here[leaf] = value
    return Config.model_validate(tree)


def write_resolved(resolved: Resolved, path: Path) -> None:
    """Write `resolved.yaml`: a config that runs as it is, each value with a comment that says where it came from."""
    lines = [f"# Written by SureFit {__version__}: every value of the run, and where it came from.", ""]
    open_sections: list[str] = []
    for dotted, value in leaves(resolved.config):
        *sections, leaf = dotted.split(".")
        for depth, name in enumerate(sections):
            if open_sections[: depth + 1] != sections[: depth + 1]:
                lines.append(f"{'  ' * depth}{name}:")
        open_sections = sections
        lines.append(f"{'  ' * len(sections)}{leaf}: {_scalar(value)}  # {resolved.provenance[dotted]}")
    write_atomic(path, "\n".join(lines) + "\n")


def _scalar(value: Any) -> str:
    """A value on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
