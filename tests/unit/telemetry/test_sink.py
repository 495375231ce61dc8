"""Sinks that work, raise or hang: the caller never waits, and never sees their exceptions."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from surefit.telemetry.sink import FanOut


class Kept:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def start(self, run_id: str, params: Mapping[str, Any]) -> None:
        self.seen.append(("start", run_id, params))

    def log(self, record: Mapping[str, Any]) -> None:
        self.seen.append(record)

    def finish(self, status: str) -> None:
        self.seen.append(("finish", status))


class Raising(Kept):
    def log(self, record: Mapping[str, Any]) -> None:
        raise ConnectionError("no route to host")


class Hanging(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def log(self, record: Mapping[str, Any]) -> None:
        self.released.wait()
        super().log(record)


def test_a_sink_gets_everything_in_order() -> None:
    sink = Kept()
    fan_out = FanOut([sink], on_note=lambda text: None)
    fan_out.start("run", {"r": 16})
    records = [{"step": step} for step in range(200)]
    for record in records:
        fan_out.log(record)
    fan_out.finish("interrupted")
    assert sink.seen == [("start", "run", {"r": 16}), *records, ("finish", "interrupted")]


def test_a_sink_that_raises_is_named_once_and_disturbs_no_other() -> None:
    notes: list[str] = []
    broken, good = Raising(), Kept()
    fan_out = FanOut([broken, good], notes.append)
    fan_out.start("run", {})
    for step in range(5):
        fan_out.log({"step": step})
    fan_out.finish("finished")
    assert notes == [
        "Raising failed, and training goes on without it: ConnectionError: no route to host",
        "Raising did not get 5 records; metrics.jsonl has them all",
    ]
    assert broken.seen == [("start", "run", {}), ("finish", "finished")]
    assert len(good.seen) == 7


def test_a_sink_that_hangs_costs_no_time_and_loses_its_oldest_records() -> None:
    notes: list[str] = []
    hanging, good = Hanging(), Kept()
    fan_out = FanOut([hanging, good], notes.append, queued=10)
    fan_out.start("run", {})
    began = time.monotonic()
    for step in range(50):
        fan_out.log({"step": step})
        time.sleep(0.001)
    fan_out.finish("finished", patience=0.2)
    assert time.monotonic() - began < 2
    assert len([record for record in good.seen if "step" in record]) == 50
    (note,) = notes
    assert note.startswith("Hanging did not get 4") or note.startswith("Hanging did not get 50")
    hanging.released.set()
    assert fan_out._lines[0].thread.join(5) is None
    steps = [record["step"] for record in hanging.seen if "step" in record]
    assert steps[-10:] == list(range(40, 50))
    assert len(steps) <= 11


def test_without_sinks_there_is_no_thread() -> None:
    before = threading.active_count()
    fan_out = FanOut([], on_note=lambda text: None)
    fan_out.start("run", {})
    fan_out.log({"step": 1})
    assert threading.active_count() == before
    fan_out.finish("finished")
