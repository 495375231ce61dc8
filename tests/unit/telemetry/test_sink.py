"""Sinks that work, raise, come back or hang: the caller never waits, and never sees their exceptions."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from surefit.telemetry.sink import FanOut


class Kept:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @property
    def steps(self) -> list[int]:
        return [record["step"] for record in self.seen if isinstance(record, dict) and "step" in record]

    def start(self, run_id: str, params: Mapping[str, Any]) -> None:
        self.seen.append(("start", run_id, params))

    def log(self, records: Sequence[Mapping[str, Any]]) -> None:
        self.seen.extend(records)

    def finish(self, status: str) -> None:
        self.seen.append(("finish", status))


class Raising(Kept):
    def log(self, records: Sequence[Mapping[str, Any]]) -> None:
        raise ConnectionError("no route to http://me:hunter2@host")


class Away(Kept):
    """Not there until it is back, neither for a start nor for a line."""

    def __init__(self) -> None:
        super().__init__()
        self.back = threading.Event()
        self.tried = 0

    def start(self, run_id: str, params: Mapping[str, Any]) -> None:
        self.tried += 1
        if not self.back.is_set():
            raise ConnectionError("refused")
        super().start(run_id, params)


class Hanging(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def log(self, records: Sequence[Mapping[str, Any]]) -> None:
        self.released.wait()
        super().log(records)


def test_a_sink_gets_everything_in_order() -> None:
    sink = Kept()
    fan_out = FanOut([sink], on_note=lambda text: None, every=0.001)
    fan_out.start("run", {"r": 16})
    before = time.time()
    for step in range(200):
        fan_out.log({"step": step})
    fan_out.finish("interrupted")
    assert sink.seen[0] == ("start", "run", {"r": 16})
    assert sink.steps == list(range(200))
    assert all(before <= record["time"] <= time.time() for record in sink.seen[1:-1])
    assert sink.seen[-1] == ("finish", "interrupted")


def test_what_comes_up_meanwhile_goes_together() -> None:
    calls: list[int] = []

    class Counting(Kept):
        def log(self, records: Sequence[Mapping[str, Any]]) -> None:
            calls.append(len(records))

    fan_out = FanOut([Counting()], on_note=lambda text: None, every=60)
    fan_out.start("run", {})
    time.sleep(0.05)
    for step in range(100):
        fan_out.log({"step": step})
    fan_out.finish("finished")
    assert sum(calls) == 100
    assert len(calls) <= 2


def test_a_sink_that_raises_is_named_once_without_secrets_and_disturbs_no_other() -> None:
    notes: list[str] = []
    broken, good = Raising(), Kept()
    fan_out = FanOut([broken, good], notes.append)
    fan_out.start("run", {})
    for step in range(5):
        fan_out.log({"step": step})
    fan_out.finish("finished")
    assert notes == [
        "Raising failed, and training goes on without it: ConnectionError: no route to http://***@host",
        "Raising did not get 5 records; metrics.jsonl has them all",
    ]
    assert broken.seen == [("start", "run", {}), ("finish", "finished")]
    assert good.steps == list(range(5))


class Wrapping(Kept):
    def start(self, run_id: str, params: Mapping[str, Any]) -> None:
        try:
            try:
                raise KeyError("no connection in the pool")
            except KeyError:
                raise ConnectionRefusedError(111, "Connection refused") from None
        except ConnectionRefusedError as error:
            raise RuntimeError(f"API request to http://host failed with exception {error} " + "x" * 400) from error


def test_a_connection_that_fails_is_named_and_not_what_a_library_makes_of_it() -> None:
    notes: list[str] = []
    fan_out = FanOut([Wrapping(), Long()], notes.append, every=0.01)
    fan_out.start("run", {})
    fan_out.finish("finished")
    refused, long = notes[:2]
    assert refused.endswith("without it: ConnectionRefusedError: [Errno 111] Connection refused")
    assert long.endswith("xxx…")
    assert len(long) < 220


class Long(Kept):
    def start(self, run_id: str, params: Mapping[str, Any]) -> None:
        raise RuntimeError("x" * 400)


def test_a_sink_that_comes_back_gets_what_it_missed() -> None:
    notes: list[str] = []
    away = Away()
    fan_out = FanOut([away], notes.append, every=0.01)
    fan_out.start("run", {})
    for step in range(50):
        fan_out.log({"step": step})
    while away.tried < 3:
        time.sleep(0.01)
    away.back.set()
    fan_out.log({"step": 50})
    fan_out.finish("finished")
    assert away.steps == list(range(51))
    assert away.seen[-1] == ("finish", "finished")
    assert notes == ["Away failed, and training goes on without it: ConnectionError: refused"]


def test_a_sink_that_was_never_there_is_not_finished() -> None:
    away, notes = Away(), []  # type: ignore[var-annotated]
    fan_out = FanOut([away], notes.append, queued=10, every=0.01)
    fan_out.start("run", {})
    for step in range(25):
        fan_out.log({"step": step})
    fan_out.finish("finished")
    assert away.seen == []
    assert notes[-1] == "Away did not get 25 records; metrics.jsonl has them all"


def test_a_sink_that_hangs_costs_no_time_and_loses_its_oldest_records() -> None:
    notes: list[str] = []
    hanging, good = Hanging(), Kept()
    fan_out = FanOut([hanging, good], notes.append, queued=10, every=0.001)
    fan_out.start("run", {})
    began = time.monotonic()
    for step in range(50):
        fan_out.log({"step": step})
        time.sleep(0.002)
    fan_out.finish("finished", patience=0.2)
    assert time.monotonic() - began < 2
    assert good.steps == list(range(50))
    assert notes == ["Hanging did not get 50 records; metrics.jsonl has them all"]
    hanging.released.set()
    fan_out._lines[0].thread.join(5)
    assert hanging.steps[-10:] == list(range(40, 50))
    assert len(hanging.steps) <= 20


def test_sinks_get_no_secrets() -> None:
    sink = Kept()
    fan_out = FanOut([sink], on_note=lambda text: None)
    fan_out.start("run", {"uri": "https://u:p4ss@host/x", "list": ["hf_" + "a" * 20], "map": {"k": "s3://a:b@c"}})
    fan_out.finish("finished")
    assert sink.seen[0][2] == {"uri": "https://***@host/x", "list": ["***"], "map": {"k": "s3://***@c"}}


def test_without_sinks_there_is_no_thread() -> None:
    before = threading.active_count()
    fan_out = FanOut([], on_note=lambda text: None)
    fan_out.start("run", {})
    fan_out.log({"step": 1})
    assert threading.active_count() == before
    fan_out.finish("finished")
