"""When each stage ran and how it ended, from events.jsonl, including stages that stopped without logging an end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from surefit.report.shapes import Event
from surefit.report.text import shorten_text

Outcome = Literal["finished", "failed", "interrupted", "ended without a record", "no end recorded"]
EVENTS = ("started", "resumed", "finished", "failed", "interrupted", "invalid")
STAGES = ("check", "plan", "train", "merge", "evaluate")
MAX_ATTEMPTS = 60


@dataclass
class Attempt:
    """One attempt at a stage.

    Attributes:
        start: seconds since 1970. seconds: duration, if it has ended. outcome: how it ended; "ended without a record"
        means that the stage was started again although no end was
            logged (the process was killed or crashed), "no end recorded" that it may still be running.
        resumed_at: the step that it resumed from.
        detail: the error, or the step of an interruption.
        adapted: config changes made because memory ran out.
    """

    stage: str
    start: float
    seconds: float | None = None
    outcome: Outcome = "no end recorded"
    resumed_at: int | None = None
    detail: str = ""
    adapted: str = ""


def attempts(events: Sequence[Event]) -> list[Attempt]:
    """Return the attempts in the order of their starts; the report's own are omitted."""
    started: list[Attempt] = []
    running: dict[str, Attempt] = {}
    for event in events:
        attempt = running.get(event.stage)
        if event.event == "adapted" and (latest := attempt or last_attempt(started, event.stage)):
            latest.adapted = shorten_text(json.dumps(event.changes, ensure_ascii=False), 300)
        if event.stage == "report" or event.event not in EVENTS:
            continue
        if event.event == "started" or attempt is None:
            if attempt is not None:
                attempt.outcome = "ended without a record"
            attempt = running[event.stage] = Attempt(event.stage, event.time)
            started.append(attempt)
        if event.event == "invalid":  # its arguments were invalid, and it has done nothing
            started.remove(running.pop(event.stage))
        elif event.event == "resumed":
            attempt.resumed_at = event.step
        elif event.event != "started":
            _end(event, running.pop(event.stage))
    return started[-MAX_ATTEMPTS:]


def _end(event: Event, attempt: Attempt) -> None:
    match event.event:
        case "finished" | "failed" | "interrupted" as outcome:
            attempt.outcome = outcome
    attempt.seconds = event.seconds if event.seconds is not None else event.time - attempt.start
    if event.error is not None:
        attempt.detail = shorten_text(str(event.error), 300)
    elif event.step is not None:
        attempt.detail = f"Ended at step {event.step:,}."


def last_attempt(found: Sequence[Attempt], stage: str) -> Attempt | None:
    """Return the latest attempt at `stage`; None if there is none."""
    return next((attempt for attempt in reversed(found) if attempt.stage == stage), None)
