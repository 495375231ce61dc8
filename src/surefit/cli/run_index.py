"""`surefit runs show`, `diff` and `prune`: the contents of run directories, read from their artefacts alone."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.cli.runs import JOBS, _attempt, find_runs, summarize_runs
from surefit.config.load import load_config
from surefit.config.resolve import iter_config_values
from surefit.config.trackers import TRACKERS
from surefit.core.errors import EXIT_OK, ConfigError, SureFitError
from surefit.core.rundir import RunDir, leftovers, machine_errors, read_json, read_jsonl
from surefit.core.units import bytes_text, duration_text, plural, shell_quote

if TYPE_CHECKING:
    from surefit.cli.render import Output

ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED", "COMPLETING", "STOPPED")
"""SLURM's states of a job that may still write."""
SYNCED = ".synced"
"""Suffix that W&B appends to the name of an offline run's file once it has been uploaded."""


def require_run(path: Path) -> RunDir:
    """Return the run directory at `path`.

    Raises:
        ConfigError: no run is there.
    """
    run = RunDir(path)
    if not run.resolved.exists():
        raise ConfigError(
            "no run is here: there is no resolved.yaml", code="E1040", path=path, help="`surefit runs` lists the runs"
        )
    return run


def disk_size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a directory; links count as nothing."""
    files = [path] if path.is_file() else path.rglob("*") if path.is_dir() else []
    return sum(file.lstat().st_size for file in files if file.is_file() and not file.is_symlink())


def show_run_command(out: Output, path: Path) -> int:
    """Show one run: settings, stages, scores, disk use, and the stages that can be continued."""
    from surefit.report.artefacts import read_artefacts
    from surefit.report.timeline import attempts

    run = require_run(path)
    (row,) = summarize_runs([run])
    artefacts = read_artefacts(run)
    settings = [
        (s.key, s.value, f"{'auto:' if s.origin == 'auto' and s.detail else s.origin} {s.detail}".strip())
        for s in artefacts.settings or []
        if s.origin != "default"
    ]
    stages = attempts(artefacts.events)
    resumable = describe_next_steps(run, row)
    parts = disk_usage(run)
    out.say(f"{run.path}: {row['recipe']} on {row['model']}, {row['state_text']}, {row['steps_text']} steps", "bold")
    out.table("Settings that are not defaults", ["setting", "value", "from"], settings)
    times = [[a.stage, a.outcome, duration_text(a.seconds) if a.seconds is not None else "-", a.detail] for a in stages]
    out.table("Stages", ["stage", "ended", "time", ""], times)
    scores = read_primary_scores(run)
    out.table(
        "Scores, with 95 % intervals",
        ["set", "variant", "metric", "score"],
        [[s["set"], s["variant"], s["metric"], _figure(s)] for s in scores],
    )
    out.table("Disk", ["part", "size"], [[name, bytes_text(size)] for name, size in parts.items()])
    for line in resumable:
        out.say(line)
    for name, problem in artefacts.problems.items():
        out.note(f"{name} is damaged: {problem}")
    out.result(
        row
        | {
            "settings": {key: value for key, value, _ in settings},
            "stages": [{"stage": a.stage, "outcome": a.outcome, "seconds": a.seconds} for a in stages],
            "scores": scores, "disk": parts, "resumable": resumable, "problems": artefacts.problems,
        }
    )  # fmt: skip
    return EXIT_OK


def _figure(score: dict[str, Any]) -> str:
    low, high = score["ci95"]
    return f"{score['mean']:.3f} [{low:.3f}, {high:.3f}]"


def read_primary_scores(run: RunDir) -> list[dict[str, Any]]:
    """Return the primary metric of every variant on every set; empty if the scores are missing or damaged."""

    def read() -> list[dict[str, Any]]:
        summary = read_json(run.eval_summary)
        metric = summary["primary_metric"]
        return [
            {"set": name, "variant": variant, "metric": metric, **metrics[metric]}
            for name, scored in summary["sets"].items()
            for variant, metrics in scored["variants"].items()
            if metric in metrics
        ]

    scores: list[dict[str, Any]] = _attempt(read, []) if run.eval_summary.exists() else []
    return scores


def disk_usage(run: RunDir) -> dict[str, int]:
    """Return part → bytes, the largest first."""
    parts = {entry.name: disk_size(entry) for entry in run.path.iterdir() if entry.is_dir()}
    parts["files"] = sum(disk_size(entry) for entry in run.path.iterdir() if entry.is_file())
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def describe_next_steps(run: RunDir, row: dict[str, Any]) -> list[str]:
    """Return the commands that continue the run, in sentences."""
    lines = []
    newest = newest_checkpoint(run)
    trained = run.adapter.exists() or run.model.exists()
    if not trained and newest is not None:
        lines.append(f"Training can go on from {newest.name}: surefit train {shell_quote(run.path)} --resume")
    elif not trained:
        lines.append(
            f"Nothing is trained, and there is no checkpoint: surefit train {shell_quote(run.path)} --overwrite"
        )
    elif not run.certificate.exists():
        lines.append(f"Trained, not merged: surefit merge {shell_quote(run.path)}")
    if partial := sorted(run.eval.glob("*/*.partial.jsonl")):
        answers = sum(len(_attempt(lambda path=path: read_jsonl(path), [])) for path in partial)
        lines.append(
            f"{plural(answers, 'kept line')} of an evaluation that was cut off: "
            f"surefit evaluate {shell_quote(run.path)}"
        )
    elif trained and not run.eval_summary.exists():
        lines.append(f"Not scored: surefit evaluate {shell_quote(run.path)}")
    return lines or [f"Every stage is done: surefit report {shell_quote(run.path)}"]


def newest_checkpoint(run: RunDir) -> Path | None:
    """Return the newest checkpoint whose files are complete, judged by their sizes."""
    from surefit.checkpoint.manager import find_checkpoint_damage, list_steps

    return next(
        (
            path
            for _, path in reversed(list_steps(run.checkpoints))
            if find_checkpoint_damage(path, hashes=False) is None
        ),
        None,
    )


def diff_runs_command(out: Output, first: Path, second: Path) -> int:
    """Show the differences of two runs: settings, data, environment, scores."""
    a, b = require_run(first), require_run(second)
    differences = {
        "settings": _differing(_settings(a), _settings(b)),
        "data": _differing(training_data_facts(a), training_data_facts(b)),
        "environment": _differing(_environment(a), _environment(b)),
        "scores": _differing(_scores(a), _scores(b)),
    }
    for name, lines in differences.items():
        rows = [[key, *(_format_setting(value) for value in values)] for key, values in lines.items()]
        if rows:
            out.table(f"{name.capitalize()}: {plural(len(rows), 'difference')}", ["", str(a.path), str(b.path)], rows)
        else:
            out.say(f"{name.capitalize()}: the same", "bold")
    if differences["scores"]:
        out.say(f"Whether that is more than chance: surefit compare {shell_quote(a.path)} {shell_quote(b.path)}")
    out.result({"a": str(a.path), "b": str(b.path), **differences})
    return EXIT_OK


def _format_setting(value: Any) -> str:
    text = "-" if value is None else str(value)
    return f"{text[:12]}…" if len(text) == 64 and text.isalnum() else text


def _differing(a: dict[str, Any], b: dict[str, Any]) -> dict[str, list[Any]]:
    keys = list(dict.fromkeys([*a, *b]))
    return {key: [a.get(key), b.get(key)] for key in keys if a.get(key) != b.get(key)}


def _settings(run: RunDir) -> dict[str, Any]:
    return {key: value for key, value in iter_config_values(load_config(run.resolved).config) if key != "output_dir"}


def training_data_facts(run: RunDir) -> dict[str, Any]:
    """Return the recorded facts about the training rows: from a checkpoint, else from the audit."""
    newest = newest_checkpoint(run)
    identity = _attempt(lambda: read_json(newest / "trainer.json")["identity"], {}) if newest else {}
    facts = {name: identity[f"data.train: {name}"] for name in ("rows", "content") if f"data.train: {name}" in identity}
    if not facts and run.passport.exists():
        passport = _attempt(lambda: read_json(run.passport), {})
        facts = {name: passport[name] for name in ("rows", "sha256") if name in passport}
    return facts


def _environment(run: RunDir) -> dict[str, Any]:
    recorded = _attempt(lambda: read_json(run.environment), {}) if run.environment.exists() else {}
    host = {
        key: recorded.get(key) for key in ("surefit", "python", "platform", "cpu_count", "threads") if key in recorded
    }
    gpus = [gpu.get("name") if isinstance(gpu, dict) else str(gpu) for gpu in recorded.get("gpus", [])]
    return host | {"gpus": ", ".join(map(str, gpus)) or "none"} | dict(recorded.get("packages", {}))


def _scores(run: RunDir) -> dict[str, Any]:
    return {f"{s['set']}, {s['variant']}: {s['metric']}": _figure(s) for s in read_primary_scores(run)}


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
    from surefit.checkpoint.manager import find_checkpoint_damage, list_steps

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
    for path in sorted((run.path / TRACKERS["wandb"].leaves).glob("**/*run-*")):
        if not path.is_dir() or path.is_symlink():
            continue
        offline = path.name.startswith("offline-")
        if not offline or any(path.glob(f"*{SYNCED}")):
            yield path, "W&B's local copy of what was uploaded"


def prune_runs_command(out: Output, target: Path, delete: bool) -> int:
    """List what could be deleted of a run, or of all runs below a directory; with `delete`, delete it."""
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
            with _lock_run(run, out, delete):
                rows += _prune_run(run, delete)
        except SureFitError as error:  # in use, or damaged: skipped, and the other runs are checked
            skipped[str(run.path)] = error.message
    _say_pruned(out, target, rows, skipped, delete)
    freed = sum(row["bytes"] for row in rows)
    out.result({"freed" if delete else "could_free": freed, "deleted": delete, "surplus": rows, "skipped": skipped})
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
