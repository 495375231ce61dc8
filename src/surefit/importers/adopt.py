"""Use of an Accelerate or DeepSpeed file beside a SureFit config: `parallel.accelerate_config`, `.deepspeed_config`.

The file takes precedence over the section `parallel` and over everything that the config leaves open. If config and
file differ in anything else, either could be meant: that is an error with both values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from surefit.config import modes
from surefit.config.load import LoadedConfig, is_overridden
from surefit.config.resolve import lookup, with_changes
from surefit.config.schema import SureFitConfig
from surefit.core import env
from surefit.core.errors import ConfigError
from surefit.core.units import plural
from surefit.importers import read_tool_config
from surefit.importers.result import ImportedConfig, UnmappedKey

ACCELERATE, DEEPSPEED = "parallel.accelerate_config", "parallel.deepspeed_config"
MODES = {"none": "single", "dp": "single", **{name: name for name in modes.MODES}}
"""`Setup.parallel` → `parallel.mode`. ZeRO stage 1 is not included: stage 2 is never slower and needs less memory."""
PLAIN = {
    "global_batch": "train.global_batch_size",
    "micro_batch": "train.per_device_train_batch_size",
    "learning_rate": "train.learning_rate",
    "warmup_steps": "train.warmup_steps",
    "total_steps": "train.max_steps",
}
"""Attribute of `Setup` → the equivalent config key. `world_size` is left out: it follows from others."""
BY_KEY = {
    "gradient_clipping": "train.max_grad_norm",
    "deepspeed_config.gradient_clipping": "train.max_grad_norm",
    "optimizer.params.weight_decay": "train.weight_decay",
}
"""Keys of the files that no rule reads → the equivalent config key."""
SIZES = {
    f"parallelism_config.parallelism_config_{name}_size": f"parallel.{name}" for name in ("dp_replicate", "tp", "cp")
}
"""Accelerate's sizes of dimensions of parallelism → the equivalent config key. Its `dp_shard_size` times `cp_size` is
the number of devices that shard the weights: it follows from the others."""
TUNING = frozenset(
    f"zero_optimization.{name}"
    for name in (
        "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "max_live_parameters",
        "max_reuse_distance", "overlap_comm", "prefetch_bucket_size", "reduce_bucket_size", "reduce_scatter",
        "round_robin_gradients", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "sub_group_size",
    )
)  # fmt: skip
"""Keys that only change the speed of ZeRO: DeepSpeed itself reads them (parallel/zero.py)."""
ACCUMULATION = "accumulation"


@dataclass(frozen=True)
class FileValue:
    """A value in a file, with its place as `FILE:LINE KEY`."""

    value: Any
    place: str


@dataclass(frozen=True)
class OverriddenValue:
    """A config value that a file replaced."""

    dotted: str
    before: Any
    after: FileValue

    def __str__(self) -> str:
        source = f"{_format_value(self.after.value)}, from {self.after.place}"
        return f"{self.dotted}: {source} (was {_format_value(self.before)})"


@dataclass(frozen=True)
class AdoptedConfig:
    """A config with the values of the launcher files.

    Attributes:
        loaded: the config, with the origin of its values.
        overrides: the values that the files changed.
        unplaced: (file, key) of what SureFit cannot express, and why.
    """

    loaded: LoadedConfig
    overrides: tuple[OverriddenValue, ...] = ()
    unplaced: tuple[tuple[str, UnmappedKey], ...] = field(default=())

    def lines(self) -> Iterator[str]:
        """Yield a sentence for each changed value, and for the keys of each file that were left out."""
        yield from map(str, self.overrides)
        for file in dict.fromkeys(file for file, _ in self.unplaced):
            lost = [lost for name, lost in self.unplaced if name == file]
            keys = ", ".join(item.key for item in lost)
            yield f"{file}: {plural(len(lost), 'key')} without an equivalent in SureFit, ignored: {keys}"


def apply_launcher_files(loaded: LoadedConfig) -> AdoptedConfig:
    """Read the launcher files that `loaded` names, if any, and apply their values.

    Raises:
        ConfigError: a file cannot be read or used; it contradicts the config, the command line or the other file.
    """
    parallel = loaded.config.parallel
    if parallel.accelerate_config is None and parallel.deepspeed_config is None:
        return AdoptedConfig(loaded)
    file_values: dict[str, FileValue] = {}
    unplaced: list[tuple[str, UnmappedKey]] = []
    for key, tool in ((ACCELERATE, "accelerate"), (DEEPSPEED, "deepspeed")):
        # An Accelerate file may name the DeepSpeed file.
        path = lookup(loaded.config, key) or (file_values[key].value if key in file_values else None)
        if path is not None:
            imported = read_tool_config(_existing(path, key, file_values.get(key), loaded), tool)
            _require_usable(imported)
            for dotted, file_value in _config_values_in_file(imported, loaded):
                _require_same(dotted, file_values.setdefault(dotted, file_value), file_value, loaded)
            unplaced += [(imported.path.name, lost) for lost in _unmapped_keys(imported)]
    accumulation = file_values.pop(ACCUMULATION, None)
    overrides = [
        change for dotted, file_value in file_values.items() if (change := _find_override(dotted, file_value, loaded))
    ]
    loaded = _with_overrides(loaded, overrides)
    if accumulation is not None and (override := _batch(accumulation, loaded)) is not None:
        overrides.append(override)
        loaded = _with_overrides(loaded, [override])
    return AdoptedConfig(loaded, tuple(overrides), tuple(unplaced))


def _existing(named: str, key: str, named_in: FileValue | None, loaded: LoadedConfig) -> Path:
    """Return the path that `key` names, in the config or (`named_in`) in an Accelerate file; raises if it does not
    exist."""
    path = Path(named).expanduser()
    if not path.exists():
        origin = f", named in {named_in.place}" if named_in else ""
        start = (
            "relative paths in it start at its folder" if named_in else "relative paths start at the current directory"
        )
        raise ConfigError(
            f"no such file: {named}{origin}",
            code="E3009",
            path=loaded.path,
            line=loaded.lines.get(key),
            field=key,
            help=start,
        )
    return path


def _require_usable(found: ImportedConfig) -> None:
    """Raise if a file has a value that its tool cannot use, or a key that its tool does not know."""
    problems = list(found.problems)
    for key in found.setup.unknown:
        place = found.setup.places[key]
        intended = found.setup.meant.get(key)
        problems.append(
            ConfigError(
                f"{found.tool} has no such key", code="E3010", path=found.path, line=place.line, field=key,
                help=f"write {intended}" if intended else "remove it",
            )
        )  # fmt: skip
    if problems:
        error, *remaining = problems
        error.also = (*error.also, *remaining)
        raise error


def _config_values_in_file(found: ImportedConfig, loaded: LoadedConfig) -> Iterator[tuple[str, FileValue]]:
    """Yield (dotted key, value) of everything in a file that a SureFit config can express."""
    setup = found.setup

    def item(value: Any, *attributes: str) -> FileValue:
        place = next((setup.places[name] for name in attributes if name in setup.places), None)
        location = found.path.name if place is None or place.line is None else f"{found.path.name}:{place.line}"
        return FileValue(value, f"{location} {place.name if place else ''}".strip())

    if setup.parallel in MODES:
        yield "parallel.mode", item(MODES[setup.parallel], "parallel")
    if setup.cpu_offload or setup.fsdp_offload:
        yield "parallel.offload", item(True, "cpu_offload", "fsdp_offload")
    if setup.on_cpu:
        yield "hardware.gpu", item("cpu", "on_cpu")
    if setup.machines is not None:
        yield "hardware.nodes", item(setup.machines, "machines")
    if setup.processes is not None and setup.parallel not in ("none", "dp"):
        yield "hardware.count", item(_per_machine(found, setup.processes, setup.machines or 1), "processes")
    for attribute, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if getattr(setup, attribute):
            yield "model.dtype", item(dtype, attribute)
    for attribute, dotted in PLAIN.items():
        value = getattr(setup, attribute)
        if value is not None:
            yield dotted, item(float(value) if dotted == "train.warmup_steps" else value, attribute)
    if setup.accumulation is not None:
        yield ACCUMULATION, item(setup.accumulation, "accumulation")
    for lost in (*found.lost, *found.judged):
        if lost.key in BY_KEY and isinstance(lost.value, int | float) and lost.value > 0:
            yield BY_KEY[lost.key], FileValue(float(lost.value), f"{found.path.name}:{lost.line} {lost.key}")
        elif lost.key in SIZES and lost.value > 1:
            yield SIZES[lost.key], FileValue(lost.value, f"{found.path.name}:{lost.line} {lost.key}")
        elif lost.key == "deepspeed_config.deepspeed_config_file":
            yield DEEPSPEED, FileValue(str(found.path.parent / lost.value), f"{found.path.name}:{lost.line} {lost.key}")


def _per_machine(found: ImportedConfig, processes: int, machines: int) -> int:
    if processes % machines:
        place = found.setup.places["processes"]
        raise ConfigError(
            f"{processes} processes cannot be divided evenly among {machines} machines",
            code="E3011", path=found.path, line=place.line,
            field=place.name, help=f"num_processes counts all machines: write a multiple of {machines}",
        )  # fmt: skip
    return processes // machines


def _unmapped_keys(found: ImportedConfig) -> Iterator[UnmappedKey]:
    """Yield the keys that neither SureFit's config nor DeepSpeed reads; "auto" and false values do not count."""
    for lost in found.lost:
        is_read = lost.key in BY_KEY or lost.key in TUNING or lost.key == "deepspeed_config.deepspeed_config_file"
        if not is_read and lost.value not in ("auto", None, False, "none"):
            yield lost
    if found.setup.parallel == "zero1":
        place = found.setup.places["parallel"]
        yield UnmappedKey(
            place.name, place.line, 1, "SureFit supports stage 2, which also shards the gradients, and stage 3"
        )


