"""Records of the stages in a run directory's events.jsonl, and conclusions from them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefit.core.env import redact
from surefit.core.errors import EXIT_INTERRUPTED, EXIT_USAGE, ConfigError, DataError, SureFitError
from surefit.core.rundir import RunDir
from surefit.core.units import shell_quote
from surefit.stages.progress_listener import ProgressListener


@contextlib.contextmanager
def record_stage(run: RunDir, stage: str) -> Iterator[None]:
    """Record in events.jsonl when a stage started and how it ended.

    A later stage with an unusable request, such as columns that are not in the rows, has not changed the run: that is
    "invalid", and the run's state is what it was before (`latest_event`).
    """
    start = time.monotonic()
    run.create()
    run.note(stage, "started")
    try:
        yield
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt) or getattr(error, "exit_code", None) == EXIT_INTERRUPTED
        message = redact(error.message) if isinstance(error, SureFitError) else type(error).__name__
        with contextlib.suppress(SureFitError):  # a full disk must not hide the error that filled it
            outcome = "interrupted" if interrupted else "invalid" if _unusable(stage, error) else "failed"
            run.note(stage, outcome, seconds=time.monotonic() - start, error=message)
        raise
    run.note(stage, "finished", seconds=time.monotonic() - start)


def _unusable(stage: str, error: BaseException) -> bool:
    return stage != "train" and isinstance(error, ConfigError | DataError) and error.exit_code == EXIT_USAGE


def latest_event(events: Sequence[Mapping[str, Any]], stage: str | None = None) -> dict[str, Any] | None:
    """Return the last event of the run, or of one stage, without invalid calls and their start.

    >>> events = [{"stage": stage, "event": event} for stage, event in (
    ...     ("train", "finished"), ("evaluate", "started"), ("evaluate", "invalid"))]
    >>> latest_event(events), latest_event(events, "evaluate")
    ({'stage': 'train', 'event': 'finished'}, None)
    """
    invalid: set[str] = set()
    for event in reversed(events):
        name: str = event["stage"]
        if event["event"] == "invalid":
            invalid.add(name)
        elif name in invalid:
            invalid -= {name} if event["event"] == "started" else set()
        elif stage in (None, name):
            return dict(event)
    return None


@contextlib.contextmanager
def lock_and_record_stage(watcher: ProgressListener, run: RunDir, stage: str, first: bool) -> Iterator[None]:
    """Lock the run directory and record the stage; of several processes, only the first does so."""
    if not first:
        yield
        return
    with run.locked(stage, watcher.note), record_stage(run, stage):
        watcher.log_to(run.log)
        yield


def is_trained(directory: RunDir) -> bool:
    """Return whether there is a training result."""
    return directory.adapter.exists() or directory.model.exists()


def require_trained(directory: RunDir, config: Path | None = None) -> None:
    """Raise if nothing is trained yet.

    Args:
        config: the file that the run is trained from, for the message.

    Raises:
        ConfigError: nothing is trained yet.
    """
    if not is_trained(directory):
        if config is None or config == directory.resolved:
            config = directory.path
        raise ConfigError(
            "this run has not been trained yet",
            code="E8021",
            path=directory.path,
            help=f"train it first: surefit train {shell_quote(config)}",
        )
