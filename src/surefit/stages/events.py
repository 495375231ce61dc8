"""What every stage notes in the run directory, and what can be told from it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from surefit.core.env import redact
from surefit.core.errors import EXIT_INTERRUPTED, ConfigError, SureFitError
from surefit.core.rundir import RunDir
from surefit.stages.watcher import Watcher


@contextlib.contextmanager
def noted(run: RunDir, stage: str) -> Iterator[None]:
    """Write into events.jsonl when a stage started and how it ended."""
    start = time.monotonic()
    run.create()
    run.note(stage, "started")
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt) or getattr(error, "exit_code", None) == EXIT_INTERRUPTED
        message = redact(error.message) if isinstance(error, SureFitError) else type(error).__name__
        with contextlib.suppress(SureFitError):  # a full disk must not hide the error that filled it
            run.note(stage, "interrupted" if stopped else "failed", seconds=time.monotonic() - start, error=message)
        raise
    run.note(stage, "finished", seconds=time.monotonic() - start)


@contextlib.contextmanager
def at_work(watcher: Watcher, run: RunDir, stage: str, first: bool) -> Iterator[None]:
    """Hold the run directory and note the stage; of several processes that work together, the first does it for all."""
    if not first:
        yield
        return
    with run.locked(stage, watcher.note), noted(run, stage):
        watcher.log_to(run.log)
        yield


def trained(directory: RunDir) -> bool:
    """Whether there is a result of training."""
    return directory.adapter.exists() or directory.model.exists()


def require_trained(directory: RunDir) -> None:
    """Raises:
    ConfigError: nothing is trained yet.
    """
    if not trained(directory):
        raise ConfigError(
            "nothing is trained yet in this run", code="E8021", path=directory.path, help="`surefit train` comes first"
        )
