"""Resolution of every "auto", with its reason; and `resolved.yaml`, which records each value's origin.

Each `_decide_*` function returns the value *and the reason*; nothing else in SureFit replaces an "auto". The facts are
passed in as plain attributes (`facts/` is in a layer above `config/`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import yaml
from pydantic import BaseModel

from surefit import __version__
from surefit.config.by_objective import decide_by_objective
from surefit.config.by_rows import decide_by_rows
from surefit.config.capabilities import conflict_with_trait
from surefit.config.load import OVERRIDE, PLAIN_PATTERNS, LoadedConfig, is_overridden
from surefit.config.memory import CHECKPOINTING, EFFICIENT_TOKENS, MICRO, TILED, Needed, decide_memory
from surefit.config.schema import SureFitConfig, decided
from surefit.config.shared_prompts import FIELD as SHARED_PROMPTS
from surefit.config.shared_prompts import decide_shared_prompts, require_shared_prompts
from surefit.config.world import (
    COUNT,
    LaunchedProcesses,
    count_accumulation_steps,
    count_processes,
    decide_devices,
    decide_mode,
    examples_per_data_rank,
    require_shareable,
)
from surefit.core.env import redact
from surefit.core.errors import ConfigError
from surefit.core.rundir import write_atomic
from surefit.core.units import GIB, bytes_text, count_text, plural

LOSS_BYTES = 12
"""Bytes per supervised token and vocabulary entry in the backward pass of `train/loss.py` without chunks, for any model
dtype: the float32 log-probabilities, their gradient, and the gradient of the logits (a test measures it).
"""
LOGIT_SHARE = 0.1
"""Largest share of a GPU's memory that the automatic micro batch lets the logits occupy."""
UNKNOWN_MEMORY = 8 * GIB
"""Memory assumed for a GPU of unknown size, in bytes."""
CPU_MICRO_BATCH = 4
"""Measured: 5.5 thousand tokens/s on one core at 4, 4.7 at 8, 2.9 at 32, 5.3 at 2 (docs/LOG.md)."""
LONG_CONTEXT = 32_768
"""Smallest number of tokens at which the MLPs are tiled."""
SMALL_MODEL = 100_000_000
"""Parameters below which a GPU needs no gradient checkpointing."""


class ModelLike(Protocol):
    """The part of `facts.model.ModelFacts` that resolving needs."""

    @property
    def parameters(self) -> int | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def packing_obstacle(self) -> str | None: ...
    @property
    def padded_attention(self) -> str: ...
    @property
    def router_loss(self) -> bool: ...
    @property
    def shares_prompts(self) -> bool: ...


