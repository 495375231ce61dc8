"""The verb `runs prune`: delete what runs no longer need."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from surefit.cli.exits import verb
from surefit.cli.render import Output
from surefit.cli.runs.summary import JOBS, find_runs, summarize_runs
from surefit.core.errors import EXIT_OK, ConfigError, SureFitError
from surefit.core.rundir import RunDir, disk_size, leftovers, machine_errors, read_jsonl
from surefit.core.units import bytes_text, shell_quote

ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED", "COMPLETING", "STOPPED")
"""SLURM's states of a job that may still write."""
SYNCED = ".synced"
"""Suffix that W&B appends to the name of an offline run's file once it has been uploaded."""


@verb
def prune(
    out: Output,
    target: Annotated[Path, typer.Argument(metavar="RUN|DIR", help="A run, or where to look for runs.")] = Path("runs"),
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it, only say what could be deleted.")] = False,
) -> int:
    """Free disk space: checkpoints that are neither the newest nor the best, leftovers, W&B's copies."""
    if not target.is_dir():
        raise ConfigError("there is no such directory", code="E1041", path=target, help="`surefit runs` lists the runs")
    runs = [RunDir(target)] if RunDir(target).resolved.exists() else find_runs(target)
    jobs = {
        row["run"]: [(row[job] or {}).get("state") for job in JOBS.values()]
        + [*(row["eval_job"] or {}).get("states", {})]
        for row in summarize_runs(runs)
    }
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for run in runs:
        if state := next((state for state in jobs[str(run.path)] if state in ALIVE), None):
            skipped[str(run.path)] = f"its SLURM job is {state}"
            continue
        try:
            with _lock_run(run, out, yes):
                rows += _prune_run(run, yes)
        except SureFitError as error:  # in use, or damaged: skipped, and the other runs are checked
            skipped[str(run.path)] = error.message
    _say_pruned(out, target, rows, skipped, yes)
    freed = sum(row["bytes"] for row in rows)
    out.result({"freed" if yes else "could_free": freed, "deleted": yes, "surplus": rows, "skipped": skipped})
    return EXIT_OK


@contextlib.contextmanager
def _lock_run(run: RunDir, out: Output, delete: bool) -> Iterator[None]:
    """Hold the run's lock. Without `delete`, leave no lock file behind if there was none."""
    if not delete and not run.lock.exists():
        yield
        return
    from surefit.core.lock import hold_lock

    with hold_lock(run.lock, "runs prune", out.note):  # not `RunDir.locked`, which deletes the leftovers listed here
        yield


def _prune_run(run: RunDir, delete: bool) -> list[dict[str, Any]]:
    rows = []
    for item in find_deletable(run):
        if delete:
            _delete(item.path)
        rows.append({"run": str(run.path), "path": str(item.path), "bytes": item.bytes, "why": item.why})
    return rows


def _delete(path: Path) -> None:
    """Delete a file or directory. A directory is renamed first, so that readers never see half of it.

    Raises:
        MachineError: it may not be deleted.
    """
    with machine_errors(path):
        if path.is_dir() and not path.name.startswith("."):
            hidden = path.with_name(f".{path.name}.0.tmp")
            path.rename(hidden)
            path = hidden
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _say_pruned(
    out: Output, target: Path, rows: Sequence[dict[str, Any]], skipped: dict[str, str], delete: bool
) -> None:
    freed = bytes_text(sum(row["bytes"] for row in rows))
    if rows:
        table_rows = [[row["path"], bytes_text(row["bytes"]), row["why"]] for row in rows]
        out.table("Deleted" if delete else "Could be deleted", ["what", "size", "why"], table_rows)
    for path, reason in skipped.items():
        out.note(f"{path} is left alone: {reason}")
    if not rows:
        out.say(f"Nothing to prune in {target}")
    elif delete:
        out.say(f"Freed {freed}", "green")
    else:
        out.say(
            f"{freed} could be freed; nothing was deleted. To delete it: surefit runs prune {shell_quote(target)} --yes"
        )


@dataclass(frozen=True)
class DeletableItem:
    """A file or directory that can be deleted, and the reason that it is not needed."""

    path: Path
    bytes: int
    why: str


def find_deletable(run: RunDir) -> list[DeletableItem]:
    """Return the parts of a run that are no longer needed.

    Never adapter/, model/, merged/, export/ or eval/, and never a checkpoint that is the newest, or the best by any
    metric that was measured.
    """
    deletable = [
        (path, "left half-written by a process that was killed")
        for directory in (run.path, run.checkpoints, run.exports)
        for path in leftovers(directory)
        if not _only_copy(path)
    ]
    deletable += _checkpoints(run)
    deletable += _wandb(run)
    return [DeletableItem(path, disk_size(path), reason) for path, reason in deletable]


def _only_copy(leftover: Path) -> bool:
    """Return whether a process was killed between two renames: the replaced file then has no other name."""
    name, _, kind = leftover.name.removeprefix(".").rpartition(".")
    return kind == "old" and not leftover.with_name(name.rpartition(".")[0]).exists()


def _checkpoints(run: RunDir) -> Iterator[tuple[Path, str]]:
    from surefit.checkpoint.files import find_checkpoint_damage, list_steps

    steps = [(step, path, find_checkpoint_damage(path, hashes=True)) for step, path in list_steps(run.checkpoints)]
    complete_steps = [step for step, _, fault in steps if fault is None]
    if not complete_steps:
        return
    kept_steps = {complete_steps[-1], *_best_steps(run)}
    for step, path, fault in steps:
        if path.is_symlink():
            continue
        if fault is not None:
            yield path, f"damaged, and step-{complete_steps[-1]} is complete: {fault}"
        elif step not in kept_steps:
            yield path, f"neither the newest (step-{complete_steps[-1]}) nor the best"


def _best_steps(run: RunDir) -> set[int]:
    """Return the best step of every metric measured in training, and all steps that `checkpoint.metric_for_best_model`
    keeps."""
    from surefit.checkpoint.best import eval_points, rank_checkpoints
    from surefit.config.load import load_config

    section = load_config(run.resolved).config.checkpoint
    lines = [line for line in read_jsonl(run.metrics) if "eval_loss" in line]
    existing = {path.name for path in run.checkpoints.glob("step-*")}
    steps: set[int] = set()
    for metric in {key for line in lines for key in line} - {"step", "eval_tokens"}:
        points = [point for point in eval_points(lines, metric) if f"step-{point.step}" in existing]
        limit = section.best_total_limit if metric == section.metric_for_best_model else 1
        steps |= {point.step for point in rank_checkpoints(points, metric)[:limit]}
    return steps


def _wandb(run: RunDir) -> Iterator[tuple[Path, str]]:
    """Yield W&B's local copies of uploaded runs; an offline run that was never uploaded is the only copy."""
    from surefit.config.trackers import TRACKERS

    for path in sorted((run.path / TRACKERS["wandb"].leaves).glob("**/*run-*")):
        if not path.is_dir() or path.is_symlink():
            continue
        offline = path.name.startswith("offline-")
        if not offline or any(path.glob(f"*{SYNCED}")):
            yield path, "W&B's local copy of what was uploaded"
