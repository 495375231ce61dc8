"""The verb `train`: in this process, in child processes, or as one of several launched processes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surefit.cli.exits import verb
from surefit.cli.findings import show_findings_on_failure
from surefit.cli.options import Adapt, Gpus, Overrides, Overwrite, Resume, Target, repeat_option
from surefit.cli.render import Output
from surefit.core import env
from surefit.core.errors import EXIT_OK, ConfigError
from surefit.core.packaging import require_extra
from surefit.core.units import count_text, duration_text, plural

if TYPE_CHECKING:
    from surefit.parallel.process_group import World
    from surefit.stages.run_context import CheckedRun


@verb
def train(
    out: Output,
    config: Target,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Prepare everything, run no step, write nothing.")] = False,
    adapt: Adapt = False,
    gpus: Gpus = None,
) -> int:
    """Train the adapter (or the model), with checkpoints that survive a crash."""
    from surefit.cli.processes import launch_training, local_process_count, with_process_count
    from surefit.stages.run_context import load_checked_run

    require_extra("train")
    changes = with_process_count(config, overrides, gpus)
    if env.distributed_env()[1] > 1:
        return _train_as_rank(out, config, changes, resume=resume, overwrite=overwrite, dry_run=dry_run, adapt=adapt)
    run = load_checked_run(config, changes, resume=resume)
    if local_process_count(run) == 1:
        code = train_and_show(out, run, resume=resume, overwrite=overwrite, dry_run=dry_run, adapt=adapt)
        _say_next(out, run, config, changes, dry_run)
        return code
    flags = {"--dry-run": dry_run, "--adapt": adapt, "--json": out.as_json}
    code = launch_training(out, run, config, changes, flags, resume=resume, overwrite=overwrite)
    if code == EXIT_OK:
        _say_next(out, run, config, changes, dry_run)
    return code


def _say_next(out: Output, run: CheckedRun, config: Path, changes: Sequence[str], dry_run: bool) -> None:
    directory = run.run.path
    if dry_run:
        out.next_step(["train", config, *repeat_option("--set", changes)])
    else:
        has_adapter = run.resolved.config.train.method == "lora"
        out.next_step(["merge" if has_adapter else "evaluate", directory])


def train_and_show(out: Output, run: CheckedRun, *, world: World | None = None, **options: Any) -> int:
    """Check, then train; of several processes, only rank 0 prints.

    Args:
        options: of `surefit.stages.training.train_run`.
    """
    from surefit.stages.training import train_run

    start = out.started if out.with_result else time.monotonic()
    if world is None or world.is_first:
        for line in describe_run(run):
            out.note(line)
    with show_findings_on_failure(out):
        result = train_run(run, out, world=world, **options)
    if world is None or world.is_first:
        _say_how_it_ended(out, result, time.monotonic() - start)
        out.result(result)
    return EXIT_OK


def describe_run(run: CheckedRun) -> list[str]:
    """Return what will be trained, on what, in how many steps, and where it goes: known before anything heavy loads."""
    from surefit.facts.memory_formula import count_trainable_parameters

    config, model, hardware = run.resolved.config, run.model, run.hardware
    trainable = count_trainable_parameters(model, config.adapter, str(config.model.dtype))
    count = count_text(trainable.parameters) if trainable else "its"
    size = f" ({count_text(model.parameters)} parameters)" if model.parameters else ""
    method = f"LoRA r {config.lora.r} trains {count} of them" if config.adapter else "all weights are trained"
    processes = config.hardware.count if isinstance(config.hardware.count, int) else 1
    device = (
        f"{processes * config.hardware.nodes} × {hardware.name}"
        if processes * config.hardware.nodes > 1
        else hardware.name
    )
    stored = f" over {config.model.quantization}" if config.model.quantization != "none" else ""
    packing = "packed" if config.data.packing else "padded"
    return [
        f"{model.name}{size}: {method}, on {device} in {config.model.dtype}{stored}",
        f"{_steps_text(run)}; {packing}, attention {config.speed.attention}; writes {run.run.path}",
    ]


def _steps_text(run: CheckedRun) -> str:
    """Return rows × epochs = steps; the number of rows is estimated, since rows are held out by their hash."""
    from surefit.config.resolve import epoch_rows
    from surefit.config.schema import decided
    from surefit.stages.run_context import count_training_rows

    config, steps = run.resolved.config, run.resolved.total_steps
    epochs = decided(config.train.num_train_epochs)
    total = plural(steps, "optimizer step") if steps is not None else "steps"
    total += f" of {plural(decided(config.train.global_batch_size), 'row')}"
    if (prepared := run.gathered.prepared) is not None:
        kept, mixed, held_out = prepared.stats.kept, 0, prepared.held_out
    else:
        rows, mixed_rows = count_training_rows(config, run.rows, run.mixed)
        mixed, from_train = round(mixed_rows), epoch_rows(config, rows)
        if rows is None or from_train is None:
            return total
        kept, held_out = from_train + mixed, rows - from_train
    parts = [f"{mixed:,} of data.mix"] if mixed else []
    parts += [f"{held_out:,} held out"] if held_out else []
    counted = f"{'about ' if held_out else ''}{plural(kept, 'row')}" + (f" ({', '.join(parts)})" if parts else "")
    if config.train.max_steps is not None and steps == config.train.max_steps:
        return f"{counted}, {total} (max_steps)"
    return f"{counted} × {epochs:g} epoch{'' if epochs == 1 else 's'} = {total}"


def _say_how_it_ended(out: Output, result: dict[str, Any], seconds: float) -> None:
    """Print the result; `seconds` is the time of the whole command, of which the steps are a part."""
    if result["dry_run"]:
        out.say(f"Ready: {plural(result['total_steps'], 'optimizer step')}; nothing was written")
        return
    held_out, rejected, resumed = result["eval_loss"], result["rejected"], result["resumed_from"]
    if resumed == result["steps"]:
        out.say(f"All {plural(resumed, 'step')} were trained before: nothing was left to train → {result['output']}")
        return
    earlier = f", {resumed:,} of them before it was resumed" if resumed else ""
    in_steps = "" if resumed else f" ({duration_text(result['seconds'])} of it in optimizer steps)"
    out.say(
        f"Trained {plural(result['steps'], 'step')}{earlier} in {duration_text(seconds)}{in_steps}: "
        f"loss {result['loss']:.4f}"
        + (f", held-out loss {held_out:.4f}" if held_out is not None else "")
        + (f", {plural(rejected, 'step')} rejected" if rejected else "")
        + f" → {result['output']}"
    )
    if text := result.get("held_out_pairs_text") or result.get("held_out_labels_text"):
        out.paragraph(text)


# One of several processes


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
    from surefit.cli.processes import broadcast_run, connect_processes, describe_batches
    from surefit.parallel.process_group import World
    from surefit.stages.run_context import load_checked_run

    if adapt:
        _require_own_launcher()
    world = World.current()
    with connect_processes(world, target, overrides):
        run_of_rank0 = None
        if world.is_first:
            run_of_rank0 = _with_launcher_changes(load_checked_run(target, overrides, resume=resume), world)
        run = broadcast_run(run_of_rank0, world)
        if not env.launched_here():
            out.note(describe_batches(run))
        return train_and_show(out, run, resume=resume, overwrite=overwrite, dry_run=dry_run, adapt=adapt, world=world)


def _with_launcher_changes(run: CheckedRun, world: World) -> CheckedRun:
    """Return the run with the launcher's out-of-memory changes.

    Raises:
        ConfigError: the config has another number of processes than were started.
    """
    from surefit.config.oom_ladder import with_oom_changes

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
