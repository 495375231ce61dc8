"""When each stage ran and how it ended, from events.jsonl: what stopped without a word is said too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from surefit.report.shapes import Event
from surefit.report.text import shorten_text

Outcome = Literal["finished", "failed", "interrupted", "stopped without a word", "no end recorded"]
EVENTS = ("started", "resumed", "finished", "failed", "interrupted", "invalid")
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
        adapted: what was changed in the config because memory ran out.
    """

    stage: str
    start: float
    seconds: float | None = None
    outcome: Outcome = "no end recorded"
    resumed_at: int | None = None
    detail: str = ""
    adapted: str = ""


def attempts(events: Sequence[Event]) -> list[Attempt]:
    """The attempts in the order they began; the report itself is left out."""
    found: list[Attempt] = []
    open_now: dict[str, Attempt] = {}
    for event in events:
        attempt = open_now.get(event.stage)
        if event.event == "adapted" and (latest := attempt or last_attempt(found, event.stage)):
            latest.adapted = shorten_text(json.dumps(event.changes, ensure_ascii=False), 300)
        if event.stage == "report" or event.event not in EVENTS:
            continue
        if event.event == "started" or attempt is None:
            if attempt is not None:
                attempt.outcome = "stopped without a word"
            attempt = open_now[event.stage] = Attempt(event.stage, event.time)
            found.append(attempt)
        if event.event == "invalid":  # it was asked for something unusable, and has done nothing
            found.remove(open_now.pop(event.stage))
        elif event.event == "resumed":
            attempt.resumed_at = event.step
        elif event.event != "started":
            _end(event, open_now.pop(event.stage))
    return found[-MAX_ATTEMPTS:]


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
    """The latest go at `stage`."""
    return next((attempt for attempt in reversed(found) if attempt.stage == stage), None)
