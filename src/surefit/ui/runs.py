"""The runs of the workspace: the list, one run as it goes on, and its report. Everything here only reads."""

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
from surefit.core.rundir import RunDir
from surefit.core.units import bytes_text
from surefit.report.artefacts import read_artefacts
from surefit.report.scores import set_scores
from surefit.report.timeline import EVENTS, attempts
from surefit.report.verdict import measure_effects
from surefit.stages.events import latest_event
from surefit.ui.pages import UiContext
from surefit.ui.security import REPORT_POLICY

CHUNK = 1 << 20
"""Bytes of metrics.jsonl in one answer; a page that has not read it all asks again at once."""
FOLLOWED = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_bytes", "disk_free_bytes")
CHARTS = {
    "loss": ("Loss", ("loss", "eval_loss")),
    "learning_rate": ("Learning rate", ("learning_rate",)),
    "grad_norm": ("Gradient norm", ("grad_norm",)),
    "tokens_per_second": ("Tokens per second", ("tokens_per_second",)),
    "memory_bytes": ("Memory (GiB)", ("memory_bytes",)),
    "disk_free_bytes": ("Free on the disk (GiB)", ("disk_free_bytes",)),
}
"""Name → (title, the series in it)."""


def runs_page(ui: UiContext, request: Request) -> Response:
    """The list."""
    rows = [row | {"name": ui.workspace.name(Path(row["run"]))} for row in ui.stages.runs(ui.workspace.root)]
    return ui.page("runs", runs=[row for row in rows if ui.workspace.shows(Path(row["run"]))])


def run_page(ui: UiContext, request: Request) -> Response:
    """One run: charts that follow it, its stages, scores, settings."""
    run = _run(ui, request)
    found = read_artefacts(run)
    sets = set_scores(found)
    return ui.page(
        "run",
        name=ui.workspace.name(run.path),
        charts=CHARTS,
        attempts=list(reversed(attempts(found.events))),
        effects=measure_effects(sets),
        sets=sets,
        settings=[setting for setting in found.settings or [] if setting.origin != "default"],
        problems=found.problems,
        has_report=run.report.is_file(),
        framed="report" in request.query_params,
    )


def report_page(ui: UiContext, request: Request) -> Response:
    """report.html, in an origin of its own."""
    run = _run(ui, request)
    headers = {"Content-Security-Policy": REPORT_POLICY}
    return FileResponse(ui.workspace.file_of(run, run.report), media_type="text/html", headers=headers)


def poll_run(ui: UiContext, request: Request) -> Response:
    """What happened since the last answer: `?from=` is the `next` of that one."""
    run = _run(ui, request)
    lines, following, anew, more = _lines_since(run.metrics, request.query_params.get("from", ""))
    events = _turning_points(run)
    return JSONResponse(
        {
            "lines": [{key: line.get(key) for key in ("step", *FOLLOWED)} for line in lines],
            "next": following,
            "anew": anew,
            "more": more,
            "event": latest_event(events),
            "disk": bytes_text(_size(run.path)),
            "free": bytes_text(shutil.disk_usage(run.path).free),
        }
    )


def _run(ui: UiContext, request: Request) -> RunDir:
    path = request.query_params.get("path")
    if path is None:
        raise HTTPException(404, "Which run?")
    return ui.workspace.run(path)


def _lines_since(path: Path, place: str) -> tuple[list[dict[str, Any]], str, bool, bool]:
    """(whole lines, where to go on, whether the page must begin anew, whether there is more).

    A resumed run writes the file anew, so a place is the file's number and a position in it.
    """
    if not path.is_file():
        return [], "", bool(place), False
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        number, _, position = place.partition(":")
        same = number == str(status.st_ino) and position.isdecimal() and int(position) <= status.st_size
        start = int(position) if same else 0
        file.seek(start)
        data = file.read(CHUNK)
    whole = data[: data.rfind(b"\n") + 1]
    lines = [record for line in whole.splitlines() if (record := _record(line)) is not None]
    end = start + len(whole)
    return lines, f"{status.st_ino}:{end}", not same, end < status.st_size and bool(whole)


def _record(line: bytes) -> dict[str, Any] | None:
    """A line of a log; None for a damaged one, which the report names."""
    try:
        record = json.loads(line, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step", 0), int) else None


def _turning_points(run: RunDir) -> list[dict[str, str]]:
    """When a stage began or ended, the last one last."""
    try:
        lines = run.events.read_bytes().splitlines()
    except OSError:
        return []
    records = [record for line in lines if (record := _record(line)) is not None]
    return [{"stage": redact(str(one.get("stage", ""))), "event": one["event"]} for one in records if _turns(one)]


def _turns(record: dict[str, Any]) -> bool:
    """Whether an event begins or ends a stage; others are notes beside it."""
    return record.get("event") in EVENTS


def _size(directory: Path) -> int:
    """Bytes of all files, links not followed; one that goes while it is counted counts nothing."""
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total