class HardwareLike(Protocol):
    """The part of `facts.hardware.HardwareFacts` that resolving needs."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def memory_bytes(self) -> int | None: ...
    @property
    def bf16(self) -> bool: ...
    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class ValueOrigin:
    """Origin of a value: `kind` is user, --set, file (another tool's), default or auto; `detail` is the file and line,
    or the reason.
    """

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        if self.kind == "auto":
            return f"auto: {self.detail}"
        return f"{self.kind} {self.detail}".strip()


@dataclass(frozen=True)
class ResolvedConfig:
    """A config without "auto".

    Attributes:
        config: the config with every value decided.
        provenance: dotted key → the value's origin.
        gradient_accumulation_steps: micro batches of each process per optimizer step.
        total_steps: optimizer steps of the whole run; None while the number of rows is unknown.
        shared: the share of the tokens of pairs that are not computed because both answers share their prompt; 0 until
            a plan has measured it.
    """

    config: SureFitConfig
    provenance: dict[str, ValueOrigin]
    gradient_accumulation_steps: int
    total_steps: int | None
    shared: float = 0.0


def resolve_config(
    loaded: LoadedConfig,
    model: ModelLike,
    hardware: HardwareLike,
    rows: int | None,
    mixed: float = 0,
    needed: Needed | None = None,
    started: LaunchedProcesses | None = None,
    fitting: Callable[[SureFitConfig], int | None] | None = None,
) -> ResolvedConfig:
    """Replace every "auto" in `loaded.config`.

    Args:
        loaded: the valid config.
        model: facts about the base model.
        hardware: facts about the device.
        rows: rows of `data.train`, before any is dropped for its length; None while not all rows are counted.
        mixed: rows of `data.mix` in one epoch.
        needed: function that returns the GPU memory of a step; without it rules of thumb decide.
        started: the launched processes, where this is one of several.
        fitting: function that returns the number of prompts that fit the device at a time, at most the config's batch
            size.

    Raises:
        ConfigError: the global batch size is not a multiple of the micro batch, or processes cannot share the run.
    """
    provenance = {dotted: _origin(dotted, loaded) for dotted, _ in iter_config_values(loaded.config)}
    config = _with_devices(loaded.config, provenance, started)
    rate_is_open = provenance["train.learning_rate"].kind == "default"
    config = _with_decided(config, provenance, decide_by_objective(config, rate_is_open))
    by_rows = decide_by_rows(config, epoch_rows(config, rows, mixed), count_processes(config))
    config = _with_decided(config, provenance, by_rows)
    steps = total_steps(config, rows, mixed)
    packing, _ = _decide_packing(config, model)
    decisions: dict[str, Callable[[], tuple[Any, str]]] = {
        "model.dtype": lambda: decide_dtype(hardware),
        "data.packing": lambda: _decide_packing(config, model),
        "speed.attention": lambda: _decide_attention(packing, model),
        "speed.fused_lora": lambda: _decide_fused_lora(config),
        "checkpoint.save_steps": lambda: _decide_save_every(steps),
        "evaluate.batch_size": lambda: _decide_eval_batch(hardware),
    }
    changes: dict[str, Any] = {}
    for dotted, decide in decisions.items():
        if lookup(config, dotted) == "auto":
            changes[dotted], reason = decide()
            provenance[dotted] = ValueOrigin("auto", reason)
    resolved = with_decisions(config, changes)
    eval_batch_size = fitting(resolved) if fitting and config.evaluate.batch_size == "auto" else None
    if eval_batch_size is not None and eval_batch_size != resolved.evaluate.batch_size:
        resolved = with_decisions(resolved, {"evaluate.batch_size": eval_batch_size})
        provenance["evaluate.batch_size"] = ValueOrigin(
            "auto", f"more prompts of {config.data.max_length:,} tokens may not fit"
        )
    if config.parallel.mode == "auto":
        capacity = hardware.memory_bytes if hardware.kind == "cuda" else None
        mode_changes, reason = decide_mode(resolved, capacity, lambda shared: _least(shared, model, hardware, needed))
        resolved = with_decisions(resolved, mode_changes)
        provenance |= dict.fromkeys(mode_changes, ValueOrigin("auto", reason))
    # After the mode, for which they are no reason.
    later: dict[str, Callable[[SureFitConfig], tuple[bool, str]]] = {
        "speed.kernels": lambda so_far: _decide_kernels(so_far, hardware),
        SHARED_PROMPTS: lambda so_far: decide_shared_prompts(so_far, model, hardware.kind),
    }
    for dotted, decide_later in later.items():
        if lookup(config, dotted) == "auto":
            value, reason = decide_later(resolved)
            resolved = with_decisions(resolved, {dotted: value})
            provenance[dotted] = ValueOrigin("auto", reason)
    memory = _decide_by_memory(resolved, model, hardware, needed)
    automatic = {dotted: choice for dotted, choice in memory.items() if lookup(config, dotted) == "auto"}
    provenance |= {dotted: ValueOrigin("auto", reason) for dotted, (_, reason) in automatic.items()}
    resolved = with_decisions(resolved, {dotted: value for dotted, (value, _) in automatic.items()})
    require_shareable(resolved)
    require_shared_prompts(resolved, model)
    _require_whole_micro_batches(resolved, loaded)
    return ResolvedConfig(resolved, provenance, count_accumulation_steps(resolved), steps)


def _require_whole_micro_batches(config: SureFitConfig, loaded: LoadedConfig) -> None:
    field = "train.per_device_train_batch_size"
    batch, micro = decided(config.train.global_batch_size), decided(config.train.per_device_train_batch_size)
    if batch % micro:
        raise ConfigError(
            f"global_batch_size {batch} is not a multiple of the micro batch {micro}",
            code="E2019",
            path=loaded.path,
            line=loaded.lines.get(field),
            field=field,
            help="choose a divisor of global_batch_size, or leave it at auto",
        )


def _with_decided(
    config: SureFitConfig, provenance: dict[str, ValueOrigin], decisions: Mapping[str, tuple[Any, str]]
) -> SureFitConfig:
    """Return the config with values that were open; their reasons are added to `provenance`."""
    provenance.update({dotted: ValueOrigin("auto", reason) for dotted, (_, reason) in decisions.items()})
    return with_decisions(config, {dotted: value for dotted, (value, _) in decisions.items()})


def _with_devices(
    config: SureFitConfig, provenance: dict[str, ValueOrigin], started: LaunchedProcesses | None
) -> SureFitConfig:
    """Return the config with its devices decided; the launched processes override a default."""
    changes = {}
    for dotted, (value, reason) in decide_devices(config, started).items():
        default = dotted != COUNT and provenance[dotted].kind == "default" and value != lookup(config, dotted)
        if lookup(config, dotted) == "auto" or default:
            changes[dotted] = value
            provenance[dotted] = ValueOrigin("auto", reason)
    return with_decisions(config, changes)


def total_steps(config: SureFitConfig, rows: int | None, mixed: float = 0) -> int | None:
    """Estimate the optimizer steps of the run before the rows are tokenized; `max_steps` where rows are unknown."""
    train, training_rows = config.train, epoch_rows(config, rows, mixed)
    if training_rows is None:
        return train.max_steps
    epochs, batch = decided(train.num_train_epochs), decided(train.global_batch_size)
    return optimizer_steps(training_rows, epochs, batch, train.max_steps)


def epoch_rows(config: SureFitConfig, rows: int | None, mixed: float = 0) -> int | None:
    """Estimate the rows that one epoch trains on; None where they are not counted.

    Rows are held out by the hash of their prompt, so only about the share in `data.eval`. `mixed` rows are never held
    out.
    """
    return None if rows is None else rows - round(rows * (config.data.share or 0)) + round(mixed)


def optimizer_steps(rows: int, epochs: float, global_batch_size: int, max_steps: int | None) -> int:
    """Return the steps until every row was seen `epochs` times, at most `max_steps`.

    >>> optimizer_steps(2940, 2, 64, None), optimizer_steps(2940, 2, 64, 50), optimizer_steps(3, 1, 64, None)
    (92, 50, 1)
    """
    steps = max(1, math.ceil(rows * epochs / global_batch_size))
    return min(steps, max_steps or steps)


def warmup_steps(total_steps: int, warmup: float) -> int:
    """Return the optimizer steps of warmup: below 1 a share of all steps, else the number itself.

    >>> warmup_steps(200, 0.03), warmup_steps(200, 10), warmup_steps(200, 0)
    (6, 10, 0)
    """
    return math.ceil(total_steps * warmup if warmup < 1 else warmup)


def decide_dtype(hardware: HardwareLike) -> tuple[str, str]:
    if hardware.kind == "cpu":
        return "float32", "on a CPU float32 is exact and no slower for small models"
    if hardware.bf16:
        return "bfloat16", f"{hardware.name} computes bfloat16 natively"
    return "float16", f"{hardware.name} has no bfloat16; the loss is scaled, so that small gradients survive"


def _decide_by_memory(
    config: SureFitConfig, model: ModelLike, hardware: HardwareLike, needed: Needed | None
) -> dict[str, tuple[Any, str]]:
    """Decide the micro batch, gradient checkpointing and tiled MLPs: by their memory where it is known, else by rules
    of thumb.
    """
    if needed is not None and hardware.kind == "cuda" and hardware.memory_bytes:
        decisions = decide_memory(config, hardware.memory_bytes, needed)
        if decisions is not None:
            return decisions
    return {
        MICRO: _decide_micro_batch(config, model, hardware),
        CHECKPOINTING: _decide_checkpointing(model, hardware),
        TILED: _decide_tiled_mlp(config, hardware),
    }


def _least(config: SureFitConfig, model: ModelLike, hardware: HardwareLike, needed: Needed | None) -> int | None:
    """Return the memory of a step in bytes, with everything that depends on memory decided for this parallel mode."""
    if needed is None:
        return None
    if config.speed.kernels == "auto":
        config = with_decisions(config, {"speed.kernels": _decide_kernels(config, hardware)[0]})
    changes = {
        dotted: value
        for dotted, (value, _) in _decide_by_memory(config, model, hardware, needed).items()
        if lookup(config, dotted) == "auto"
    }
    resolved = with_decisions(config, changes)
    return needed(resolved, count_accumulation_steps(resolved))


def _decide_micro_batch(config: SureFitConfig, model: ModelLike, hardware: HardwareLike) -> tuple[int, str]:
    """Decide the micro batch. On a GPU it is the largest divisor of the global batch within `EFFICIENT_TOKENS`; or,
    without chunked loss, the largest whose logits stay within a budget.

    Vocabulary 128,256 at 2,048 tokens: 12 bytes × 128,256 × 2,048 = 2.94 GiB per example, so 2 on an 80 GiB GPU.
    """
    batch_size, length = decided(config.train.global_batch_size), config.data.max_length
    divisors = [d for d in range(1, examples_per_data_rank(config) + 1) if batch_size % d == 0]
    if hardware.kind == "cpu":
        micro = max(d for d in divisors if d <= CPU_MICRO_BATCH)
        return micro, "on a CPU small micro batches are faster: their rows have similar lengths, so less is padded"
    if config.speed.chunked_loss:
        length *= config.objective.answers_per_example
        micro = max((d for d in divisors if d * length <= EFFICIENT_TOKENS), default=1)
        return (
            micro,
            f"the largest divisor of {batch_size} within {EFFICIENT_TOKENS:,} tokens; its memory is not known",
        )
    budget = LOGIT_SHARE * (hardware.memory_bytes or UNKNOWN_MEMORY)
    per_example = LOSS_BYTES * model.vocab_size * length * config.objective.answers_per_example
    micro = max((d for d in divisors if d * per_example <= budget), default=1)
    return micro, (
        f"the largest divisor of {batch_size} whose logits ({bytes_text(per_example)} per example) stay within "
        f"{bytes_text(budget)}; activations are not counted"
    )


def _decide_packing(config: SureFitConfig, model: ModelLike) -> tuple[bool, str]:
    if config.data.packing != "auto":
        return config.data.packing, "set"
    if model.packing_obstacle:
        return False, model.packing_obstacle
    return True, "no padding, and the gradients are the same"


def _decide_attention(packing: bool, model: ModelLike) -> tuple[str, str]:
    if packing:
        return "torch_varlen", "packed examples, with torch's own kernels"
    reason = "padded examples" if model.padded_attention == "sdpa" else "padded examples, and a softcap or sinks"
    return model.padded_attention, reason


def _decide_fused_lora(config: SureFitConfig) -> tuple[bool, str]:
    if config.train.method != "lora":
        return False, "there are no LoRA factors"
    if conflict := conflict_with_trait(config, "fused LoRA"):
        return False, conflict.why
    return True, "fewer passes over the activations, the same gradients"


def _decide_kernels(config: SureFitConfig, hardware: HardwareLike) -> tuple[bool, str]:
    if obstacle := kernels_obstacle(config, hardware):
        return False, obstacle
    if hardware.source == "catalogue":
        return (
            False,
            f"unknown whether the machine with the {hardware.name} has liger-kernel; it needs more memory without it",
        )
    if missing := missing_for_kernels():
        return False, f"{missing} is not installed: the extra `kernels` brings it"
    return True, "norms, rope and gated MLPs in fewer passes over the activations"


def kernels_obstacle(config: SureFitConfig, hardware: HardwareLike) -> str | None:
    """Return why fused kernels do not work with this config or GPU, whatever is installed; None where they do."""
    if hardware.kind == "cpu":
        return "they need a GPU"
    if not hardware.bf16:
        return f"Triton compiles for Ampere and later GPUs, and {hardware.name} is older"
    if config.speed.compile:
        return "the compiler fuses the same parts by itself"
    conflict = conflict_with_trait(config, "fused kernels")
    return conflict.why if conflict else None


KERNEL_PACKAGES = {"liger-kernel": ">=0.8.5,<0.9", "triton": ">=3.6"}
"""Requirements of fused kernels, as in the extra `kernels`."""


def missing_for_kernels() -> str | None:
    """Return the first requirement of fused kernels that is not installed, in pip's syntax, such as "triton>=3.6"."""
    from packaging.specifiers import SpecifierSet

    for package, specifier in KERNEL_PACKAGES.items():
        try:
            fits = SpecifierSet(specifier).contains(version(package), prereleases=True)
        except PackageNotFoundError:  # a GPU's nightly torch includes Triton under other package names
            fits = package == "triton" and find_spec("triton") is not None
        if not fits:
            return package + specifier
    return None


def _decide_tiled_mlp(config: SureFitConfig, hardware: HardwareLike) -> tuple[bool, str]:
    if hardware.kind == "cpu" or config.data.max_length < LONG_CONTEXT:
        return False, f"below {LONG_CONTEXT:,} tokens a layer's activations are small"
    return True, f"at {config.data.max_length:,} tokens the MLP's activations are the largest part of a layer"


def _decide_checkpointing(model: ModelLike, hardware: HardwareLike) -> tuple[bool, str]:
    if hardware.kind == "cpu":
        return False, "on a CPU time is the limit, not memory"
    if model.parameters is not None and model.parameters < SMALL_MODEL:
        return False, f"{count_text(model.parameters)} parameters leave room for the activations"
    return (
        True,
        "the memory of the activations is not known; running out of memory costs more than a third of the speed",
    )


def count_due_steps(steps: int, *every: int | None) -> int:
    """Count the steps of a run that are a multiple of at least one of these intervals, or the last step.

    >>> count_due_steps(86, 50), count_due_steps(86, 50, 20)  # 50 and 86; 20, 40, 50, 60, 80 and 86
    (2, 6)
    """
    return count_due_steps_before(steps, *every) + 1 if steps else 0


def count_due_steps_before(step: int, *every: int | None) -> int:
    """Count such steps before `step`, where `step - 1` is not the end of the run.

    >>> count_due_steps_before(50, 50, 20), count_due_steps_before(51, 50, 20)  # 20 and 40; and 50
    (2, 3)
    """
    first, *further_intervals = [interval for interval in every if interval]
    completed = max(0, step - 1)
    return completed // first + sum(
        completed // second - completed // math.lcm(first, second) for second in further_intervals[:1]
    )


