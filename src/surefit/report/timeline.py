"""When each stage ran and how it ended, from events.jsonl: what stopped without a word is said too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from surefit.report.artefacts import Event, shorten

Outcome = Literal["finished", "failed", "interrupted", "stopped without a word", "no end recorded"]
STAGES = ("check", "plan", "train", "merge", "evaluate")
MAX_ATTEMPTS = 60


@dataclass
class Attempt:
    """One go at a stage.

    Attributes:
        start: seconds since 1970.
        seconds: how long it took, where the log says so.
        outcome: how it ended; without a word means that the stage was started again although no end was logged (the
            process was killed or crashed), no end recorded that it may still be running.
        resumed_at: the step it went on from.
        detail: the error or the step it was interrupted at.
    """

    stage: str
    start: float
    seconds: float | None = None
    outcome: Outcome = "no end recorded"
    resumed_at: int | None = None
    detail: str = ""


def attempts(events: Sequence[Event]) -> list[Attempt]:
    """The attempts in the order they began; the report itself is left out."""
    found: list[Attempt] = []
    open_now: dict[str, Attempt] = {}
    for event in events:
        if event.stage == "report":
            continue
        if event.event in ("started", "resumed"):
            _begin(event, found, open_now)
        elif event.event in ("finished", "failed", "interrupted"):
            attempt = open_now.pop(event.stage, None)
            if attempt is None:
                attempt = Attempt(event.stage, event.time - (event.seconds or 0.0))
                found.append(attempt)
            _end(event, attempt)
    return found[-MAX_ATTEMPTS:]


def _begin(event: Event, found: list[Attempt], open_now: dict[str, Attempt]) -> None:
    before = open_now.get(event.stage)
    tries = sum(attempt.stage == event.stage for attempt in found)
    # A stage that is run again may log both "started" and "resumed": they are one attempt.
    if event.event == "resumed" and before is not None and before.resumed_at is None and tries > 1:
        before.resumed_at = event.step
        return
    if before is not None:
        before.outcome = "stopped without a word"
    attempt = Attempt(event.stage, event.time, resumed_at=event.step if event.event == "resumed" else None)
    found.append(attempt)
    open_now[event.stage] = attempt


def _end(event: Event, attempt: Attempt) -> None:
    match event.event:
        case "finished" | "failed" | "interrupted" as outcome:
            attempt.outcome = outcome
    attempt.seconds = event.seconds if event.seconds is not None else event.time - attempt.start
    if event.error is not None:
        attempt.detail = shorten(str(event.error), 300)
    elif event.step is not None:
        attempt.detail = f"Ended at step {event.step:,}."


def last_attempt(found: Sequence[Attempt], stage: str) -> Attempt | None:
    """The latest go at `stage`."""
    return next((attempt for attempt in reversed(found) if attempt.stage == stage), None)
