"""`surefit runs show`, `diff` and `prune`: what run directories hold, read from their artefacts alone."""

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
"""SLURM's words for a job that may still write."""
SYNCED = ".synced"
"""What W&B puts behind the name of an offline run's file once it has been uploaded."""


def require_run(path: Path) -> RunDir:
    """Raises:
    ConfigError: no run is there.
    """
    run = RunDir(path)
    if not run.resolved.exists():
        raise ConfigError(
            "no run is here: there is no resolved.yaml", code="E1040", path=path, help="`surefit runs` lists the runs"
        )
    return run


def disk_size(path: Path) -> int:
    """Bytes of a file, or of all files below a directory; links count as nothing."""
    files = [path] if path.is_file() else path.rglob("*") if path.is_dir() else []
    return sum(file.lstat().st_size for file in files if file.is_file() and not file.is_symlink())


def show_run_command(out: Output, path: Path) -> int:
    """One run: its settings, stages, scores, disk use, and what of it can be continued."""
    from surefit.report.artefacts import read_artefacts
    from surefit.report.timeline import attempts

    run = require_run(path)
    (row,) = summarize_runs([run])
    found = read_artefacts(run)
    chosen = [
        (s.key, s.value, f"{'auto:' if s.origin == 'auto' and s.detail else s.origin} {s.detail}".strip())
        for s in found.settings or []
        if s.origin != "default"
    ]
    stages = attempts(found.events)
    resumable = describe_next_steps(run, row)
    parts = disk_usage(run)
    out.say(f"{run.path}: {row['recipe']} on {row['model']}, {row['state_text']}, {row['steps_text']} steps", "bold")
    out.table("Settings that are not defaults", ["setting", "value", "from"], chosen)
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
    for name, problem in found.problems.items():
        out.note(f"{name} is damaged: {problem}")
    out.result(
        row
        | {
            "settings": {key: value for key, value, _ in chosen},
            "stages": [{"stage": a.stage, "outcome": a.outcome, "seconds": a.seconds} for a in stages],
            "scores": scores, "disk": parts, "resumable": resumable, "problems": found.problems,
        }
    )  # fmt: skip
    return EXIT_OK


def _figure(score: dict[str, Any]) -> str:
    low, high = score["ci95"]
    return f"{score['mean']:.3f} [{low:.3f}, {high:.3f}]"


def read_primary_scores(run: RunDir) -> list[dict[str, Any]]:
    """The primary metric of every variant on every set; none where they are not there or damaged."""

    def read() -> list[dict[str, Any]]:
        summary = read_json(run.eval_summary)
        metric = summary["primary_metric"]
        return [
            {"set": name, "variant": variant, "metric": metric, **metrics[metric]}
            for name, scored in summary["sets"].items()
            for variant, metrics in scored["variants"].items()
            if metric in metrics
        ]

    found: list[dict[str, Any]] = _attempt(read, []) if run.eval_summary.exists() else []
    return found


def disk_usage(run: RunDir) -> dict[str, int]:
    """Part → bytes, the largest first."""
    parts = {entry.name: disk_size(entry) for entry in run.path.iterdir() if entry.is_dir()}
    parts["files"] = sum(disk_size(entry) for entry in run.path.iterdir() if entry.is_file())
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def describe_next_steps(run: RunDir, row: dict[str, Any]) -> list[str]:
    """In words, what can be gone on with, and how."""
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
    """The newest checkpoint whose files are whole, by their sizes."""
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
    """What two runs do not have in common: settings, data, environment, scores."""
    a, b = require_run(first), require_run(second)
    found = {
        "settings": _differing(_settings(a), _settings(b)),
        "data": _differing(training_data_facts(a), training_data_facts(b)),
        "environment": _differing(_environment(a), _environment(b)),
        "scores": _differing(_scores(a), _scores(b)),
    }
    for name, lines in found.items():
        rows = [[key, *(_format_setting(value) for value in values)] for key, values in lines.items()]
        if rows:
            out.table(f"{name.capitalize()}: {plural(len(rows), 'difference')}", ["", str(a.path), str(b.path)], rows)
        else:
            out.say(f"{name.capitalize()}: the same", "bold")
    if found["scores"]:
        out.say(f"Whether that is more than chance: surefit compare {shell_quote(a.path)} {shell_quote(b.path)}")
    out.result({"a": str(a.path), "b": str(b.path), **found})
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
    """What is known of the rows that were trained on: from a checkpoint, else from the audit."""
    newest = newest_checkpoint(run)
    same = _attempt(lambda: read_json(newest / "trainer.json")["identity"], {}) if newest else {}
    found = {name: same[f"data.train: {name}"] for name in ("rows", "content") if f"data.train: {name}" in same}
    if not found and run.passport.exists():
        passport = _attempt(lambda: read_json(run.passport), {})
        found = {name: passport[name] for name in ("rows", "sha256") if name in passport}
    return found


def _environment(run: RunDir) -> dict[str, Any]:
    found = _attempt(lambda: read_json(run.environment), {}) if run.environment.exists() else {}
    named = {key: found.get(key) for key in ("surefit", "python", "platform", "cpu_count", "threads") if key in found}
    gpus = [gpu.get("name") if isinstance(gpu, dict) else str(gpu) for gpu in found.get("gpus", [])]
    return named | {"gpus": ", ".join(map(str, gpus)) or "none"} | dict(found.get("packages", {}))