def _require_same(dotted: str, one: FileValue, other: FileValue, loaded: LoadedConfig) -> None:
    if one.value != other.value:
        raise ConfigError(
            f"{dotted} is {_format_value(one.value)} in {one.place} but {_format_value(other.value)} in {other.place}",
            code="E3012",
            path=loaded.path,
            field=dotted,
            help="make the two files agree",
        )


def _find_override(dotted: str, file_value: FileValue, loaded: LoadedConfig) -> OverriddenValue | None:
    """Return the change that a file makes to the config, or None if both agree; raises if the config sets another
    value."""
    config_value = lookup(loaded.config, dotted)
    if config_value == file_value.value:
        return None
    on_command_line = is_overridden(dotted, loaded.overridden)
    is_set = on_command_line or (dotted in loaded.lines and not dotted.startswith("parallel."))
    if is_set and config_value != "auto":
        location = "on the command line" if on_command_line else "here"
        raise ConfigError(
            f"{_format_value(config_value)} {location}, but {_format_value(file_value.value)} in {file_value.place}",
            code="E3013",
            path=loaded.path, line=loaded.lines.get(dotted), field=dotted,
            help="make them equal, or remove one of them",
        )  # fmt: skip
    return OverriddenValue(dotted, config_value, file_value)


def _batch(accumulation: FileValue, loaded: LoadedConfig) -> OverriddenValue | None:
    """Derive the micro batch from accumulation and global batch if it is "auto"; otherwise check that the three
    agree."""
    config = loaded.config
    train, parts = config.train, _parts(config)
    micro, global_batch = train.per_device_train_batch_size, train.global_batch_size
    if micro == "auto":
        if isinstance(global_batch, int) and global_batch % (accumulation.value * parts) == 0:
            value = global_batch // (accumulation.value * parts)
            return OverriddenValue("train.per_device_train_batch_size", "auto", replace(accumulation, value=value))
    elif micro * accumulation.value * parts == global_batch:
        return None
    batch = f"train.global_batch_size is {global_batch}, on {plural(parts, 'device')}"
    micro_text = "" if micro == "auto" else f" × {micro} examples"
    raise ConfigError(
        f"{accumulation.value} micro batches{micro_text} per device in {accumulation.place}, and {batch}", code="E3014",
        path=loaded.path, line=loaded.lines.get("train.global_batch_size"), field="train.global_batch_size",
        help='global batch = micro batch × accumulation × devices: change one of them, or write "auto" in the file',
    )  # fmt: skip


def _parts(config: SureFitConfig) -> int:
    """Return the number of processes that read different rows."""
    hardware, parallel = config.hardware, config.parallel
    world_size = env.distributed_env()[1]
    devices = world_size if hardware.count == "auto" else hardware.count * hardware.nodes
    return max(1, devices // (parallel.tp * parallel.cp * parallel.pp))


def _with_overrides(loaded: LoadedConfig, overrides: list[OverriddenValue]) -> LoadedConfig:
    if not overrides:
        return loaded
    try:
        config = with_changes(loaded.config, {entry.dotted: entry.after.value for entry in overrides})
    except ValidationError as error:
        loc = error.errors()[0]["loc"]
        dotted = ".".join(str(part) for part in loc[:2])
        entry = next((entry for entry in overrides if entry.dotted == dotted), overrides[0])
        raise ConfigError(
            f"SureFit cannot use {_format_value(entry.after.value)} of {entry.after.place}: {error.errors()[0]['msg']}",
            code="E3015",
            path=loaded.path, field=entry.dotted, help="change it there, or remove it",
        ) from None  # fmt: skip
    return replace(loaded, config=config, adopted={**loaded.adopted, **{i.dotted: i.after.place for i in overrides}})


def _format_value(value: Any) -> str:
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)
