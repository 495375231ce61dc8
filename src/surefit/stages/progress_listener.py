"""Who is told how far a stage is: nobody, unless a caller wants to know."""

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
"""Where progress is lines, at most one in this many seconds."""


class ProgressListener:
    """Hears nothing; `cli.render.Output` shows it on a terminal."""

    def note(self, text: str) -> None:
        """One line beside the result: what is being done, what to look at."""

    def log_to(self, path: Path) -> None:
        """Where a copy of everything that is said belongs: a run is at work here."""

    @contextlib.contextmanager
    def progress(self, label: str) -> Iterator[OnProgress]:
        """Yields `on_progress(done, total, text)` for a piece of work with this name."""
        yield ignore_progress

    @contextlib.contextmanager
    def training_progress(self) -> Iterator[OnStep]:
        """Yields what is called with the state of a run after each of its steps."""
        yield lambda state: None


class LineListener(ProgressListener):
    """Says everything in lines, which the run directory keeps too.

    Args:
        say: is given each of them.
        callbacks: called after every step of a training with its state; one that returns True ends it there, with what
            was learnt so far as its result.
    """

    def __init__(
        self, say: Callable[[str], None], callbacks: tuple[Callable[[TrainingProgress], bool | None], ...] = ()
    ) -> None:
        self._tell, self.callbacks, self.log = say, callbacks, RunLog()

    def say(self, text: str) -> None:
        """One line."""
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
            line(state.step, state.total_steps, f"ETA {duration_text(state.eta_seconds)} · {state.text}")
            answers = [callback(state) for callback in self.callbacks]  # all of them are called
            return True in answers

        yield on_step


class PlainProgress:
    """Progress as lines: when the work has taken `PLAIN_SECONDS`, and every `PLAIN_SECONDS` after."""

    def __init__(self, label: str, note: Callable[[str], None], with_eta: bool = True) -> None:
        self.label, self.note, self.with_eta = label, note, with_eta
        self.start = self.last = time.monotonic()
        self.first: int | None = None

    def __call__(self, done: int, total: int, text: str) -> None:
        now = time.monotonic()
        # What an earlier call has done says nothing about the pace of this one.
        self.first = done if self.first is None else self.first
        if now - self.last < PLAIN_SECONDS:
            return
        self.last = now
        new = done - self.first
        left = (now - self.start) * (total - done) / new if new > 0 else None
        eta = f"ETA {duration_text(left)}" if left is not None else "ETA unknown"
        self.note(" ".join([f"{self.label} {done}/{total}", *([eta] if self.with_eta else []), text]).rstrip())
