"""Each tracker's id of a run: telemetry.json, so that a resumed run continues in the same place."""

from __future__ import annotations

import threading

from surefit.core.rundir import RunDir, read_json, write_json

_LOCK = threading.Lock()
"""Sinks have threads of their own, and share the file."""


def read_tracker_run_id(run: RunDir, tracker: str) -> str | None:
    """Return the tracker's id of the run, or None."""
    with _LOCK:
        run_id = read_json(run.telemetry).get(tracker) if run.telemetry.exists() else None
        return run_id if isinstance(run_id, str) else None


def save_tracker_run_id(run: RunDir, tracker: str, name: str) -> None:
    """Save the tracker's id of the run."""
    with _LOCK:
        run_ids = read_json(run.telemetry) if run.telemetry.exists() else {}
        write_json(run.telemetry, run_ids | {tracker: name})
