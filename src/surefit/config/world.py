"""How many devices a run has and how they share its work: the arithmetic of the processes, and what "auto" becomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from surefit.config.capabilities import conflicts, traits
from surefit.config.modes import GROUPED, MODES, ZERO
from surefit.config.schema import Config
from surefit.core.errors import ConfigError
from surefit.core.units import bytes_text

COUNT, NODES, MODE = "hardware.count", "hardware.nodes", "parallel.mode"


@dataclass(frozen=True)
class LaunchedProcesses:
    """The processes that torchrun, srun or our own launcher has started: on each machine, and on how many."""

    each: int
    nodes: int


def count_processes(config: Config) -> int:
    """All of them, over all machines; one device on each where that is not decided yet."""
    count = config.hardware.count
    return (1 if count == "auto" else count) * config.hardware.nodes


def count_data_ranks(config: Config) -> int:
    """How many parts the global batch is cut into: the processes, or groups of them that read the same examples."""
    together = config.parallel.tp * config.parallel.cp * config.parallel.pp
    return max(1, count_processes(config) // together)


def examples_per_data_rank(config: Config) -> int:
    """Examples of a step that one part has: its share of the global batch, rounded up."""
    return math.ceil(config.train.global_batch_size / count_data_ranks(config))


def count_accumulation_steps(config: Config) -> int:
    """Micro batches that each process runs in a step; where they do not divide, some of them run an empty one."""
    micro = config.train.per_device_train_batch_size
    assert isinstance(micro, int)
    return math.ceil(math.ceil(config.train.global_batch_size / micro) / count_data_ranks(config))


def decide_devices(config: Config, started: LaunchedProcesses | None) -> dict[str, tuple[int, str]]:
    """`hardware.count` and `hardware.nodes`, with their reasons."""
    if started is None:
        return {COUNT: (1, "one device; --gpus N takes more")}
    return {
        COUNT: (started.each, f"{started.each} processes were started on this machine"),
        NODES: (started.nodes, f"processes were started on {started.nodes} machines"),
    }


def decide_mode(
    config: Config, capacity: int | None, needed: Callable[[Config], int | None]
) -> tuple[dict[str, Any], str]:
    """`parallel.mode`, and `parallel.cp` where tokens are shared, with the reason.

    The first that fits: a whole model on each device, which exchanges least; shards of it; then the tokens of each
    example shared by as few processes as hold them; then both. Where nothing fits it is the one that takes least.

    Args:
        config: what does not depend on memory decided.
        capacity: bytes that a device has.
        needed: what a step takes of it, the rest decided for that mode; asked only where it decides.

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
        return {MODE: "fsdp"}, "it alone has what parallel.offload and parallel.dp_replicate ask for"
    if capacity is None or count % config.parallel.cp:
        return _likely(config, count)
    tried: list[tuple[int, dict[str, Any]]] = []
    for way in parallel_candidates(config, count):
        size = needed(with_parallel_settings(config, way))
        if size is None:
            return _likely(config, count)
        tried.append((size, way))
        if size <= capacity:
            return way, _mode_reason(tried, capacity, config.parallel.cp)
    if not tried:  # every way conflicts with a setting; `check` says with which
        return _likely(config, count)
    tried.sort(key=lambda one: -one[0])
    return tried[-1][1], _mode_reason(tried, capacity, config.parallel.cp)


def _likely(config: Config, count: int) -> tuple[dict[str, Any], str]:
    """The mode where it is not known what a step takes, with the reason."""
    if config.parallel.cp > 1:
        return {MODE: "cp"}, f"parallel.cp is {config.parallel.cp}"
    return {MODE: "ddp"}, f"a whole model in each of {count} processes: the least to exchange"


def parallel_candidates(config: Config, count: int) -> Iterator[dict[str, Any]]:
    """What several processes can do with this config, the least to exchange first; `cp` stays where it is set."""
    if config.parallel.cp > 1:
        ways: list[dict[str, Any]] = [{MODE: "cp"}, {MODE: "fsdp"}]
    else:
        sizes = [size for size in range(2, count + 1) if count % size == 0 and config.data.packing is True]
        ways = [{MODE: "ddp"}, {MODE: "fsdp"}]
        ways += [{MODE: mode, "parallel.cp": size} for mode in ("cp", "fsdp") for size in sizes]
    # What conflicts without any of them is no reason against one.
    anyway = conflicts(traits(config))
    yield from (
        way for way in ways if all(row in anyway for row in conflicts(traits(with_parallel_settings(config, way))))
    )


