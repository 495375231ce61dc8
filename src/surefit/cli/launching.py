"""Verbs on one device or several: which process starts the others, and what the processes of a run share. Torch-free.

`train` (and `run`) use one process per device of the config. `evaluate` and `predict` use as many processes as the
command line sets: each loads its own copy of the model and answers a part of the rows.
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
    """Train in this process, in child processes, or, as one of several launched processes, as its rank.

    Args:
        gpus: value for `hardware.count`.
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
    """Run all stages; only training uses several processes."""
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
    """Answer rows in this process, in child processes, or, as one of several launched processes, this rank's part.

    Args:
        gpus: number of processes; None: one, whatever the config has for training.
        again: the command line of each child process.
        work: evaluates or predicts with the run.
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
        run_of_rank0 = load_checked_run(target, overrides, training=False) if world.is_first else None
        received: tuple[Any, ...] = broadcast_from_rank0(_to_broadcast(run_of_rank0) if run_of_rank0 else None, world)
        return work(run_of_rank0 or _from_broadcast(*received), world)


def _connect_processes(world: World, target: Path, overrides: Sequence[str]) -> AbstractContextManager[None]:
    """Return a context in which the process group is initialized, on the config's device."""
    import torch

    from surefit.parallel.process_group import process_group

    config = load_config(find_config_file(target), overrides).config
    on_gpu = torch.cuda.is_available() and config.hardware.gpu != "cpu"
    return process_group(world, config.parallel.timeout_minutes, on_gpu)


def _with_process_count(target: Path, overrides: Sequence[str] | None, gpus: int | None) -> list[str]:
    """Return the overrides with the device count of `--gpus`.

    A run directory records the parallel mode chosen for its own count; it is reset to auto if it does not fit the new
    count.
    """
    changes = list(overrides or ())
    if gpus is None:
        return changes
    if not target.is_dir() or any(change.startswith("parallel.mode=") for change in changes):
        return [*changes, f"hardware.count={gpus}"]
    mode = load_config(find_config_file(target), changes).config.parallel.mode
    needs_other_mode = mode == "single" if gpus > 1 else mode in ("ddp", "fsdp")
    return [*changes, f"hardware.count={gpus}", *(["parallel.mode=auto"] if needs_other_mode else [])]


def _processes(run: CheckedRun) -> int:
    """Return the number of processes of this run; all of them must be on this machine.

    Raises:
        ConfigError: the config has several nodes.
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
    """Check, then start the processes, each with the same command; restart them with less if one runs out of memory."""
    with training.show_findings_on_failure(out):
        require_no_errors(run_check(run.gathered))
    run.gathered.sources.close()  # the processes read their own
    command = ["train", str(target), *(part for change in changes for part in ("--set", change))]
    adapted: dict[str, Any] = {}
    # With --json, stdout holds this command's result: rank 0 prints it if it gets --json, else this process does.
    stdout_to_stderr = out.as_json and not flags.get("--json")
    while True:
        options = {"--resume": resume, "--overwrite": overwrite, **flags}
        arguments = [*command, *(flag for flag, is_set in options.items() if is_set)]
        out.note(_arithmetic(run))
        resume_command = f"surefit {run.verb} {shell_quote(run.run.path)} --resume"
        code = launch_processes(arguments, _processes(run), resume_command, adapted=adapted, aside=stdout_to_stderr)
        if code != EXIT_SHORT:
            return code
        rung = next_rung(run.resolved.config, run.hardware.kind)
        assert rung, "a process asks for less only where it knows what"
        out.note(f"adapting: {as_arguments(rung)}; all start again")
        run, adapted = dataclasses.replace(run, resolved=with_oom_changes(run.resolved, rung)), adapted | rung
        if not flags.get("--dry-run"):
            run.run.note("train", "adapted", changes=rung)
            resume, overwrite = True, False


def _arithmetic(run: CheckedRun) -> str:
    """Return, in words, the processes and the rows per step of each one, or of each group that reads the same rows."""
    config, steps = run.resolved.config, run.resolved.gradient_accumulation_steps
    count, ranks, size = count_processes(config), count_data_ranks(config), config.train.per_device_train_batch_size
    unit = "each" if ranks == count else f"each group of {count // ranks}"
    batches = f"{steps} micro batch{'es' * (steps > 1)} of {size}"
    rows = plural(config.train.global_batch_size, "row")
    return f"{count} processes, {config.parallel.mode}: {rows} a step, in {unit} {batches}"


def _require_own_launcher() -> None:
    """Raise unless SureFit launched these processes.

    If memory runs out in one process, all others are in the same step: only the launcher can restart them.

    Raises:
        ConfigError: torchrun, accelerate launch or srun launched them.
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
    """Train as one rank: rank 0 reads the config and decides, and broadcasts the result to all ranks."""
    from surefit.parallel.process_group import World, broadcast_from_rank0

    if adapt:
        _require_own_launcher()
    world = World.current()
    with _connect_processes(world, target, overrides):
        run_of_rank0 = _with_launcher_changes(load_checked_run(target, overrides), world) if world.is_first else None
        received: tuple[Any, ...] = broadcast_from_rank0(_to_broadcast(run_of_rank0) if run_of_rank0 else None, world)
        run = run_of_rank0 or _from_broadcast(*received)
        if not env.launched_here():
            out.note(_arithmetic(run))
        return training.train_and_show(
            out, run, resume=resume, overwrite=overwrite, dry_run=dry_run, adapt=adapt, world=world
        )


def _with_launcher_changes(run: CheckedRun, world: Any) -> CheckedRun:
    """Return the run with the launcher's out-of-memory changes.

    Raises:
        ConfigError: the config has another number of processes than were started.
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
    """Return the fields of a run to broadcast: all but the rows, which the other ranks read as tokens."""
    return run.loaded, run.run, run.model, run.hardware, run.resolved


def _from_broadcast(loaded: Any, directory: Any, model: Any, hardware: Any, resolved: Any) -> CheckedRun:
    from surefit import recipes

    nothing: Any = None
    recipe = recipes.get_recipe(resolved.config.recipe)
    return CheckedRun(loaded, directory, recipe, model, hardware, None, {}, resolved, nothing)
