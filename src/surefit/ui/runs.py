"""The runs of the workspace: the list, one run in progress, and its report. Everything here only reads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from surefit.core.env import redact
from surefit.core.lock import lock_holder
from surefit.core.rundir import RunDir
from surefit.core.units import bytes_text
from surefit.report.artefacts import read_artefacts
from surefit.report.scores import set_scores
from surefit.report.timeline import EVENTS, attempts
from surefit.report.verdict import measure_effects
from surefit.stages.events import is_trained, latest_event
from surefit.ui.job_runner import file_tail
from surefit.ui.pages import UiContext
from surefit.ui.security import REPORT_POLICY
from surefit.ui.workspace import is_run

CHUNK = 1 << 20
"""Bytes of metrics.jsonl in one answer; a page that has not read all of it asks again at once."""
FOLLOWED = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_bytes", "disk_free_bytes")
CHARTS = {
    "loss": ("Loss", ("loss", "eval_loss")),
    "learning_rate": ("Learning rate", ("learning_rate",)),
    "grad_norm": ("Gradient norm", ("grad_norm",)),
    "tokens_per_second": ("Tokens per second", ("tokens_per_second",)),
    "memory_bytes": ("Memory (GiB)", ("memory_bytes",)),
    "disk_free_bytes": ("Free disk space (GiB)", ("disk_free_bytes",)),
}
"""Name → (title, the series in it)."""


def runs_page(ui: UiContext, request: Request) -> Response:
    """Show the list of runs."""
    rows = [
        row | {"name": ui.workspace.name(Path(row["run"])), "holder": lock_holder(RunDir(Path(row["run"])).lock)}
        for row in ui.stages.runs(ui.workspace.root)
    ]
    return ui.page("runs", runs=[row for row in rows if ui.workspace.shows(Path(row["run"]))])


def run_page(ui: UiContext, request: Request) -> Response:
    """Show one run: live charts, its stages, scores, settings."""
    run = _run(ui, request)
    artefacts = read_artefacts(run)
    sets = set_scores(artefacts)
    return ui.page(
        "run",
        name=ui.workspace.name(run.path),
        charts=CHARTS,
        attempts=list(reversed(attempts(artefacts.events))),
        effects=measure_effects(sets),
        sets=sets,
        settings=[setting for setting in artefacts.settings or [] if setting.origin != "default"],
        problems=artefacts.problems,
        has_report=run.report.is_file(),
        framed="report" in request.query_params,
        chats=is_trained(run),
    )


def report_page(ui: UiContext, request: Request) -> Response:
    """Serve report.html, in an origin of its own."""
    run = _run(ui, request)
    headers = {"Content-Security-Policy": REPORT_POLICY}
    return FileResponse(ui.workspace.file_of(run, run.report), media_type="text/html", headers=headers)


def poll_run(ui: UiContext, request: Request) -> Response:
    """Return the events since the last answer: `?from=` is the `next` of that answer."""
    run = _run(ui, request)
    lines, next_position, restart, more = _lines_since(run.metrics, request.query_params.get("from", ""))
    events = _turning_points(run)
    event, job = latest_event(events), ui.jobs.last()
    job = job if job and job.run == ui.workspace.name(run.path) else None
    holder = job.command if job and job.running else lock_holder(run.lock)
    is_complete = event is not None and (event["stage"], event["event"]) == ("report", "finished")
    return JSONResponse(
        {
            "lines": [{key: line.get(key) for key in ("step", *FOLLOWED)} for line in lines],
            "next": next_position,
            "anew": restart,
            "more": more,
            "event": event,
            "disk": bytes_text(_size(run.path)),
            "free": bytes_text(shutil.disk_usage(ui.workspace.root if not run.path.exists() else run.path).free),
            "holder": holder,
            "job": {"command": job.command, "state": job.state_text, "running": job.running} if job else None,
            "resumable": not holder and not is_complete and run.resolved.exists(),
            "log": ui.jobs.output_tail() if job else file_tail(run.log),
        }
    )


def _run(ui: UiContext, request: Request) -> RunDir:
    path = request.query_params.get("path")
    if path is None:
        raise HTTPException(404, "Which run?")
    job = ui.jobs.last()
    if job and job.run == path:
        run = RunDir(ui.workspace.path(path))
        if not is_run(run.path) and ui.workspace.shows(run.path):  # it is being checked, or failed the check
            return run
    return ui.workspace.run(path)


def _lines_since(path: Path, place: str) -> tuple[list[dict[str, Any]], str, bool, bool]:
    """Return (complete lines, position to continue from, whether the page must start over, whether there is more).

    A resumed run writes the file anew, so a position is the file's inode number and a byte offset in it.
    """
    if not path.is_file():
        return [], "", bool(place), False
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        inode, _, position = place.partition(":")
        is_same_file = inode == str(status.st_ino) and position.isdecimal() and int(position) <= status.st_size
        start = int(position) if is_same_file else 0
        file.seek(start)
        data = file.read(CHUNK)
    complete = data[: data.rfind(b"\n") + 1]
    lines = [record for line in complete.splitlines() if (record := _record(line)) is not None]
    end = start + len(complete)
    return lines, f"{status.st_ino}:{end}", not is_same_file, end < status.st_size and bool(complete)


def _record(line: bytes) -> dict[str, Any] | None:
    """Return a line of a log; None for a damaged one, which the report names."""
    try:
        record = json.loads(line, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step", 0), int) else None


def _turning_points(run: RunDir) -> list[dict[str, str]]:
    """Return the events that began or ended a stage, in order."""
    try:
        lines = run.events.read_bytes().splitlines()
    except OSError:
        return []
    records = [record for line in lines if (record := _record(line)) is not None]
    return [
        {"stage": redact(str(event.get("stage", ""))), "event": event["event"]} for event in records if _turns(event)
    ]


def _turns(record: dict[str, Any]) -> bool:
    """Return whether an event begins or ends a stage; others are notes."""
    return record.get("event") in EVENTS


def _size(directory: Path) -> int:
    """Return the bytes of all files, without following links; a file deleted while counting counts as nothing."""
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total
