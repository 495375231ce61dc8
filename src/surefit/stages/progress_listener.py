"""Listeners for a stage's progress; by default nothing is shown."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from surefit.core.env import redact
from surefit.core.progress import OnProgress, ignore_progress
from surefit.core.run_log import RunLog
from surefit.core.units import duration_text, printable
from surefit.train.progress import OnStep, TrainingProgress

PLAIN_SECONDS = 10.0
"""Shortest interval in seconds between progress lines."""


class ProgressListener:
    """Listener that ignores everything; `cli.render.Output` shows progress on a terminal."""

    def note(self, text: str) -> None:
        """Show one line beside the result: the current work, or a warning."""

    def log_to(self, path: Path) -> None:
        """Copy everything that is shown to this log file, which belongs to the run at work."""

    @contextlib.contextmanager
    def progress(self, label: str) -> Iterator[OnProgress]:
        """Yield `on_progress(done, total, text)` for a piece of work with this label."""
        yield ignore_progress

    @contextlib.contextmanager
    def training_progress(self) -> Iterator[OnStep]:
        """Yield a function that is called with the state of a run after each of its steps."""
        yield lambda state: None

    def training_phase(self, label: str, step: int, total_steps: int) -> None:
        """Show what a run is doing beside its steps: the dry pass, a measurement of the held-out loss."""


class LineListener(ProgressListener):
    """Listener that reports everything in lines, and copies them to the run directory.

    Args:
        say: called with each line.
        callbacks: called after every training step with its state; one that returns True ends the run, with the weights
            so far as its result.
    """

    def __init__(
        self, say: Callable[[str], None], callbacks: tuple[Callable[[TrainingProgress], bool | None], ...] = ()
    ) -> None:
        self._tell, self.callbacks, self.log = say, callbacks, RunLog()

    def say(self, text: str) -> None:
        """Show one line and log it."""
        self.log.say(printable(redact(text)))
        self._tell(text)

    def note(self, text: str) -> None:
        self.say(text)

    def log_to(self, path: Path) -> None:
        self.log.open(path)

    @contextlib.contextmanager
    def progress(self, label: str) -> Iterator[OnProgress]:
        yield PlainProgress(label, self.say)

    @contextlib.contextmanager
    def training_progress(self) -> Iterator[OnStep]:
        line = PlainProgress("training", self.say, with_eta=False)

        def on_step(state: TrainingProgress) -> bool:
            line(state.step, state.total_steps, f"{state.eta_text} · {state.text}")
            answers = [callback(state) for callback in self.callbacks]  # all of them are called
            return True in answers

        yield on_step


class PlainProgress:
    """Progress as lines: the first after `PLAIN_SECONDS`, then one every `PLAIN_SECONDS`."""

    def __init__(self, label: str, note: Callable[[str], None], with_eta: bool = True) -> None:
        self.label, self.note, self.with_eta = label, note, with_eta
        self.start = self.last = time.monotonic()
        self.first: int | None = None

    def __call__(self, done: int, total: int, text: str) -> None:
        now = time.monotonic()
        # The work of an earlier call does not count for the pace of this one.
        self.first = done if self.first is None else self.first
        if now - self.last < PLAIN_SECONDS:
            return
        self.last = now
        finished = done - self.first
        seconds_left = (now - self.start) * (total - done) / finished if finished > 0 else None
        eta = f"ETA {duration_text(seconds_left)}" if seconds_left is not None else "ETA unknown"
        self.note(" ".join([f"{self.label} {done}/{total}", *([eta] if self.with_eta else []), text]).rstrip())
