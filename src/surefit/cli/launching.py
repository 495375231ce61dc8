"""Verbs on one device or several: who starts whom, and what the processes of a run share. Torch-free.

`train` (and `run`) have as many processes as the config has devices. `evaluate` and `predict` have those that the
command line asks for: each loads a model of its own and answers a part of the rows.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.cli import running, training
from surefit.config.load import load_config
from surefit.config.oom_ladder import as_arguments, next_rung, with_oom_changes
from surefit.config.world import count_data_ranks, count_processes
from surefit.core import env
from surefit.core.errors import EXIT_SHORT, ConfigError
from surefit.core.units import plural, shell_quote
from surefit.launch.local import launch_processes
from surefit.stages.checking import require_no_errors, run_check
from surefit.stages.run_context import CheckedRun, find_config_file, load_checked_run

if TYPE_CHECKING:
    from surefit.cli.render import Output
    from surefit.parallel.process_group import World


def train_command(
    out: Output,
    target: Path,
    overrides: Sequence[str] | None,
    gpus: int | None,
    *,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    adapt: bool,
) -> int:
    """Train in this process; in processes that this one starts; or, where it is one of several already, its part.

    Args:
        gpus: what `hardware.count` is set to.
    """
    changes = _with_process_count(target, overrides, gpus)
    if env.distributed_env()[1] > 1:
        return _train_as_rank(out, target, changes, resume=resume, overwrite=overwrite, dry_run=dry_run, adapt=adapt)
    run = load_checked_run(target, changes)
    if _processes(run) == 1:
        return training.train_and_show(out, run, resume=resume, overwrite=overwrite, dry_run=dry_run, adapt=adapt)
    flags = {"--dry-run": dry_run, "--adapt": adapt, "--json": out.as_json}
    return _launch(out, run, target, changes, flags, resume=resume, overwrite=overwrite)


def run_command(
    out: Output,
    target: Path,
    overrides: Sequence[str] | None,
    gpus: int | None,
    *,
    resume: bool,
    overwrite: bool,
    adapt: bool,
) -> int:
    """All stages; training alone is shared between processes."""
    changes = _with_process_count(target, overrides, gpus)
    prepared = dataclasses.replace(load_checked_run(target, changes), verb="run")
    if _processes(prepared) == 1:
        return running.run_all_stages(out, prepared, resume=resume, overwrite=overwrite, adapt=adapt)

    def train_them(resume: bool, overwrite: bool) -> int:
        return _launch(out, prepared, target, changes, {"--adapt": adapt}, resume=resume, overwrite=overwrite)

    return running.run_all_stages(out, prepared, resume=resume, overwrite=overwrite, training=train_them)


def distribute_rows(
    out: Output,
    target: Path,
    overrides: Sequence[str],
    gpus: int | None,
    again: Sequence[str],
    work: Callable[[CheckedRun, World | None], int],
) -> int:
    """Answer rows in this process; in processes that this one starts; or, where it is one of several already, its part.

    Args:
        gpus: how many processes; one if not said, whatever the config has for training.
        again: the command line that each of them gets.
        work: what is done with the run.
    """
    if env.distributed_env()[1] > 1:
        return _part_of_rows(target, overrides, work)
    run = load_checked_run(target, overrides)
    if gpus is None or gpus == 1:
        return work(run, None)
    _require_gpus(run, gpus)
    out.note(f"{gpus} processes, each with a model of its own")
    command = shlex.join(["surefit", *again, "--gpus", str(gpus)])
    return launch_processes([*again, *(["--json"] if out.as_json else [])], gpus, command, "where it was,")


def _require_gpus(run: CheckedRun, gpus: int) -> None:
    hardware = run.hardware
    if hardware.kind == "cuda" and hardware.source == "detected" and hardware.gpu_count < gpus:
        raise ConfigError(
            f"--gpus is {gpus}, and this machine has {hardware.gpu_count}",
            code="E1025",
            help=f"--gpus {hardware.gpu_count}, or less",
        )


def _part_of_rows(target: Path, overrides: Sequence[str], work: Callable[[CheckedRun, World | None], int]) -> int:
    from surefit.parallel.process_group import World, broadcast_from_rank0

    world = World.current()
    with _connect_processes(world, target, overrides):
        own = load_checked_run(target, overrides, training=False) if world.is_first else None
        told: tuple[Any, ...] = broadcast_from_rank0(_to_broadcast(own) if own else None, world)
        return work(own or _from_broadcast(*told), world)


def _connect_processes(world: World, target: Path, overrides: Sequence[str]) -> AbstractContextManager[None]:
    """Connected to the other processes, on the device that the config says."""
    import torch

    from surefit.parallel.process_group import process_group

    config = load_config(find_config_file(target), overrides).config
    on_gpu = torch.cuda.is_available() and config.hardware.gpu != "cpu"
    return process_group(world, config.parallel.timeout_minutes, on_gpu)


def _with_process_count(target: Path, overrides: Sequence[str] | None, gpus: int | None) -> list[str]:
    """The overrides with that of `--gpus`. A run directory has the mode of its own number: another asks anew."""
    changes = list(overrides or ())
    if gpus is None:
        return changes
    if not target.is_dir() or any(change.startswith("parallel.mode=") for change in changes):
        return [*changes, f"hardware.count={gpus}"]
    mode = load_config(find_config_file(target), changes).config.parallel.mode
    stale = mode == "single" if gpus > 1 else mode in ("ddp", "fsdp")
    return [*changes, f"hardware.count={gpus}", *(["parallel.mode=auto"] if stale else [])]


def _processes(run: CheckedRun) -> int:
    """How many this run takes; all of them must be on this machine.

    Raises:
        ConfigError: they are not.
    """
    hardware = run.resolved.config.hardware
    assert isinstance(hardware.count, int)
    if hardware.nodes > 1:
        raise ConfigError(
            f"hardware.nodes is {hardware.nodes}, and this starts processes on one machine only",
            code="E1026",
            field="hardware.nodes",
            help="`surefit slurm` makes a job of it; srun and torchrun start `surefit train` on each machine",
        )
    return hardware.count


def _launch(
    out: Output,
    run: CheckedRun,
    target: Path,
    changes: Sequence[str],
    flags: Mapping[str, bool],
    *,
    resume: bool,
    overwrite: bool,
) -> int:
    """Check, then start the processes, each with the same command; again, where one says that less memory may do."""
    with training.show_findings_on_failure(out):
        require_no_errors(run_check(run.gathered))
    command = ["train", str(target), *(part for change in changes for part in ("--set", change))]
    less: dict[str, Any] = {}
    # What stands on stdout with --json is this command's: that of the first process, where it is told to print it.
    aside = out.as_json and not flags.get("--json")
    while True:
        given = {"--resume": resume, "--overwrite": overwrite, **flags}
        arguments = [*command, *(flag for flag, on in given.items() if on)]
        out.note(_arithmetic(run))
        again = f"surefit {run.verb} {shell_quote(run.run.path)} --resume"
        code = launch_processes(arguments, _processes(run), again, adapted=less, aside=aside)
        if code != EXIT_SHORT:
            return code
        further = next_rung(run.resolved.config, run.hardware.kind)
        assert further, "a process asks for less only where it knows what"
        out.note(f"adapting: {as_arguments(further)}; all start again")
        run, less = dataclasses.replace(run, resolved=with_oom_changes(run.resolved, further)), less | further
        if not flags.get("--dry-run"):
            run.run.note("train", "adapted", changes=further)
            resume, overwrite = True, False


def _arithmetic(run: CheckedRun) -> str:
    """The processes, and how the rows of a step come to each of them, or to each group that reads the same ones."""
    config, steps = run.resolved.config, run.resolved.gradient_accumulation_steps
    count, parts, size = count_processes(config), count_data_ranks(config), config.train.per_device_train_batch_size
    each = "each" if parts == count else f"each group of {count // parts}"
    batches = f"{steps} micro batch{'es' * (steps > 1)} of {size}"
    rows = plural(config.train.global_batch_size, "row")
    return f"{count} processes, {config.parallel.mode}: {rows} a step, in {each} {batches}"


def _require_own_launcher() -> None:
    """Memory runs out in one process, and all others are in the same step: only whoever started them can start again.

    Raises:
        ConfigError: that is torchrun, accelerate launch or srun.
    """
    if not env.launched_here():
        raise ConfigError(
            "--adapt starts all processes again where memory runs out in one, and another launcher has started these",
            code="E1027",
            help="`surefit train --gpus N` starts them itself. Here leave --adapt out: if memory runs out, the error "
            "says which setting needs less, and --resume goes on with it",
        )


def _train_as_rank(
    out: Output, target: Path, overrides: Sequence[str], *, resume: bool, overwrite: bool, dry_run: bool, adapt: bool
) -> int:
    """What the first process has found out and decided, all of them do."""
    from surefit.parallel.process_group import World, broadcast_from_rank0

    if adapt:
        _require_own_launcher()
    world = World.current()
    with _connect_processes(world, target, overrides):
        own = _with_launcher_changes(load_checked_run(target, overrides), world) if world.is_first else None
        told: tuple[Any, ...] = broadcast_from_rank0(_to_broadcast(own) if own else None, world)
        run = own or _from_broadcast(*told)
        if not env.launched_here():
            out.note(_arithmetic(run))
        return training.train_and_show(
            out, run, resume=resume, overwrite=overwrite, dry_run=dry_run, adapt=adapt, world=world
        )


def _with_launcher_changes(run: CheckedRun, world: Any) -> CheckedRun:
    """The run with what the launcher has changed in it.

    Raises:
        ConfigError: it takes another number of processes than there are.
    """
    hardware = run.resolved.config.hardware
    assert isinstance(hardware.count, int)
    if hardware.count * hardware.nodes != world.size:
        raise ConfigError(
            f"{world.size} processes were started, and hardware.count {hardware.count} × nodes {hardware.nodes} is "
            f"{hardware.count * hardware.nodes}",
            code="E1028",
            field="hardware.count",
            help="start as many processes as the config has devices, or leave hardware.count at auto",
        )
    return dataclasses.replace(run, resolved=with_oom_changes(run.resolved, env.read_oom_adaptations()))


def _to_broadcast(run: CheckedRun) -> tuple[Any, ...]:
    """All but the rows, which the others read as tokens."""
    return run.loaded, run.run, run.model, run.hardware, run.resolved


def _from_broadcast(loaded: Any, directory: Any, model: Any, hardware: Any, resolved: Any) -> CheckedRun:
    from surefit import recipes

    nothing: Any = None
    recipe = recipes.get_recipe(resolved.config.recipe)
    return CheckedRun(loaded, directory, recipe, model, hardware, None, {}, resolved, nothing)
