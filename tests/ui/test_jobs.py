"""Runs that the page starts: one at a time, only what lies in the workspace, and they outlive the server."""

from __future__ import annotations

import asyncio
import fcntl
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.exceptions import HTTPException

from surefit.cli.ui import build_stage_functions
from surefit.core.errors import ConfigError
from surefit.core.lock import LOOK_AGAIN_SECONDS, DirectoryInUse, hold_lock, lock_holder
from surefit.core.rundir import RunDir, read_jsonl
from surefit.ui.app import create_app
from surefit.ui.job_runner import JobRecord, JobRunner, file_tail
from surefit.ui.security import AccessPolicy
from surefit.ui.workspace import STATE, Workspace

CONFIG = """recipe: chat
model:
  name_or_path: {model}
  trust_remote_code: {trust}
data:
  train: {train}
  eval: 0.2
train:
  num_train_epochs: 500
  learning_rate: 0.005
  global_batch_size: 4
output_dir: {output}
"""
SLEEP = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"]


def config(
    model: str = "surefit/nano", trust: str = "false", train: str = "mine.jsonl", output: str = "runs/new"
) -> str:
    return CONFIG.format(model=model, trust=trust, train=train, output=output)


def wait_until(is_so: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def listing(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.parametrize(("values", "field"), [
    ({"trust": "true"}, "trust_remote_code"),
    ({"train": "/etc/passwd"}, "outside"), ({"train": "../mine.jsonl"}, "outside"),
    ({"train": "out/*.jsonl"}, "outside"), ({"train": "'*/out.jsonl'"}, "outside"),
    ({"train": "file:///etc/passwd"}, "outside"), ({"train": "s3://bucket/rows.jsonl"}, "out of the workspace"),
    ({"train": "https://a.org/rows.jsonl"}, "out of the workspace"),
    ({"model": "/models/llama"}, "outside"), ({"model": "~/llama"}, "outside"), ({"model": "out"}, "outside"),
    ({"output": "/tmp/run"}, "outside"), ({"output": "../run"}, "outside"), ({"output": "out/run"}, "outside"),
    ({"output": ".hidden/run"}, "outside"), ({"output": "runs/linked"}, "outside"),
    ({"output": "runs/deeper"}, "out of the workspace"),
    ({"output": "a/../../run"}, "outside"),
    ({"output": "runs/new\ntelemetry: {mlflow_uri: 'sqlite:////tmp/x.db'}"}, "out of the workspace"),
])  # fmt: skip
def test_what_leads_out_of_the_workspace_is_not_started(
    server: Any, rows: bytes, values: dict[str, str], field: str
) -> None:
    space = server.workspace
    (space / "mine.jsonl").write_bytes(rows)
    outside = space.parent / "outside"
    deeper = space / "runs" / "deeper" / "checkpoints"
    for folder in (outside, space / "runs" / "linked", space / "deep", deeper):
        folder.mkdir(exist_ok=True, parents=True)
    (outside / "out.jsonl").write_bytes(rows)
    for link in (space / "out", space / "runs" / "linked" / "checkpoints", space / "deep" / "out.jsonl", deeper / "x"):
        if not link.is_symlink():
            link.symlink_to(outside / "out.jsonl" if link.suffix else outside)
    (space / "mine.yaml").write_text(config(**values))
    before, elsewhere = listing(space), listing(outside)
    answer = server.post("/api/start", {"config": "mine.yaml"})
    assert answer.status == 400
    assert field in answer.json["error"]
    assert "surefit run mine.yaml" in answer.json["help"]
    assert (listing(space), listing(outside)) == (before, elsewhere)


def test_what_is_not_there_or_has_run_is_not_started(server: Any, rows: bytes) -> None:
    space = server.workspace
    (space / "mine.jsonl").write_bytes(rows)
    assert server.post("/api/start", {"config": "none.yaml"}).status == 404
    assert server.post("/api/start", {"run": "runs/none"}).status == 404
    assert server.post("/api/start", {"config": "mine.jsonl"}).status == 404
    assert server.post("/api/start", {"config": "x" * 5_000 + ".yaml"}).status == 404
    assert server.post("/api/stop", {}).status == 400
    assert server.post("/api/stop", {"run": "runs/none"}).status == 409
    done = RunDir(space / "runs" / "done")
    done.create()
    done.resolved.write_text(config(output="runs/done"))
    done.adapter.mkdir()
    (space / "done.yaml").write_text(config(output="runs/done"))
    answer = server.post("/api/start", {"config": "done.yaml"})
    assert (answer.status, "runs/done" in answer.text) == (409, True)


def test_a_run_of_the_command_line_is_seen_by_its_lock_and_not_started_twice(server: Any, rows: bytes) -> None:
    space = server.workspace
    (space / "mine.jsonl").write_bytes(rows)
    run = RunDir(space / "runs" / "busy")
    run.create()
    run.note("train", "started")
    run.resolved.write_text(config(output="runs/busy"))
    (space / "busy.yaml").write_text(config(output="runs/busy"))
    watch = "/api/watch?path=runs/busy"
    assert server.get(watch).json["resumable"] is True
    with run.locked("train"):
        seen = server.get(watch).json
        assert (seen["holder"].startswith("`surefit train`, process"), seen["resumable"], seen["job"]) == (
            True,
            False,
            None,
        )
        assert ">running<" in server.get("/runs").text
        for body in ({"config": "busy.yaml"}, {"run": "runs/busy"}):
            answer = server.post("/api/start", body)
            assert (answer.status, "in use by `surefit train`" in answer.json["error"]) == (409, True)
        talk = {"path": "runs/busy", "variants": ["base"], "message": "Hi", "turns": []}
        assert server.post("/api/chat", talk).status == 409
        assert "<code>surefit train</code>, process" in server.get("/run/chat?path=runs/busy").text
    assert server.get(watch).json["holder"] is None


def test_a_look_at_a_lock_keeps_nobody_from_taking_it(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.touch()
    stop = time.monotonic() + 2.0

    def look() -> None:
        while time.monotonic() < stop:
            lock_holder(path)
            time.sleep(0.005)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            while time.monotonic() < stop:
                with hold_lock(path, "train"):
                    pass
        except DirectoryInUse:
            pytest.fail("a look at the lock was taken for its holder")
        looking.result()


def test_one_run_at_a_time_whoever_serves(tmp_path: Path) -> None:
    first, second = JobRunner(Workspace(tmp_path)), JobRunner(Workspace(tmp_path))
    assert first.last() is None
    started = first.start(SLEEP, "runs/x", "surefit run x.yaml")
    try:
        with pytest.raises(HTTPException) as caught:
            second.start(SLEEP, "runs/y", "surefit run y.yaml")
        assert caught.value.status_code == 409
        assert second.last() == JobRecord("runs/x", "surefit run x.yaml", started.pid, running=True)
        wait_until(lambda: second.output_tail() == ["here"])
        with pytest.raises(HTTPException, match="runs/x is running"):
            second.stop("runs/y")
        assert first.last() == started
    finally:
        second.stop("runs/x")
    wait_until(lambda: not first.last().running)  # type: ignore[union-attr]
    assert (first.last().exit_code, second.last().exit_code) == (-signal.SIGINT, None)  # type: ignore[union-attr]
    with pytest.raises(HTTPException):
        first.stop("runs/x")
    done = second.start([sys.executable, "-c", "print('\\x1b[2J hf_' + 'x' * 24)"], "runs/y", "surefit run y.yaml")
    wait_until(lambda: not second.last().running)  # type: ignore[union-attr]
    assert (second.last(), first.last().run) == (  # type: ignore[union-attr]
        JobRecord("runs/y", "surefit run y.yaml", done.pid, False, 0), "runs/y",
    )  # fmt: skip
    assert second.last().state_text == "finished"  # type: ignore[union-attr]
    assert second.output_tail() == ["\\x1b[2J ***"]


def test_a_look_at_the_record_keeps_no_run_from_starting(tmp_path: Path) -> None:
    space = Workspace(tmp_path)
    record = space.state_folder() / "run.json"
    record.touch()
    with open(record) as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        release = threading.Timer(LOOK_AGAIN_SECONDS / 5, fcntl.flock, (looking, fcntl.LOCK_UN))
        release.start()
        started = JobRunner(space).start([sys.executable, "-c", ""], "runs/x", "surefit run x.yaml")
        release.join()
    assert started.running


def test_a_run_whose_directory_is_there_but_empty_says_why_it_failed(start: Callable[..., Any], tmp_path: Path) -> None:
    space = tmp_path / "space"
    (space / "runs" / "new" / "notes").mkdir(parents=True)
    (space / "new.yaml").write_text(config(train="none.jsonl"))
    with start(space) as server:
        assert server.get("/run?path=runs/new").status == 404
        assert server.post("/api/start", {"config": "new.yaml"}).status == 200
        assert server.get("/run?path=runs/new").status == 200
        watch = "/api/watch?path=runs/new"
        wait_until(lambda: not server.get(watch).json["job"]["running"])
        assert any("none.jsonl" in line for line in server.get(watch).json["log"])
        (space / "runs" / "new" / "out").symlink_to("/etc")
        assert server.get(watch).status == 404


def test_a_stop_waits_for_no_check(tmp_path: Path) -> None:
    """The checks and fits that run at the same time are few, and some take seconds."""
    space = Workspace(tmp_path)
    jobs = JobRunner(space)
    jobs.start(SLEEP, "runs/x", "surefit run x.yaml")
    app = create_app(space, jobs, build_stage_functions(), AccessPolicy("127.0.0.1", 80, "token"))
    ui = app.app.state.ui  # type: ignore[attr-defined]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"run": "runs/x"}', "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def stop() -> None:
        ui.limiter = anyio.CapacityLimiter(1)
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/api/stop",
            "headers": [],
            "query_string": b"",
            "client": None,
        }
        async with ui.limiter:
            await asyncio.wait_for(app.app(scope, receive, send), 60)  # type: ignore[arg-type]

    asyncio.run(stop())
    assert sent[0]["status"] == 200
    wait_until(lambda: not jobs.last().running)  # type: ignore[union-attr]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"run": 1}', '{"run": "x", "command": "x", "pid": "x"}', "null"])
def test_a_damaged_record_is_no_run(tmp_path: Path, content: str) -> None:
    space = Workspace(tmp_path)
    (space.state_folder() / "run.json").write_text(content)
    assert JobRunner(space).last() is None
    with pytest.raises(HTTPException):
        JobRunner(space).stop("x")


def test_the_state_folder_is_never_a_link(tmp_path: Path) -> None:
    (tmp_path / "space").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "run.json").write_text('{"run": "x", "command": "x", "pid": 1}')
    (tmp_path / "space" / STATE).symlink_to(tmp_path / "elsewhere")
    runner = JobRunner(Workspace(tmp_path / "space"))
    assert runner.last() is None
    with pytest.raises(ConfigError):
        runner.start(SLEEP, "runs/x", "surefit run x.yaml")


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("".join(f"line {n}\n" for n in range(10_000)) + "50 %\r100 %\n")
    tail = file_tail(log)
    assert (len(tail), tail[-2:]) == (30, ["line 9999", "100 %"])
    (tmp_path / "link").symlink_to(log)
    assert file_tail(tmp_path / "link") == file_tail(tmp_path / "none") == []


def test_a_run_outlives_the_server_and_is_stopped_with_its_work_saved(
    start: Callable[..., Any], rows: bytes, tmp_path: Path
) -> None:
    space = tmp_path / "space"
    space.mkdir()
    (space / "mine.jsonl").write_bytes(rows)
    for name in ("new", "other"):
        (space / f"{name}.yaml").write_text(config(output=f"runs/{name}"))
    run = RunDir(space / "runs" / "new")
    with start(space) as server, ThreadPoolExecutor(2) as pool:
        both = [{"config": "new.yaml"}, {"config": "new.yaml"}]
        answers = list(pool.map(lambda body: server.post("/api/start", body), both))
        assert sorted(answer.status for answer in answers) == [200, 409]
        assert server.post("/api/start", {"config": "other.yaml"}).status == 409
        pid = json.loads((space / STATE / "run.json").read_text())["pid"]
        assert server.get("/", Cookie=server.cookie).headers["Location"] == "/run?path=runs%2Fnew"
        assert "Running: runs/new" in server.get("/config").text
        wait_until(lambda: run.metrics.is_file() and run.metrics.stat().st_size > 0)
        server.process.send_signal(signal.SIGINT)
        said = server.process.stdout.read()
        assert f"`surefit run new.yaml` goes on as process {pid}" in said
    with start(space) as server:
        watched = server.get("/api/watch?path=runs/new").json
        assert watched["job"] == {
            "command": "surefit run new.yaml",
            "state": f"is running, process {pid}",
            "running": True,
        }
        assert (watched["resumable"], bool(watched["log"]), bool(watched["lines"])) == (False, True, True)
        assert server.post("/api/stop", {"run": "runs/other"}).status == 409
        assert server.post("/api/stop", {"run": "runs/new"}).json == {"run": "runs/new"}
        wait_until(lambda: not server.get("/api/watch?path=runs/new").json["job"]["running"])
        ends = [(event["stage"], event["event"]) for event in read_jsonl(run.events)]
        assert ends[-1] == ("train", "interrupted")
        assert any(run.checkpoints.iterdir())
        assert server.get("/api/watch?path=runs/new").json["resumable"] is True
        assert server.post("/api/start", {"run": "runs/new"}).json["command"] == "surefit run runs/new --resume"
        wait_until(lambda: len(read_jsonl(run.events)) > len(ends))
        server.post("/api/stop", {"run": "runs/new"})
        wait_until(lambda: not server.get("/api/watch?path=runs/new").json["job"]["running"])


def test_a_run_that_fails_in_the_check_says_why(start: Callable[..., Any], rows: bytes, tmp_path: Path) -> None:
    space = tmp_path / "space"
    space.mkdir()
    (space / "mine.jsonl").write_bytes(rows)
    (space / "-odd name.yaml").write_text(config().replace("train:\n  num", "train:\n  warmup_steps: 9999\n  num"))
    with start(space) as server:
        started = server.post("/api/start", {"config": "-odd name.yaml"}).json
        assert started == {"run": "runs/new", "command": "surefit run '-odd name.yaml'"}
        watch = "/api/watch?path=runs/new"
        assert server.get("/run?path=runs/new").status == 200
        wait_until(lambda: not server.get(watch).json["job"]["running"])
        seen = server.get(watch).json
        assert seen["job"]["state"].startswith("ended with findings")
        assert any("SCH001" in line for line in seen["log"]), seen["log"]
