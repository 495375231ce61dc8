"""Number of devices and their parallel mode: the arithmetic of the processes, and the resolution of "auto"."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from surefit.config.capabilities import conflicts, traits
from surefit.config.modes import GROUPED, MODES, ZERO
from surefit.config.schema import SureFitConfig, decided
from surefit.core.errors import ConfigError
from surefit.core.units import bytes_text

COUNT, NODES, MODE = "hardware.count", "hardware.nodes", "parallel.mode"


@dataclass(frozen=True)
class LaunchedProcesses:
    """The processes that torchrun, srun or our own launcher has started: per machine, and the number of machines."""

    each: int
    nodes: int


def count_processes(config: SureFitConfig) -> int:
    """Return the number of processes on all machines; one device per machine while that is undecided."""
    count = config.hardware.count
    return (1 if count == "auto" else count) * config.hardware.nodes


def count_data_ranks(config: SureFitConfig) -> int:
    """Return the number of parts of the global batch: processes, or groups of them that read the same examples."""
    group_size = config.parallel.tp * config.parallel.cp * config.parallel.pp
    return max(1, count_processes(config) // group_size)


def examples_per_data_rank(config: SureFitConfig) -> int:
    """Return the examples of a step per part: its share of the global batch, rounded up."""
    return math.ceil(decided(config.train.global_batch_size) / count_data_ranks(config))


def count_accumulation_steps(config: SureFitConfig) -> int:
    """Return the micro batches of each process per step; where they do not divide evenly, some processes run an empty
    one.
    """
    micro = config.train.per_device_train_batch_size
    assert isinstance(micro, int)
    return math.ceil(math.ceil(decided(config.train.global_batch_size) / micro) / count_data_ranks(config))


def decide_devices(config: SureFitConfig, started: LaunchedProcesses | None) -> dict[str, tuple[int, str]]:
    """Decide `hardware.count` and `hardware.nodes`, with their reasons."""
    if started is None:
        return {COUNT: (1, "one device; --gpus N uses more")}
    return {
        COUNT: (started.each, f"{started.each} processes were started on this machine"),
        NODES: (started.nodes, f"processes were started on {started.nodes} machines"),
    }


def decide_mode(
    config: SureFitConfig, capacity: int | None, needed: Callable[[SureFitConfig], int | None]
) -> tuple[dict[str, Any], str]:
    """Decide `parallel.mode`, and `parallel.cp` where tokens are shared, with the reason.

    The first that fits: a whole model on each device, which communicates least; shards of it; then the tokens of each
    example shared by the fewest processes that hold them; then both. Where nothing fits, the one that needs the least
    memory.

    Args:
        config: config whose values that do not depend on memory are decided.
        capacity: a device's memory in bytes.
        needed: function that returns a step's memory in bytes for a mode, the rest decided for it; called only if it
            matters.

    Returns:
        Dotted key → value, and the reason.
    """
    for name in ("tp", "pp"):
        if getattr(config.parallel, name) > 1:
            return {MODE: name}, f"parallel.{name} is {getattr(config.parallel, name)}"
    count = count_processes(config)
    if count == 1 and config.parallel.cp == 1:
        return {MODE: "single"}, "one process"
    if config.parallel.offload or config.parallel.dp_replicate > 1:
        return {MODE: "fsdp"}, "the only mode that supports parallel.offload and parallel.dp_replicate"
    if capacity is None or count % config.parallel.cp:
        return _likely(config, count)
    estimates: list[tuple[int, dict[str, Any]]] = []
    for candidate in parallel_candidates(config, count):
        size = needed(with_parallel_settings(config, candidate))
        if size is None:
            return _likely(config, count)
        estimates.append((size, candidate))
        if size <= capacity:
            return candidate, _mode_reason(estimates, capacity, config.parallel.cp)
    if not estimates:  # every candidate conflicts with a setting; `check` reports which
        return _likely(config, count)
    estimates.sort(key=lambda estimate: -estimate[0])
    return estimates[-1][1], _mode_reason(estimates, capacity, config.parallel.cp)


def _likely(config: SureFitConfig, count: int) -> tuple[dict[str, Any], str]:
    """Return the mode for unknown memory needs, with the reason."""
    if config.parallel.cp > 1:
        return {MODE: "cp"}, f"parallel.cp is {config.parallel.cp}"
    return {MODE: "ddp"}, f"a whole model in each of {count} processes: the least communication"


def parallel_candidates(config: SureFitConfig, count: int) -> Iterator[dict[str, Any]]:
    """Yield the candidates for several processes with this config, the least communication first; `cp` stays where it
    is set.
    """
    if config.parallel.cp > 1:
        candidates: list[dict[str, Any]] = [{MODE: "cp"}, {MODE: "fsdp"}]
    else:
        sizes = [size for size in range(2, count + 1) if count % size == 0 and config.data.packing is True]
        candidates = [{MODE: "ddp"}, {MODE: "fsdp"}]
        candidates += [{MODE: mode, "parallel.cp": size} for mode in ("cp", "fsdp") for size in sizes]
    # Conflicts that exist without any candidate do not rule one out.
    existing_conflicts = conflicts(traits(config))
    yield from (
        candidate
        for candidate in candidates
        if all(row in existing_conflicts for row in conflicts(traits(with_parallel_settings(config, candidate))))
    )


def with_parallel_settings(config: SureFitConfig, way: Mapping[str, Any]) -> SureFitConfig:
    """Return the config with other values in its section `parallel`, by dotted key."""
    values = {dotted.removeprefix("parallel."): value for dotted, value in way.items()}
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=values)})


def _mode_reason(tried: list[tuple[int, dict[str, Any]]], capacity: int, cp: int) -> str:
    """Explain the last candidate by comparison with those before it."""
    *earlier, (size, chosen) = tried
    fit_text = "up to" if size <= capacity else "nothing fits; the smallest option needs up to"
    alternatives = "".join(
        f"; {_in_words(alternative, cp)} would need {bytes_text(other_bytes)}"
        for other_bytes, alternative in earlier[:2]
    )
    return f"{_in_words(chosen, cp)}: {fit_text} {bytes_text(size)} of {bytes_text(capacity)}{alternatives}"


def _in_words(way: Mapping[str, Any], cp: int) -> str:
    """Describe the part that each device holds; `cp` is the value where the mode leaves it unchanged."""
    tokens = "a share of each example's tokens"
    match way[MODE]:
        case "ddp":
            return "a whole model on each device"
        case "fsdp" if way.get("parallel.cp", cp) > 1:
            return f"a share of the model and {tokens}"
        case "fsdp":
            return "a share of it"
        case _:
            return tokens


def require_shareable(config: SureFitConfig) -> None:
    """Raise if the processes cannot share the run.

    Raises:
        ConfigError: several modes at once, or numbers that do not divide.
    """
    parallel, count = config.parallel, count_processes(config)
    group_modes = [name for name in GROUPED if getattr(parallel, name) > 1]
    if parallel.mode == "single" and count > 1:
        raise ConfigError(
            f"parallel.mode is single, but there are {count} processes",
            code="E2020",
            field=MODE,
            help="leave it at auto, or use one device",
        )
    if group_modes and group_modes != [parallel.mode] and (parallel.mode, group_modes) != ("fsdp", ["cp"]):
        set_to = ", ".join(f"{name}: {getattr(parallel, name)}" for name in group_modes)
        weights_reason = "tp and pp cut the weights that fsdp would shard again; only cp can be combined with it"
        why = weights_reason if parallel.mode == "fsdp" else "one way at a time"
        raise ConfigError(
            f"parallel.mode is {parallel.mode}, with {set_to}",
            code="E2021",
            field=MODE,
            help=f"{why}: set the others to 1, and the mode to auto",
        )
    _require_effect(config, count)
    for name in (*group_modes, *(["dp_replicate"] if parallel.dp_replicate > 1 else [])):
        if count % getattr(parallel, name):
            raise ConfigError(
                f"{count} processes cannot be divided into groups of {getattr(parallel, name)} (parallel.{name})",
                code="E2022",
                field=f"parallel.{name}",
                help=f"choose a divisor of {count}, or another number of devices",
            )


def _require_effect(config: SureFitConfig, count: int) -> None:
    """Raise if settings belong to a mode that is not used: they would silently have no effect."""
    parallel = config.parallel
    if parallel.mode in GROUPED and getattr(parallel, parallel.mode) == 1:
        raise ConfigError(
            f"parallel.mode is {parallel.mode}, but parallel.{parallel.mode} is 1: nothing would be divided",
            code="E2023",
            field=f"parallel.{parallel.mode}",
            help=f"set it to {count}, or to a divisor" if count > 1 else "use several devices: --gpus N",
        )
    if parallel.dp_replicate > 1 and parallel.mode != "fsdp":
        raise ConfigError(
            f"parallel.dp_replicate is {parallel.dp_replicate}, but parallel.mode {parallel.mode} does not use it",
            code="E2024",
            field="parallel.dp_replicate",
            help="leave it out, or set parallel.mode: fsdp and use several devices",
        )
    mode = MODES[parallel.mode]
    if parallel.offload and not (mode.sharded and (mode.deepspeed or count > 1)):
        raise ConfigError(
            f"parallel.offload is on, but parallel.mode {parallel.mode} with {count} process{'es' * (count > 1)} "
            "offloads nothing to the host",
            code="E2025",
            field="parallel.offload",
            help=f"leave it out, or set parallel.mode: {' or '.join(ZERO)}" + (", or fsdp" if count > 1 else ""),
        )