def _decide_save_every(steps: int | None) -> tuple[int, str]:
    if steps is None:
        return 200, "the number of steps is not known yet"
    return max(1, math.ceil(steps / 4)), f"a quarter of {plural(steps, 'step')}"


def _decide_eval_batch(hardware: HardwareLike) -> tuple[int, str]:
    if hardware.kind == "cuda" and (hardware.memory_bytes or 0) < 30 * GIB:
        return 16, "a GPU under 30 GiB"
    return 64, "answers are short and the prompts are sorted by length"


def _origin(dotted: str, loaded: LoadedConfig) -> ValueOrigin:
    if dotted in loaded.adopted:
        return ValueOrigin("file", loaded.adopted[dotted])
    if dotted in loaded.recorded:
        return ValueOrigin("auto", loaded.recorded[dotted])
    if is_overridden(dotted, loaded.overridden):
        return ValueOrigin(OVERRIDE)
    key = dotted
    while key and key not in loaded.lines:
        key = key.rpartition(".")[0]
    # `objective: dpo` is short for its name alone.
    section_only = key != dotted and not dotted.startswith("evaluate.extra_sets.") and dotted != "objective.name"
    return (
        ValueOrigin("default")
        if not key or section_only
        else ValueOrigin("user", f"{loaded.path.name}:{loaded.lines[key]}")
    )


