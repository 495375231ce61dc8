"""Which process starts the others, and what the processes of a run share. Torch-free.

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

from surefit.cli.findings import show_findings_on_failure
from surefit.cli.render import Output
from surefit.config.load import load_config
from surefit.config.oom_ladder import as_arguments, next_rung, with_oom_changes
from surefit.config.schema import decided
from surefit.config.world import count_data_ranks, count_processes
from surefit.core import env
from surefit.core.errors import EXIT_SHORT, ConfigError
from surefit.core.units import plural, shell_quote
from surefit.launch.local import launch_processes
from surefit.stages.checking import require_no_errors, run_check
from surefit.stages.run_context import CheckedRun, find_config_file, load_checked_run

if TYPE_CHECKING:
    from surefit.parallel.process_group import World


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
    from surefit.parallel.process_group import World

    world = World.current()
    with connect_processes(world, target, overrides):
        run_of_rank0 = load_checked_run(target, overrides, training=False) if world.is_first else None
        return work(broadcast_run(run_of_rank0, world), world)


def connect_processes(world: World, target: Path, overrides: Sequence[str]) -> AbstractContextManager[None]:
    """Return a context in which the process group is initialized, on the config's device."""
    import torch

    from surefit.parallel.process_group import process_group

    config = load_config(find_config_file(target), overrides).config
    on_gpu = torch.cuda.is_available() and config.hardware.gpu != "cpu"
    return process_group(world, config.parallel.timeout_minutes, on_gpu)


def with_process_count(target: Path, overrides: Sequence[str] | None, gpus: int | None) -> list[str]:
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


def local_process_count(run: CheckedRun) -> int:
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


def launch_training(
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
    with show_findings_on_failure(out):
        require_no_errors(run_check(run.gathered))
    run.gathered.sources.close()  # the processes read their own
    command = ["train", str(target), *(part for change in changes for part in ("--set", change))]
    adapted: dict[str, Any] = {}
    # With --json, stdout holds this command's result: rank 0 prints it if it gets --json, else this process does.
    stdout_to_stderr = out.as_json and not flags.get("--json")
    while True:
        options = {"--resume": resume, "--overwrite": overwrite, **flags}
        arguments = [*command, *(flag for flag, is_set in options.items() if is_set)]
        out.note(describe_batches(run))
        resume_command = f"surefit {run.verb} {shell_quote(run.run.path)} --resume"
        code = launch_processes(
            arguments, local_process_count(run), resume_command, adapted=adapted, aside=stdout_to_stderr
        )
        if code != EXIT_SHORT:
            return code
        rung = next_rung(run.resolved.config, run.hardware.kind)
        assert rung, "a process ends with EXIT_SHORT only if there is a next rung"
        out.note(f"adapting: {as_arguments(rung)}; all start again")
        run, adapted = dataclasses.replace(run, resolved=with_oom_changes(run.resolved, rung)), adapted | rung
        if not flags.get("--dry-run"):
            run.run.note("train", "adapted", changes=rung)
            resume, overwrite = True, False


def describe_batches(run: CheckedRun) -> str:
    """Return, in words, the processes and the rows per step of each one, or of each group that reads the same rows."""
    config, steps = run.resolved.config, run.resolved.gradient_accumulation_steps
    count, ranks, size = count_processes(config), count_data_ranks(config), config.train.per_device_train_batch_size
    unit = "each" if ranks == count else f"each group of {count // ranks}"
    batches = f"{steps} micro batch{'es' * (steps > 1)} of {size}"
    rows = plural(decided(config.train.global_batch_size), "row")
    return f"{count} processes, {config.parallel.mode}: {rows} a step, in {unit} {batches}"


def broadcast_run(run_of_rank0: CheckedRun | None, world: World) -> CheckedRun:
    """Return rank 0's run on every rank: without the rows, which the other ranks read as tokens."""
    from surefit import recipes
    from surefit.data.rows.columns import recipe_for
    from surefit.parallel.process_group import broadcast_from_rank0

    run = run_of_rank0
    fields = (run.loaded, run.run, run.model, run.hardware, run.resolved) if run else None
    loaded, directory, model, hardware, resolved = broadcast_from_rank0(fields, world)
    nothing: Any = None
    recipe = recipe_for(recipes.get_recipe(resolved.config.recipe), resolved.config)
    return run or CheckedRun(loaded, directory, recipe, model, hardware, None, {}, resolved, nothing)
