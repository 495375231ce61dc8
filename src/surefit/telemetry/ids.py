"""Under which id each tracker knows a run: telemetry.json, so that a resumed run goes on in the same place."""

from __future__ import annotations

import threading

from surefit.core.rundir import RunDir, read_json, write_json

_LOCK = threading.Lock()
"""Sinks have threads of their own, and share the file."""


def read_tracker_run_id(run: RunDir, tracker: str) -> str | None:
    """The tracker's id of the run, if it has one."""
    with _LOCK:
        found = read_json(run.telemetry).get(tracker) if run.telemetry.exists() else None
        return found if isinstance(found, str) else None


def save_tracker_run_id(run: RunDir, tracker: str, name: str) -> None:
    """Note the tracker's id of the run."""
    with _LOCK:
        known = read_json(run.telemetry) if run.telemetry.exists() else {}
        write_json(run.telemetry, known | {tracker: name})