def iter_config_values(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every (dotted key, value) of a config, in the order of the schema.

    A mapping whose own keys contain dots, such as the paths in `data.mix`, is one value.
    """
    for name in type(section).model_fields:
        value = getattr(section, name)
        dotted = f"{prefix}{name}"
        if isinstance(value, BaseModel):
            yield from iter_config_values(value, f"{dotted}.")
        elif isinstance(value, dict) and value and not any("." in key for key in value):
            yield from ((f"{dotted}.{key}", item) for key, item in value.items())
        else:
            yield dotted, value


def lookup(config: BaseModel, dotted: str) -> Any:
    """Return the value at a dotted key."""
    value: Any = config
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


def with_decisions(config: SureFitConfig, changes: Mapping[str, Any]) -> SureFitConfig:
    """Return the config with values that SureFit decided, by dotted key. They are not validated again: `with_changes`
    is for values of other origin.
    """
    for dotted, value in changes.items():
        section, _, name = dotted.rpartition(".")
        update = {section: getattr(config, section).model_copy(update={name: value})} if section else {name: value}
        config = config.model_copy(update=update)
    return config


def with_changes(config: SureFitConfig, changes: Mapping[str, Any]) -> SureFitConfig:
    """Return the config with other values, by dotted key; pydantic raises where one is not valid."""
    tree = config.model_dump()
    for dotted, value in changes.items():
        *parents, leaf = dotted.split(".")
        section = tree
        for name in parents:
            section = section[name]
        section[leaf] = value
    return SureFitConfig.model_validate(tree)


def write_resolved(resolved: ResolvedConfig, path: Path) -> None:
    """Write `resolved.yaml`: a complete config, each value with a comment on its origin."""
    lines = [f"# Written by SureFit {__version__}: every value of the run, and where it came from.", ""]
    open_sections: list[str] = []
    read_keys = resolved.config.objective.read_keys
    for dotted, value in iter_config_values(resolved.config):
        if dotted.startswith("objective.") and dotted.removeprefix("objective.") not in read_keys:
            continue
        *sections, leaf = dotted.split(".")
        for depth, name in enumerate(sections):
            if open_sections[: depth + 1] != sections[: depth + 1]:
                lines.append(f"{'  ' * depth}{name}:")
        open_sections = sections
        lines.append(
            f"{'  ' * len(sections)}{leaf}: {one_line_yaml(_without_secrets(value))}  # {resolved.provenance[dotted]}"
        )
    write_atomic(path, "\n".join(lines) + "\n")


def _without_secrets(value: Any) -> Any:
    """Redact secrets in a value. SEC001 stops a run whose config holds a secret; if the rule is ignored, the secret is
    still not written to the run directory.
    """
    match value:
        case str():
            return redact(value)
        case list():
            return [_without_secrets(item) for item in value]
        case dict():
            return {redact(key): _without_secrets(item) for key, item in value.items()}
        case _:
            return value


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes every string that either YAML 1.1 or SureFit's own loader would parse as something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Represent a string; one with line breaks is double-quoted so that they are escaped."""
        style = None if text.splitlines() in ([], [text]) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
for _first, _patterns in PLAIN_PATTERNS.items():
    for _tag, _pattern in _patterns:
        _Dumper.add_implicit_resolver(_tag, _pattern, [_first])


def one_line_yaml(value: Any) -> str:
    """Format a value as one line of YAML, as it is written behind its key."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