def _scores(run: RunDir) -> dict[str, Any]:
    return {f"{s['set']}, {s['variant']}: {s['metric']}": _figure(s) for s in read_primary_scores(run)}


@dataclass(frozen=True)
class DeletableItem:
    """Something that can be deleted, and why nobody will miss it."""

    path: Path
    bytes: int
    why: str


def find_deletable(run: RunDir) -> list[DeletableItem]:
    """What of a run nothing needs any more. Never adapter/, model/, merged/, export/ or eval/, and never a checkpoint
    that is the newest, or the best of anything that was measured."""
    found = [
        (path, "left half-written by a process that was killed")
        for place in (run.path, run.checkpoints, run.exports)
        for path in leftovers(place)
        if not _only_copy(path)
    ]
    found += _checkpoints(run)
    found += _wandb(run)
    return [DeletableItem(path, disk_size(path), why) for path, why in found]


def _only_copy(leftover: Path) -> bool:
    """Whether a process was killed between two renames: what it was replacing has no other name then."""
    name, _, kind = leftover.name.removeprefix(".").rpartition(".")
    return kind == "old" and not leftover.with_name(name.rpartition(".")[0]).exists()


def _checkpoints(run: RunDir) -> Iterator[tuple[Path, str]]:
    from surefit.checkpoint.manager import find_checkpoint_damage, list_steps

    steps = [(step, path, find_checkpoint_damage(path, hashes=True)) for step, path in list_steps(run.checkpoints)]
    complete = [step for step, _, fault in steps if fault is None]
    if not complete:
        return
    kept = {complete[-1], *_best_steps(run)}
    for step, path, fault in steps:
        if path.is_symlink():
            continue
        if fault is not None:
            yield path, f"damaged, and step-{complete[-1]} is complete: {fault}"
        elif step not in kept:
            yield path, f"neither the newest (step-{complete[-1]}) nor the best"


def _best_steps(run: RunDir) -> set[int]:
    """The best step of every metric that was measured while it trained, and all that `checkpoint.metric_for_best_model`
    keeps."""
    from surefit.checkpoint.best import eval_points, rank_checkpoints

    section = load_config(run.resolved).config.checkpoint
    lines = [line for line in read_jsonl(run.metrics) if "eval_loss" in line]
    kept = {path.name for path in run.checkpoints.glob("step-*")}
    found: set[int] = set()
    for metric in {key for line in lines for key in line} - {"step", "eval_tokens"}:
        there = [each for each in eval_points(lines, metric) if f"step-{each.step}" in kept]
        limit = section.best_total_limit if metric == section.metric_for_best_model else 1
        found |= {each.step for each in rank_checkpoints(there, metric)[:limit]}
    return found


def _wandb(run: RunDir) -> Iterator[tuple[Path, str]]:
    """W&B's local copies of what its server has; an offline run that was never uploaded is the only copy."""
    for path in sorted((run.path / TRACKERS["wandb"].leaves).glob("**/*run-*")):
        if not path.is_dir() or path.is_symlink():
            continue
        offline = path.name.startswith("offline-")
        if not offline or any(path.glob(f"*{SYNCED}")):
            yield path, "W&B's local copy of what was uploaded"


def prune_runs_command(out: Output, target: Path, delete: bool) -> int:
    """Say what could be deleted of a run, or of all runs below a directory; with `delete`, delete it."""
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
        except SureFitError as error:  # in use, or damaged: left alone, and the others looked at
            skipped[str(run.path)] = error.message
    _say_pruned(out, target, rows, skipped, delete)
    freed = sum(row["bytes"] for row in rows)
    out.result({"freed" if delete else "could_free": freed, "deleted": delete, "surplus": rows, "skipped": skipped})
    return EXIT_OK


@contextlib.contextmanager
def _lock_run(run: RunDir, out: Output, delete: bool) -> Iterator[None]:
    """Nobody else is at work in the run; looking alone leaves no lock file behind where there was none."""
    if not delete and not run.lock.exists():
        yield
        return
    from surefit.core.lock import hold_lock

    with hold_lock(run.lock, "runs prune", out.note):  # not `RunDir.locked`, which clears away what is listed here
        yield


def _prune_run(run: RunDir, delete: bool) -> list[dict[str, Any]]:
    rows = []
    for one in find_deletable(run):
        if delete:
            _delete(one.path)
        rows.append({"run": str(run.path), "path": str(one.path), "bytes": one.bytes, "why": one.why})
    return rows


def _delete(path: Path) -> None:
    """A directory loses its name first: a reader never sees half of it.

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
        shown = [[row["path"], bytes_text(row["bytes"]), row["why"]] for row in rows]
        out.table("Deleted" if delete else "Could be deleted", ["what", "size", "why"], shown)
    for path, why in skipped.items():
        out.note(f"{path} is left alone: {why}")
    if not rows:
        out.say(f"Nothing to prune in {target}")
    elif delete:
        out.say(f"Freed {freed}", "green")
    else:
        out.say(
            f"{freed} could be freed; nothing was deleted. To delete it: surefit runs prune {shell_quote(target)} --yes"
        )
