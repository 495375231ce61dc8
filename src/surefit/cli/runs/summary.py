"""Rows of `runs list`: facts about run directories, read from their artefacts alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefit.core.errors import SureFitError
from surefit.core.rundir import RunDir, disk_size, read_json, read_jsonl
from surefit.core.units import bytes_text, duration_text
from surefit.evaluate.answers import base_variant

JOBS = {"train": "job", "merge": "merge_job", "evaluate": "evaluate_job"}
"""The stages that may be SLURM jobs → the key of that job in a row."""
DEPTH = 3
"""Maximum depth below the named directory at which runs are looked for."""


def find_runs(directory: Path) -> list[RunDir]:
    """Return the run directories at or below `directory`, the most recently changed first."""
    if not directory.is_dir():
        return []
    patterns = ["*/" * depth + name for depth in range(DEPTH + 1) for name in ("resolved.yaml", "slurm.json")]
    directories = {path.parent for pattern in patterns for path in directory.glob(pattern)}
    return [RunDir(path) for path in sorted(directories, key=lambda path: -_modification_time(RunDir(path)))]


def summarize_runs(runs: Sequence[RunDir]) -> list[dict[str, Any]]:
    """Return a row for each run.

    SLURM is queried once about the jobs of all runs: the stages' jobs, and the arrays that score checkpoints.
    """
    from surefit.launch.slurm import task_states

    numbers = {
        record: number
        for record in (record for run in runs for record in (*map(run.stage_job, JOBS), run.eval_array))
        if (number := read_or_default(lambda record=record: str(read_json(record)["job_id"]), None))
    }
    states = task_states(numbers.values())

    def job_of(record: Path) -> tuple[str, dict[str, int]] | None:
        return (number, dict(states.get(number, {}))) if (number := numbers.get(record)) else None

    rows = []
    for run in runs:
        stages, scoring = {stage: job_of(run.stage_job(stage)) for stage in JOBS}, job_of(run.eval_array)
        stage_texts = [f"{stage} {_job_text(*job)}" for stage, job in stages.items() if job and stage != "train"]
        stage_texts = [_job_text(*job) for job in (stages["train"],) if job] + stage_texts
        rows.append(
            summarize_run(run)
            | {
                field: {"job_id": job[0], "state": next(iter(job[1]), None)} if (job := stages[stage]) else None
                for stage, field in JOBS.items()
            }
            | {
                "eval_job": {"job_id": scoring[0], "states": scoring[1]} if scoring else None,
                "job_text": "; ".join([*stage_texts, *([_job_text(*scoring)] if scoring else [])]) or "-",
            }
        )
    return rows


def _job_text(number: str, states: Mapping[str, int]) -> str:
    """Return `12 RUNNING`, or of an array `12 RUNNING × 2, PENDING × 3`."""
    is_array = sum(states.values()) > 1
    text = ", ".join(f"{state} × {count}" if is_array else state for state, count in states.items())
    return f"{number} {text or 'not known to SLURM'}"


def summarize_run(run: RunDir) -> dict[str, Any]:
    """Return one row: state, steps, score, size. A damaged artefact is shown as unreadable and hides nothing else."""
    from surefit.config.load import load_config
    from surefit.stages.events import latest_event

    events = read_or_default(lambda: read_jsonl(run.events), [])
    state: Any = read_or_default(lambda: latest_event(events) or {}, None)
    steps = read_or_default(lambda: [line["step"] for line in read_jsonl(run.metrics) if "loss" in line], [])
    config = read_or_default(lambda: load_config(run.resolved).config, None) if run.resolved.exists() else None
    placeholder = "unreadable" if run.resolved.exists() else "-"
    size = sum(disk_usage(run).values())
    total = read_or_default(lambda: read_json(run.plan)["steps"]["total_steps"], None)
    score = _score(run)
    changed = _modification_time(run)
    done_steps = max(steps, default=0)
    return {
        "run": str(run.path),
        "recipe": config.recipe if config else placeholder,
        "model": config.model.name_or_path if config else placeholder,
        "state": state or None,
        "state_text": _state_text(state),
        "steps": done_steps,
        "steps_text": f"{done_steps}/{total}" if total else str(done_steps),
        "score": score,
        "score_text": f"{score['base']:.3f} → {score['tuned']:.3f} {score['metric']}" if score else "-",
        "bytes": size,
        "size_text": bytes_text(size),
        "changed": changed,
        "changed_text": f"{duration_text(max(0.0, time.time() - changed))} ago",
    }


def _state_text(state: Mapping[str, Any] | None) -> str:
    """Return the last event in words: {} means that no event counts, and None that the log cannot be read."""
    if state is None:
        return "unreadable"
    return f"{state['stage']} {state['event']}" if state else "not started"


def _score(run: RunDir) -> dict[str, Any] | None:
    """Return the scores of base and best tuned variant on the held-out rows, or None without them."""
    from surefit.report.scores import find_tuned_variant

    if not run.eval_summary.exists():
        return None
    try:
        summary = read_json(run.eval_summary)
        metric, variants = summary["primary_metric"], summary["sets"]["eval"]["variants"]
        tuned = find_tuned_variant(variants)
        if tuned is None:
            return None
        base = variants[base_variant(tuned)][metric]["mean"]
        return {"metric": metric, "base": base, "tuned": variants[tuned][metric]["mean"]}
    except (SureFitError, KeyError, TypeError):
        return None


def _modification_time(run: RunDir) -> float:
    times = [0.0]
    for path in (run.events, run.metrics, run.report, run.resolved, run.slurm):
        with contextlib.suppress(OSError):  # a file may not exist yet, or no longer
            times.append(path.stat().st_mtime)
    return max(times)


def disk_usage(run: RunDir) -> dict[str, int]:
    """Return part of the run → bytes (`disk_size`), the largest first; a directory that is a link counts."""
    entries = list(run.path.glob("*"))
    parts = {entry.name: disk_size(entry) for entry in entries if entry.is_dir()}
    parts["files"] = sum(disk_size(entry) for entry in entries if not entry.is_dir())
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def read_or_default(read: Any, default: Any) -> Any:
    """Return what `read` returns, or the default if the artefact that it reads is damaged."""
    try:
        return read()
    except (SureFitError, KeyError, TypeError):
        return default