def with_parallel_settings(config: Config, way: Mapping[str, Any]) -> Config:
    """The config with other values of its section `parallel`, by dotted key."""
    values = {dotted.removeprefix("parallel."): value for dotted, value in way.items()}
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=values)})


def _mode_reason(tried: list[tuple[int, dict[str, Any]]], capacity: int, cp: int) -> str:
    """Why the last of these, beside those before it."""
    *before, (size, way) = tried
    fits = "up to" if size <= capacity else "nothing fits; the least is up to"
    others = "".join(f"; {_in_words(other, cp)} would take {bytes_text(large)}" for large, other in before[:2])
    return f"{_in_words(way, cp)}: {fits} {bytes_text(size)} of {bytes_text(capacity)}{others}"


def _in_words(way: Mapping[str, Any], cp: int) -> str:
    """What each device has; `cp` where the way leaves it as it is."""
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


def require_shareable(config: Config) -> None:
    """Refuse what the processes cannot share.

    Raises:
        ConfigError: several ways at once, or numbers that do not divide.
    """
    parallel, count = config.parallel, count_processes(config)
    used = [name for name in GROUPED if getattr(parallel, name) > 1]
    if parallel.mode == "single" and count > 1:
        raise ConfigError(
            f"{count} processes, and parallel.mode is single",
            code="E2020",
            field=MODE,
            help="leave it at auto, or use one device",
        )
    if used and used != [parallel.mode] and (parallel.mode, used) != ("fsdp", ["cp"]):
        set_to = ", ".join(f"{name}: {getattr(parallel, name)}" for name in used)
        cut = "tp and pp cut the weights that fsdp would shard again; only cp can be combined with it"
        why = cut if parallel.mode == "fsdp" else "one way at a time"
        raise ConfigError(
            f"parallel.mode is {parallel.mode}, with {set_to}",
            code="E2021",
            field=MODE,
            help=f"{why}: set the others to 1, and the mode to auto",
        )
    _require_effect(config, count)
    for name in (*used, *(["dp_replicate"] if parallel.dp_replicate > 1 else [])):
        if count % getattr(parallel, name):
            raise ConfigError(
                f"{count} processes cannot be divided into groups by parallel.{name}: {getattr(parallel, name)}",
                code="E2022",
                field=f"parallel.{name}",
                help=f"choose a divisor of {count}, or another number of devices",
            )


def _require_effect(config: Config, count: int) -> None:
    """Refuse settings of modes other than the one that is used: they would do nothing, and nobody would notice."""
    parallel = config.parallel
    if parallel.mode in GROUPED and getattr(parallel, parallel.mode) == 1:
        raise ConfigError(
            f"parallel.mode is {parallel.mode}, and parallel.{parallel.mode} is 1: nothing would be shared",
            code="E2023",
            field=f"parallel.{parallel.mode}",
            help=f"set it to {count}, or to a divisor" if count > 1 else "it takes several devices: --gpus N",
        )
    if parallel.dp_replicate > 1 and parallel.mode != "fsdp":
        raise ConfigError(
            f"parallel.dp_replicate is {parallel.dp_replicate}, and parallel.mode {parallel.mode} has no use for it",
            code="E2024",
            field="parallel.dp_replicate",
            help="leave it out, or set parallel.mode: fsdp and take several devices",
        )
    mode = MODES[parallel.mode]
    if parallel.offload and not (mode.sharded and (mode.deepspeed or count > 1)):
        raise ConfigError(
            f"parallel.offload is on, and parallel.mode {parallel.mode} with {count} process{'es' * (count > 1)} keeps "
            "nothing in the host's memory",
            code="E2025",
            field="parallel.offload",
            help=f"leave it out, or set parallel.mode: {' or '.join(ZERO)}" + (", or fsdp" if count > 1 else ""),
        )
