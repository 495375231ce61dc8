"""Who may come in, and what of the machine they can reach: against a real server."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from surefit.core.rundir import RunDir, append_jsonl
from surefit.ui.security import MAX_BODY, AccessPolicy, is_loopback

CONFIG = "recipe: chat\nmodel:\n  name_or_path: surefit/nano\ndata:\n  train: {train}\noutput_dir: runs/x\n"


def fingerprints(directory: Path) -> dict[str, str]:
    """Every file below a directory with the hash of its bytes; links with where they lead."""
    return {
        str(path.relative_to(directory)): os.readlink(path)
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_every_page_opens_and_carries_the_headers(server: Any) -> None:
    run = "path=runs/first"
    for target in (
        "/rows", "/runs", "/config", "/config?open=configs/nano.yaml", "/config?recipe=chat", "/planner", f"/run?{run}",
        f"/run/chat?{run}",
        "/planner?config=configs/nano.yaml", f"/run/examples?{run}", f"/compare?{run}&path=runs/second",
    ):  # fmt: skip
        answer = server.get(target)
        assert answer.status == 200, target
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe-inline" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cache-Control"] == "no-store"
        assert " style=" not in answer.text
        assert " onclick=" not in answer.text
        assert "hf_abcdef" not in answer.text


@pytest.mark.parametrize("host", [
    "evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "a@127.0.0.1:{port}", "127.0.0.1:{port}/x",
    "localhost.evil.example:{port}", "192.168.0.7:{port}", "127.0.0.1:{port}#x", "127.0.0.1:{port}?x",
])  # fmt: skip
def test_a_host_that_is_not_ours_is_refused(server: Any, host: str) -> None:
    port = urlsplit(server.address).port
    assert server.ask("GET", "/runs", headers={"Host": host.format(port=port)}).status == 400


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}"])
def test_the_names_of_loopback_are_ours(server: Any, host: str) -> None:
    port = urlsplit(server.address).port
    assert server.ask("GET", "/runs", headers={"Host": host.format(port=port)}).status == 200


@pytest.mark.parametrize("path", [
    "../outside.yaml", "configs/../../outside.yaml", "/etc/passwd", "..", "configs/..%2f..%2foutside.yaml",
    "%2e%2e/outside.yaml", "..\\outside.yaml", ".env", "configs/../.env", "\0", "configs/nano.yaml\0", "link.yaml",
    "linked/outside.yaml", "notes.txt", "....//outside.yaml", "~/../outside.yaml", "/", ".hidden/inside.yaml",
    "a" * 5000, "",
])  # fmt: skip
def test_no_path_leads_outside(server: Any, path: str) -> None:
    outside = server.workspace.parent / "outside.yaml"
    outside.write_text(CONFIG.format(train="secret-words"))
    for link, target in (("link.yaml", outside), ("linked", outside.parent)):
        if not (server.workspace / link).is_symlink():
            (server.workspace / link).symlink_to(target)
    for written in (quote(path, safe=""), quote(quote(path, safe=""), safe="")):
        for place in (
            "config?open=", "planner?config=", "run?path=", "run/report?path=", "run/examples?path=", "run/chat?path=",
            "api/watch?path=", "static/", "compare?path=",
        ):  # fmt: skip
            target = f"/{place}{written}"
            answer = server.get(target)
            if target == "/planner?config=":
                continue  # from scratch
            assert answer.status in (400, 404), target
            assert "secret-words" not in answer.text
    targets = ["/api/save", "/api/start", "/api/chat"]
    targets += ["/api/draft"] if path != "notes.txt" else []  # a text file may be somebody's rows
    for target in targets:
        names = dict.fromkeys(("name", "rows", "config", "path"), path)
        answer = server.post(target, names | {"text": "x: 1", "known": None, "model": "", "gpu": "", "message": "Hi"})
        assert answer.status == 404, answer.text
        assert "secret-words" not in answer.text
    assert outside.read_text() == CONFIG.format(train="secret-words")


@pytest.mark.parametrize("name", ["set", "variant", "against"])
def test_a_set_or_a_variant_is_no_path(server: Any, name: str) -> None:
    for value in ("../../second/eval/eval", "..", "base/../adapter", "nothing"):
        assert server.get(f"/run/examples?path=runs/first&{name}={quote(value, safe='')}").status == 404


def test_a_run_whose_files_lead_outside_shows_nothing_of_them(server: Any) -> None:
    run = RunDir(server.workspace / "runs" / "crafted")
    run.create()
    (run.path / "events.jsonl").write_text("")
    secret = server.workspace.parent / "secret.html"
    secret.write_text("<p>secret-words</p>")
    run.report.symlink_to(secret)
    assert server.get("/run/report?path=runs/crafted").status == 404


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "eval"])
def test_a_log_that_is_a_link_to_the_outside_is_not_shown(server: Any, name: str) -> None:
    run = RunDir(server.workspace / "runs" / f"linked-{name.partition('.')[0]}")
    run.create()
    run.note("train", "started")
    run.resolved.write_text("recipe: chat\n")
    outside = server.workspace.parent / f"outside-{name}"
    if name == "eval":
        outside.mkdir()
    else:
        outside.write_text('{"step": 1, "loss": 0.12345, "stage": "secret-words", "event": "started"}\n')
        (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(outside)
    query = f"path=runs/{run.path.name}"
    for target in (f"/run?{query}", f"/api/watch?{query}", f"/run/examples?{query}", f"/compare?{query}"):
        assert server.get(target).status == 404, target
    listed = server.get("/runs").text
    assert "runs/first" in listed
    assert run.path.name not in listed
    assert "secret-words" not in listed


def test_checkpoints_on_another_disk_do_not_hide_a_run(server: Any) -> None:
    run = RunDir(server.workspace / "runs" / "scratch")
    run.create()
    run.note("train", "started")
    run.resolved.write_text("recipe: chat\n")
    (server.workspace.parent / "scratch").mkdir()
    run.checkpoints.symlink_to(server.workspace.parent / "scratch")
    assert server.get("/run?path=runs/scratch").status == 200
    assert "runs/scratch" in server.get("/runs").text


@pytest.mark.parametrize("named", ["../outside.json", "/etc/hostname", ".env"])
def test_an_accelerate_file_leads_to_nothing_outside(server: Any, named: str) -> None:
    (server.workspace.parent / "outside.json").write_text('{"zero_optimization": {"stage": "secret-words"}}')
    (server.workspace / "accelerate.yaml").write_text(
        f"distributed_type: DEEPSPEED\ndeepspeed_config: {{deepspeed_config_file: {named}}}\nnum_processes: 2\n"
    )
    text = CONFIG.format(train="surefit/function-calling-train") + "parallel: {accelerate_config: accelerate.yaml}\n"
    (server.workspace / "configs" / "shared.yaml").write_text(text)
    (finding,) = server.post("/api/check", {"name": "x.yaml", "text": text}).json["findings"]
    assert (finding["field"], finding["line"]) == ("parallel.accelerate_config", 7)
    assert "is outside the workspace" in finding["message"]
    planned = server.post("/api/fit", {"config": "configs/shared.yaml", "changes": {}, "price": None})
    assert planned.status == 400
    assert "is outside the workspace" in planned.text


@pytest.mark.parametrize(
    "named", ["/etc/passwd", "../outside.jsonl", ".env", "~/rows.jsonl", "linked-rows.jsonl", "folder"]
)
def test_a_config_that_names_what_is_outside_is_not_looked_at(server: Any, named: str) -> None:
    (server.workspace.parent / "outside.jsonl").write_text('{"prompt": "secret-words", "completion": "x"}\n')
    link = server.workspace / "linked-rows.jsonl"
    inside = server.workspace / "folder" / "rows.jsonl"
    for one in (link, inside):
        one.parent.mkdir(exist_ok=True)
        if not one.is_symlink():
            one.symlink_to(server.workspace.parent / "outside.jsonl")
    answer = server.post("/api/check", {"name": "x.yaml", "text": CONFIG.format(train=named)})
    assert [finding["field"] for finding in answer.json["findings"]] == ["data.train"]
    assert "outside the workspace" in answer.json["findings"][0]["message"]
    assert answer.json["findings"][0]["line"] == 5
    assert "secret-words" not in answer.text


@pytest.mark.parametrize("headers", [
    {"X-CSRF-Token": ""}, {"X-CSRF-Token": "guess"}, {"X-CSRF-Token": "\xe9"}, {"Origin": "http://evil.example"},
    {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
])  # fmt: skip
@pytest.mark.parametrize("target", [
    "/api/save", "/api/check", "/api/edit", "/api/fit", "/api/simulate", "/api/upload?name=made.jsonl", "/api/draft",
    "/api/start", "/api/stop", "/api/chat",
])  # fmt: skip
def test_a_post_from_elsewhere_is_refused(server: Any, target: str, headers: dict[str, str]) -> None:
    before = fingerprints(server.workspace)
    body = {"name": "made.yaml", "text": "x: 1", "known": None, "config": "configs/nano.yaml"}
    answer = server.post(target, body, headers)
    assert answer.status == 403
    assert server.post(target, body, {"Cookie": server.cookie[:-1]}).status == 401
    assert fingerprints(server.workspace) == before


def test_other_sites_may_link_here_but_not_read(server: Any) -> None:
    assert server.get("/runs", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate").status == 200
    assert server.get("/api/watch?path=runs/first", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors").status == 403
    assert server.get("/static/ui.css", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors").status == 403


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_only_reading_and_posting(server: Any, method: str) -> None:
    assert server.ask(method, "/runs").status == 405


def test_a_body_that_is_too_large_is_refused_declared_or_not(server: Any) -> None:
    assert server.post("/api/check", {"name": "x", "text": "x" * MAX_BODY}).status == 413
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    body = chunk * (MAX_BODY // 0x10000 + 1) + b"0\r\n\r\n"
    headers = {"X-CSRF-Token": server.csrf, "Cookie": server.cookie, "Transfer-Encoding": "chunked"}
    parts = urlsplit(server.address)
    with socket.create_connection(("127.0.0.1", parts.port), 30) as raw:
        head = f"POST /api/check HTTP/1.1\r\nHost: {parts.netloc}\r\n" + "".join(
            f"{k}: {v}\r\n" for k, v in headers.items()
        )
        raw.sendall(head.encode() + b"\r\n" + body)
        assert raw.recv(64).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"[" * 100_000, b'{"name": 1, "text": 2}', b"\xff\xfe"])
def test_a_body_that_makes_no_sense_is_refused(server: Any, body: bytes) -> None:
    server.post("/api/check", {"name": "x", "text": ""})
    for target in (
        "/api/check", "/api/save", "/api/edit", "/api/fit", "/api/simulate", "/api/draft", "/api/start", "/api/chat",
    ):  # fmt: skip
        assert server.ask("POST", target, body, {"X-CSRF-Token": server.csrf}).status == 400


LONG = "9" * 100_000
BODIES: dict[str, dict[str, Any]] = {
    "half of a pair in a name": {"name": "x\ud800.yaml"},
    "half of a pair in a text": {"text": "a: \ud800"},
    "half of a pair in a key": {"changes": {"\ud800": 1}},
    "a long name": {"name": f"{LONG}.yaml"},
    "a name that ends early": {"name": "a\0.yaml"},
    "a long value": {"key": "lora.r", "value": LONG, "changes": {"lora.r": LONG}},
    "a long key": {"key": LONG, "changes": {LONG: 1}},
    "a rank of 36 digits": {"key": "lora.r", "value": str(10**35), "changes": {"lora.r": 10**35}},
    "a price of 20 digits": {"price": 10**19},
    "a price that no float holds": {"price": 10**400},
}


@pytest.mark.parametrize("what", BODIES)
def test_no_value_is_a_fault_of_the_server(server: Any, what: str) -> None:
    """A traceback answers 500."""
    usual = {
        "name": "odd.yaml",
        "text": "a: 1",
        "known": "",
        "key": "lora.r",
        "value": "8",
        "config": "",
        "changes": {"model.name_or_path": "surefit/nano"},
        "price": None,
        "rows": "rows.jsonl",
        "model": "",
        "gpu": "",
        "path": "runs/first",
        "variants": ["base"],
        "message": "",
    }
    if "name" in BODIES[what] or "text" in BODIES[what]:
        value = next(iter(BODIES[what].values()))
        usual |= dict.fromkeys(("rows", "model", "gpu", "config", "path"), value)
    for target in ("/api/check", "/api/save", "/api/edit", "/api/fit", "/api/draft", "/api/start", "/api/chat"):
        answer = server.post(target, usual | BODIES[what])
        assert answer.status in (200, 400, 404, 409), (target, answer.text[:300])
    assert not (server.workspace / "odd.yaml").exists()


def test_a_config_is_not_saved_over_what_it_reads(server: Any) -> None:
    """OB: every verb decides by core/output.py what it may write over."""
    space = server.workspace
    (space / "accelerate.yaml").write_text("distributed_type: FSDP\n")
    opened = server.get("/config?open=accelerate.yaml").text
    known = re.search(r'data-known="(\w+)"', opened)
    assert known
    text = (
        "model: {name_or_path: surefit/nano}\ndata: {train: rows.jsonl}\noutput_dir: run\n"
        "parallel: {accelerate_config: accelerate.yaml}\n"
    )
    answer = server.post("/api/save", {"name": "accelerate.yaml", "text": text, "known": known[1]})
    assert (answer.status, "parallel.accelerate_config" in answer.text) == (400, True)
    assert (space / "accelerate.yaml").read_text() == "distributed_type: FSDP\n"
    assert server.post("/api/save", {"name": "mine.yaml", "text": text, "known": None}).status == 200


def test_only_files_are_saved_to(server: Any) -> None:
    space = server.workspace
    (space / "there.yaml").write_text("a: 1\n")
    (space / "also.yaml").symlink_to(space / "there.yaml")
    os.mkfifo(space / "pipe.yaml")
    for name, status in (("there.yaml/", 404), ("new.yaml/", 404), ("pipe.yaml", 404), ("also.yaml", 400)):
        answer = server.post("/api/save", {"name": name, "text": "x: 1", "known": None})
        assert answer.status == status, (name, answer.text)
    assert server.get("/config?open=pipe.yaml").status == 404
    assert (space / "there.yaml").read_text() == "a: 1\n"
    assert not (space / "new.yaml").exists()


def test_requests_that_never_end_do_not_keep_others_out(start: Callable[..., Any], tmp_path: Path) -> None:
    """More connections than the process may have files open."""
    own, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 2_000:
        pytest.skip("this test may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(own, 2_000), most))
    with start(tmp_path) as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (1_024, 1_024))
        address = ("127.0.0.1", urlsplit(server.address).port)
        waiting = [socket.create_connection(address, 30) for _ in range(1_200)]
        for one in waiting:
            with suppress(OSError):  # ended already
                one.sendall(b"GET /runs HTTP/1.1\r\nHo")
        assert server.get("/runs").status == 200
        for one in waiting:
            one.close()
        server.kill()
        assert server.process.stdout.read().endswith("Ctrl-C stops it; runs go on\n")


def test_the_files_of_a_run_are_not_written(server: Any) -> None:
    for name in ("runs/first/new.yaml", "runs/first/resolved.yaml", "runs/first/eval/new.yaml"):
        answer = server.post("/api/save", {"name": name, "text": "x: 1", "known": None})
        assert answer.status == 400
        assert "inside a run" in answer.text


def test_the_report_is_shut_in(server: Any) -> None:
    policy = server.get("/run/report?path=runs/first").headers["Content-Security-Policy"]
    assert policy.startswith("sandbox allow-scripts; default-src 'none'")
    assert "allow-same-origin" not in policy


@pytest.mark.slow
def test_two_hundred_clients_at_once(server: Any) -> None:
    targets = ["/runs", "/api/watch?path=runs/first", "/static/ui.css", "/config", "/run?path=runs/second"]
    with ThreadPoolExecutor(200) as pool:
        statuses = list(pool.map(lambda i: server.get(targets[i % len(targets)]).status, range(200)))
    assert statuses == [200] * 200
    assert server.get("/runs").status == 200


def test_a_token_lets_in_once_as_an_address_then_as_a_cookie(
    start: Callable[..., Any], filled: Callable[[Path], Path], tmp_path: Path
) -> None:
    with start(filled(tmp_path / "space")) as server:
        token = server.token
        assert len(token) >= 32
        for target in (
            "/runs",
            "/api/watch?path=runs/first",
            "/static/ui.css",
            "/runs?token=",
            f"/runs?token={token}x",
        ):
            assert server.get(target, Cookie="").status == 401, target
        answer = server.get(f"/config?open=configs/nano.yaml&token={token}", Cookie="")
        assert answer.status == 303
        assert token not in answer.headers["Location"]
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        let_in = server.get(answer.headers["Location"], Cookie=cookie.partition(";")[0])
        assert let_in.status == 200
        assert token not in let_in.text
        assert server.get("/runs", Cookie=f"{cookie.partition('=')[0]}=wrong").status == 401
        assert (
            server.get("//evil.example/%2e%2e?token=" + token, Cookie="")
            .headers["Location"]
            .startswith("/evil.example")
        )


def test_beyond_loopback_a_token_is_asked_for_and_names_are_not_believed(
    tmp_path: Path, start: Callable[..., Any]
) -> None:
    with start(tmp_path, "--host", "0.0.0.0") as server:
        port = urlsplit(server.address).port
        assert "token=" in server.address
        assert server.ask("GET", "/runs", headers={"Host": f"127.0.0.1:{port}", "Cookie": ""}).status == 401
        assert server.ask("GET", "/runs", headers={"Host": f"evil.example:{port}"}).status == 400


def test_a_killed_server_leaves_the_run_as_it_was(
    start: Callable[..., Any], filled: Callable[[Path], Path], tmp_path: Path
) -> None:
    """The run is under way, its lock held by someone else: by this test."""
    workspace = filled(tmp_path / "space")
    run = RunDir(workspace / "runs" / "first")
    with run.locked("train"):
        before = fingerprints(workspace)
        with start(workspace) as server:
            for target in (
                "/run?path=runs/first",
                "/run/examples?path=runs/first",
                "/runs",
                "/compare?path=runs/first",
            ):
                assert server.get(target).status == 200
            first = server.get("/api/watch?path=runs/first").json
            assert fingerprints(workspace) == before
            append_jsonl(run.metrics, {"step": 401, "loss": 0.5})
            now = fingerprints(workspace)
            news = server.get(f"/api/watch?path=runs/first&from={first['next']}").json
            assert [line["step"] for line in news["lines"]] == [401]
            server.kill()
        assert fingerprints(workspace) == now
        append_jsonl(run.metrics, {"step": 402, "loss": 0.4})


def test_what_cannot_be_served_is_said_in_one_line(tmp_path: Path) -> None:
    def said(*options: str) -> str:
        command = [sys.executable, "-m", "surefit", "ui", "--no-open", *options]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert answer.returncode in (2, 3)
        assert "Traceback" not in answer.stderr
        return answer.stderr

    assert "no such directory" in said("--workspace", str(tmp_path / "nowhere"))
    assert "cannot listen on 203.0.113.1" in said("--host", "203.0.113.1", "--workspace", str(tmp_path))


def test_names_of_hosts() -> None:
    assert is_loopback("127.0.0.53")
    assert not is_loopback("example.org")
    door = AccessPolicy("box.example", 80, "token")
    assert door.knows_host("box.example")
    assert door.knows_host("10.0.0.1:80")
    assert not door.knows_host("box.example.evil:80")
    assert door.admits("token")
    assert not door.admits(None)
