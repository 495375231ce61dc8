"""Sinks, the further destinations of a run's numbers, and a fan-out to them that never slows or stops training.

metrics.jsonl is the record; a sink gets copies. Each has a thread and a bounded queue of its own, so a sink that hangs
delays neither the run nor the other sinks. Records that a sink could not accept are offered again, with newer ones;
when its queue is full, the oldest records are dropped and counted.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from surefit.core.env import redact
from surefit.core.errors import Interrupted
from surefit.core.units import truncate_text

QUEUED = 1_000
"""Maximum number of records that wait for one sink."""
EVERY = 1.0
"""Seconds between two deliveries: the records of this time are sent together."""
LONGEST_PAUSE = 30.0
"""Maximum seconds before a sink that keeps failing is tried again; each pause is twice the one before it."""
PATIENCE = 10.0
"""Seconds that a finished run waits for all its sinks together."""

LONGEST_FAULT = 160
"""Maximum number of characters of a reported fault."""


class Sink(Protocol):
    """A destination of a run's numbers. It may be slow, and it may raise: the fan-out tolerates both.

    Every method is called from one thread of the sink's own. After an exception, the same call comes again later.
    """

    def start(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Begin or continue a run with these settings, in which no secret is left."""

    def log(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Accept lines of metrics.jsonl in order, as telemetry/jsonl.py describes them, each with its `time` (Unix
        seconds).

        Lines that an earlier call did not finish come again.
        """

    def finish(self, status: str) -> None:
        """End the run: finished, interrupted or failed. Called once, after a `start` that worked."""


class FinalReportSink(Protocol):
    """A sink that also accepts the final report when training is over (telemetry/conclusion.py).

    Another process may have trained: `conclude` is called on a new object, without `start`, `log` and `finish`.
    """

    def conclude(
        self, numbers: Mapping[str, float], files: Sequence[Path], examples: Sequence[Mapping[str, str]]
    ) -> None:
        """Add the report to the training's log, or begin one; it replaces the report of an earlier call.

        Args:
            numbers: final ones, by name.
            files: of the run directory.
            examples: rows of a table that all have the same columns; empty if there is nothing to compare.
        """


class FanOut:
    """Passes every call on to each sink.

    Args:
        sinks: any number of them.
        on_note: called with a sentence the first time that a sink fails, and at the end for the records it did not get.
            Only called from the thread that calls `log` and `finish`.
        queued: maximum number of records that wait for one sink.
        every: seconds between two deliveries.
    """

    def __init__(
        self, sinks: Sequence[Sink], on_note: Callable[[str], None], queued: int = QUEUED, every: float = EVERY
    ) -> None:
        self.on_note = on_note
        self._lines = [_Line(sink, queued, every) for sink in sinks]

    def start(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Begin a run."""
        safe = {key: _without_secrets(value) for key, value in params.items()} if self._lines else {}
        for line in self._lines:
            line.begin(run_id, safe)

    def log(self, record: Mapping[str, Any]) -> None:
        """Queue one record; returns at once."""
        now = time.time()
        for line in self._lines:
            line.put({**record, "time": now})
        self._say_faults()

    def finish(self, status: str, patience: float = PATIENCE) -> None:
        """End the run, and wait a little for sinks that are behind; records that are not delivered by then are
        dropped."""
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
        """Log a run from its beginning to its end, however it ends."""
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

    def __init__(self, sink: Sink, queued: int, every: float) -> None:
        self.sink, self.name, self.every = sink, type(sink).__name__, every
        self.fault: str | None = None
        self.said = False
        self._queue: deque[Mapping[str, Any]] = deque(maxlen=queued)
        self._sending, self._dropped = 0, 0
        self._started = False
        self._status: str | None = None
        self._changed = threading.Condition()
        # A daemon: a sink that never returns must not keep the process alive.
        self.thread = threading.Thread(target=self._work, name=f"surefit {self.name}", daemon=True)

    def begin(self, run_id: str, params: Mapping[str, Any]) -> None:
        self._run = (run_id, params)
        self.thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
        with self._changed:
            self._dropped += len(self._queue) == self._queue.maxlen
            self._queue.append(record)

    def end(self, status: str) -> None:
        with self._changed:
            self._status = status
            self._changed.notify()

    def lost(self) -> int:
        with self._changed:
            return self._dropped + self._sending + len(self._queue)

    def _work(self) -> None:
        pause, ended = 0.0, False
        while not ended:
            ended = self._wait(pause)
            delivered = self._deliver()
            pause = self.every if delivered else min(max(2 * pause, self.every), LONGEST_PAUSE)
        if self._started:
            self._attempt(lambda: self.sink.finish(self._status or "finished"))

    def _wait(self, seconds: float) -> bool:
        """Wait the given time, or until the run ends; return whether it has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self._status is not None, timeout=seconds)

    def _deliver(self) -> bool:
        """Offer the sink all waiting records; return whether it accepted them. Otherwise they wait on."""
        with self._changed:
            records = list(self._queue)
            self._queue.clear()
            self._sending = len(records)
        self._started = self._started or self._attempt(lambda: self.sink.start(*self._run))
        delivered = self._started and (not records or self._attempt(lambda: self.sink.log(records)))
        with self._changed:
            self._sending = 0
            if not delivered:
                self._put_back(records)
        return delivered

    def _put_back(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Put records back before newer ones, as far as the queue has space."""
        assert self._queue.maxlen is not None
        kept = records[max(0, len(records) + len(self._queue) - self._queue.maxlen) :]
        self._dropped += len(records) - len(kept)
        self._queue.extendleft(reversed(kept))

    def _attempt(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:
            self.fault = self.fault or one_line_error(error)
            return False
        return True


def one_line_error(error: BaseException) -> str:
    """Return a fault in one line. A failed connection is reported as such: libraries wrap it in a paragraph."""
    chain = [error]
    while (inner := _reason(chain[-1])) is not None:
        chain.append(inner)
    innermost = [link for link in chain if isinstance(link, ConnectionError | TimeoutError | socket.gaierror)]
    cause = (innermost or chain[:1])[-1]
    return truncate_text(redact(f"{type(cause).__name__}: {cause}".splitlines()[0]), LONGEST_FAULT)


def _reason(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {redact(str(key)): _without_secrets(item) for key, item in value.items()}
    return [_without_secrets(item) for item in value] if isinstance(value, list | tuple) else value
