"""Verbs on one device or several: who starts whom, and what the processes of a run share. Torch-free.

`train` (and `run`) have as many processes as the config has devices. `evaluate` and `predict` have those that the
command line asks for: each loads a model of its own and answers a part of the rows.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.cli import stages, training
from surefit.cli.checking import checked
from surefit.cli.prepare import Prepared, config_file, prepare
from surefit.config.load import load_config
from surefit.core import env
from surefit.core.errors import EXIT_OK, ConfigError
from surefit.launch.local import launch

if TYPE_CHECKING:
    from surefit.cli.render import Output
    from surefit.parallel.mesh import World


def train(
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
    changes = _with_count(target, overrides, gpus)
    if env.process_place()[1] > 1:
        return _one_of_several(out, target, changes, resume=resume, overwrite=overwrite, dry_run=dry_run, adapt=adapt)
    run = prepare(target, changes)
    if _processes(run) == 1:
        return training.train(out, run, resume=resume, overwrite=overwrite, dry_run=dry_run, adapt=adapt)
    _refuse_adapting(adapt)
    flags = {"--resume": resume, "--overwrite": overwrite, "--dry-run": dry_run, "--json": out.as_json}
    return _launch(out, run, target, changes, [flag for flag, given in flags.items() if given])


def run(
    out: Output, target: Path, overrides: Sequence[str] | None, gpus: int | None, *, resume: bool, overwrite: bool
) -> int:
    """All stages; training alone is shared between processes."""
    changes = _with_count(target, overrides, gpus)
    prepared = prepare(target, changes)
    if _processes(prepared) == 1:
        return stages.run(out, prepared, resume=resume, overwrite=overwrite)

    def train_them(resume: bool, overwrite: bool) -> int:
        flags = [*(["--resume"] if resume else []), *(["--overwrite"] if overwrite else [])]
        return _launch(out, prepared, target, changes, flags)

    return stages.run(out, prepared, resume=resume, overwrite=overwrite, training=train_them)


def share_rows(
    out: Output,
    target: Path,
    overrides: Sequence[str],
    gpus: int | None,
    again: Sequence[str],
    work: Callable[[Prepared, World | None], int],
) -> int:
    """Answer rows in this process; in processes that this one starts; or, where it is one of several already, its part.

    Args:
        gpus: how many processes; one if not said, whatever the config has for training.
        again: the command line that each of them gets.
        work: what is done with the run.
    """
    if env.process_place()[1] > 1:
        return _part_of_rows(target, overrides, work)
    run = prepare(target, overrides)
    if gpus is None or gpus == 1:
        return work(run, None)
    _require_gpus(run, gpus)
    out.note(f"{gpus} processes, each with a model of its own")
    command = shlex.join(["surefit", *again, "--gpus", str(gpus)])
    return launch([*again, *(["--json"] if out.as_json else [])], gpus, command, "where it was,")


def _require_gpus(run: Prepared, gpus: int) -> None:
    hardware = run.hardware
    if hardware.kind == "cuda" and hardware.source == "detected" and hardware.gpu_count < gpus:
        raise ConfigError(
            f"--gpus is {gpus}, and this machine has {hardware.gpu_count}", help=f"--gpus {hardware.gpu_count}, or less"
        )


def _part_of_rows(target: Path, overrides: Sequence[str], work: Callable[[Prepared, World | None], int]) -> int:
    from surefit.parallel.mesh import World, from_first

    world = World.current()
    with _joined_to(world, target, overrides):
        own = prepare(target, overrides, training=False) if world.is_first else None
        told: tuple[Any, ...] = from_first(_told(own) if own else None, world)
        return work(own or _listening(*told), world)


def _joined_to(world: World, target: Path, overrides: Sequence[str]) -> AbstractContextManager[None]:
    """Connected to the other processes, on the device that the config says."""
    import torch

    from surefit.parallel.mesh import joined

    config = load_config(config_file(target), overrides).config
    on_gpu = torch.cuda.is_available() and config.hardware.gpu != "cpu"
    return joined(world, config.parallel.timeout_minutes, on_gpu)


def _with_count(target: Path, overrides: Sequence[str] | None, gpus: int | None) -> list[str]:
    """The overrides with that of `--gpus`. A run directory has the mode of its own number: another asks anew."""
    changes = list(overrides or ())
    if gpus is None:
        return changes
    mode = load_config(config_file(target), changes).config.parallel.mode
    stale = mode == "single" if gpus > 1 else mode in ("ddp", "fsdp")
    return [*changes, f"hardware.count={gpus}", *(["parallel.mode=auto"] if stale else [])]


def _processes(run: Prepared) -> int:
    """How many this run takes; all of them must be on this machine.

    Raises:
        ConfigError: they are not.
    """
    hardware = run.resolved.config.hardware
    assert isinstance(hardware.count, int)
    if hardware.nodes > 1:
        raise ConfigError(
            f"hardware.nodes is {hardware.nodes}, and this starts processes on one machine only",
            field="hardware.nodes",
            help="`surefit slurm` makes a job of it; srun and torchrun start `surefit train` on each machine",
        )
    return hardware.count


def _launch(out: Output, run: Prepared, target: Path, changes: Sequence[str], flags: Sequence[str]) -> int:
    """Check, then start the processes, each with the same command."""
    count = _processes(run)
    training.stop_at_errors(out, checked(run.gathered))
    out.note(f"{count} processes, {run.resolved.config.parallel.mode}")
    arguments = ["train", str(target), *(part for change in changes for part in ("--set", change)), *flags]
    return launch(arguments, count, f"surefit train {run.run.path} --resume")


def _refuse_adapting(adapt: bool) -> None:
    if adapt:
        raise ConfigError(
            "--adapt goes with one process only: where memory runs out in one of several, the others are ended",
            help="leave it out; if memory runs out, the error says which setting needs less, and --resume goes on",
        )


def _one_of_several(
    out: Output, target: Path, overrides: Sequence[str], *, resume: bool, overwrite: bool, dry_run: bool, adapt: bool
) -> int:
    """What the first process has found out and decided, all of them do."""
    from surefit.parallel.mesh import World, from_first

    _refuse_adapting(adapt)
    world = World.current()
    with _joined_to(world, target, overrides):
        own = _counted(prepare(target, overrides), world) if world.is_first else None
        told: tuple[Any, ...] = from_first(_told(own) if own else None, world)
        run = own or _listening(*told)
        return training.train(out, run, resume=resume, overwrite=overwrite, dry_run=dry_run, world=world) or EXIT_OK


def _counted(run: Prepared, world: Any) -> Prepared:
    hardware = run.resolved.config.hardware
    assert isinstance(hardware.count, int)
    if hardware.count * hardware.nodes != world.size:
        raise ConfigError(
            f"{world.size} processes were started, and hardware.count {hardware.count} × nodes {hardware.nodes} is "
            f"{hardware.count * hardware.nodes}",
            field="hardware.count",
            help="start as many processes as the config has devices, or leave hardware.count at auto",
        )
    return run


def _told(run: Prepared) -> tuple[Any, ...]:
    """All but the rows, which the others read as tokens."""
    return run.loaded, run.run, run.model, run.hardware, run.resolved


def _listening(loaded: Any, directory: Any, model: Any, hardware: Any, resolved: Any) -> Prepared:
    from surefit import recipes

    nothing: Any = None
    recipe = recipes.get(resolved.config.recipe)
    return Prepared(loaded, directory, recipe, model, hardware, None, {}, resolved, nothing)
