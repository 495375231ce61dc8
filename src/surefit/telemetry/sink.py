"""Where else the numbers of a run may go: sinks, and a fan-out to them that never slows or stops training.

metrics.jsonl stays the record; a sink gets copies. Each has a thread and a bounded queue of its own, so one that hangs
costs neither the run nor the other sinks anything: the oldest records in its queue are dropped, and counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from surefit.core.errors import Interrupted

QUEUED = 1_000
"""Records that wait for one sink at most."""
PATIENCE = 10.0
"""Seconds that a finished run waits for all its sinks together."""


class Sink(Protocol):
    """Something that takes the numbers of a run. It may be slow, and it may raise: the fan-out bears both."""

    def start(self, run_id: str, params: Mapping[str, Any]) -> None:
        """A run begins, with these settings."""

    def log(self, record: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl, as telemetry/jsonl.py describes it."""

    def finish(self, status: str) -> None:
        """The run has ended: finished, interrupted or failed."""


class FanOut:
    """Passes everything on to each sink.

    Args:
        sinks: any number of them.
        on_note: called with a sentence the first time that a sink fails, and at the end for what it did not get. Never
            called from another thread than the one that calls `log` and `finish`.
        queued: records that wait for one sink at most.
    """

    def __init__(self, sinks: Sequence[Sink], on_note: Callable[[str], None], queued: int = QUEUED) -> None:
        self.on_note = on_note
        self._lines = [_Line(sink, queued) for sink in sinks]

    def start(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Begin a run."""
        for line in self._lines:
            line.begin(run_id, dict(params))

    def log(self, record: Mapping[str, Any]) -> None:
        """Queue one record; returns at once."""
        for line in self._lines:
            line.put(dict(record))
        self._say_faults()

    def finish(self, status: str, patience: float = PATIENCE) -> None:
        """End the run, and wait a little for sinks that are behind; what they have not taken by then is given up."""
        for line in self._lines:
            line.end(status)
        limit = time.monotonic() + patience
        for line in self._lines:
            line.thread.join(max(0.0, limit - time.monotonic()))
        self._say_faults()
        for line in self._lines:
            if lost := line.lost():
                self.on_note(f"{line.name} did not get {lost:,} records; metrics.jsonl has them all")

    @contextmanager
    def during(self, run_id: str, params: Mapping[str, Any]) -> Iterator[None]:
        """A run from its beginning to whatever end it takes."""
        self.start(run_id, params)
        status = "failed"
        try:
            yield
            status = "finished"
        except Interrupted:
            status = "interrupted"
            raise
        finally:
            self.finish(status)

    def _say_faults(self) -> None:
        for line in self._lines:
            if line.fault is not None and not line.said:
                line.said = True
                self.on_note(f"{line.name} failed, and training goes on without it: {line.fault}")


class _Line:
    """One sink, its queue and its thread."""

    def __init__(self, sink: Sink, queued: int) -> None:
        self.sink, self.name = sink, type(sink).__name__
        self.fault: str | None = None
        self.said = False
        self.dropped = 0
        self._queue: deque[Mapping[str, Any]] = deque(maxlen=queued)
        self._status: str | None = None
        self._changed = threading.Condition()
        # A daemon: a sink that never returns must not keep the process alive.
        self.thread = threading.Thread(target=self._work, name=f"surefit {self.name}", daemon=True)

    def begin(self, run_id: str, params: Mapping[str, Any]) -> None:
        self._run = (run_id, params)
        self.thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
        with self._changed:
            self.dropped += len(self._queue) == self._queue.maxlen
            self._queue.append(record)
            self._changed.notify()

    def end(self, status: str) -> None:
        with self._changed:
            self._status = status
            self._changed.notify()

    def lost(self) -> int:
        with self._changed:
            return self.dropped + len(self._queue)

    def _work(self) -> None:
        self._attempt(lambda: self.sink.start(*self._run))
        while (record := self._next()) is not None:
            if not self._attempt(lambda record=record: self.sink.log(record)):  # type: ignore[misc]
                with self._changed:
                    self.dropped += 1
        self._attempt(lambda: self.sink.finish(self._status or "finished"))

    def _next(self) -> Mapping[str, Any] | None:
        """The oldest record, once there is one; None when the run has ended and the queue is empty."""
        with self._changed:
            while not self._queue and self._status is None:
                self._changed.wait()
            return self._queue.popleft() if self._queue else None

    def _attempt(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:
            self.fault = self.fault or f"{type(error).__name__}: {error}"
            return False
        return True
