"""Rows that are brought through the page: what is stored, under which name, and the config that is made for them."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.exceptions import HTTPException

from surefit.ui.rows import MAX_UPLOAD, UPLOADS_AT_ONCE, store_upload
from surefit.ui.workspace import STATE, Workspace


@pytest.fixture
def space(start: Callable[..., Any], tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "space").mkdir()
    with start(tmp_path / "space") as running:
        yield running


def names(workspace: Path) -> list[str]:
    return sorted(path.name for path in workspace.iterdir() if path.name != STATE)


def parts(workspace: Path) -> list[str]:
    """What uploads have left in the page's own folder."""
    folder = workspace / STATE
    return [path.name for path in folder.iterdir() if path.suffix == ".part"] if folder.is_dir() else []


def test_a_dropped_file_gets_the_config_of_init(space: Any, rows: bytes) -> None:
    answer = space.upload("support.jsonl", rows)
    assert (answer.status, answer.json) == (200, {"name": "support.jsonl"})
    assert (space.workspace / "support.jsonl").read_bytes() == rows
    draft = space.post("/api/draft", {"rows": "support.jsonl", "model": "surefit/nano", "gpu": "auto"}).json
    command = ["init", "--data", "support.jsonl", "--model", "surefit/nano", "-o", "init.yaml", "--json"]
    printed = subprocess.run(
        [sys.executable, "-m", "surefit", *command], cwd=space.workspace, capture_output=True, text=True, check=True
    ).stdout
    expected = json.loads(printed.splitlines()[-1])
    assert (draft["text"], draft["seen"]) == (expected["config"], expected["seen"])
    assert draft["text"].count("\n") == 12
    assert (draft["columns"], draft["name"], draft["command"]) == (
        ["messages"],
        "support.yaml",
        "surefit run support.yaml",
    )
    assert "60 rows, messages; the longest of 60 sampled rows" in draft["seen"][0]
    (space.workspace / "support.yaml").write_text("a: 1\n")
    again = {"rows": "support.jsonl", "model": "", "gpu": "4090"}
    second = space.post("/api/draft", again).json
    assert (second["name"], len(second["proposals"])) == ("support-2.yaml", 3)
    assert "output_dir: runs/support-2 " in second["text"], "a second config does not share the run of the first"
    tight = space.post(
        "/api/draft", {"rows": "support.jsonl", "model": "Qwen/Qwen2.5-7B-Instruct", "gpu": "7.2GB"}
    ).json
    assert "may not fit" in tight["seen"][1], "the formula cannot tell, and the server does not simulate"
    loaded = Path(f"/proc/{space.process.pid}/maps").read_text()
    assert "torch" not in loaded


def test_an_uploaded_text_file_stays_in_the_list(space: Any, rows: bytes) -> None:
    (space.workspace / "licenses").mkdir()
    (space.workspace / "licenses" / "LICENSE.txt").write_text("not rows\n")
    assert space.upload("poems.txt", b"A line.\n" * 30).status == 200
    page = space.get("/rows").text
    assert "<option>poems.txt</option>" in page
    assert "LICENSE.txt" not in page


def test_the_name_of_a_packed_file_has_no_ending_left(space: Any, rows: bytes) -> None:
    name = space.upload("m2.jsonl.gz", gzip.compress(rows)).json["name"]
    draft = space.post("/api/draft", {"rows": name, "model": "surefit/nano", "gpu": "auto"}).json
    assert (name, draft["name"]) == ("m2.jsonl.gz", "m2.yaml")
    assert "output_dir: runs/m2 " in draft["text"]


def test_nothing_is_written_over(space: Any, rows: bytes) -> None:
    outside = space.workspace.parent / "outside.jsonl"
    outside.write_text("mine\n")
    (space.workspace / "a.jsonl").symlink_to(outside)
    (space.workspace / "a-2.jsonl").write_text("also mine\n")
    assert space.upload("a.jsonl", rows).json == {"name": "a-3.jsonl"}
    assert space.upload("a.jsonl", rows).json == {"name": "a-3.jsonl"}, "the same file again is the same file"
    assert space.upload("a.jsonl", rows + b"{}\n").json == {"name": "a-4.jsonl"}
    assert (outside.read_text(), (space.workspace / "a-2.jsonl").read_text()) == ("mine\n", "also mine\n")
    assert names(space.workspace) == ["a-2.jsonl", "a-3.jsonl", "a-4.jsonl", "a.jsonl"]
    assert parts(space.workspace) == []


@pytest.mark.parametrize(("name", "stored"), [
    ("../../x.jsonl", "x.jsonl"), ("/etc/x.csv", "x.csv"), ("..\\x.JSONL.gz", "x.jsonl.gz"), ("-rf.jsonl", "rf.jsonl"),
    ("my rows (2).jsonl", "my-rows-2.jsonl"), ("a\u202eb\0c.jsonl", "a-b-c.jsonl"), ("🙂.jsonl", "rows.jsonl"),
    ("*?[x]{}$(rm).jsonl", "x-rm.jsonl"), (".env.jsonl", "env.jsonl"), ("ü" * 300 + ".jsonl", "ü" * 40 + ".jsonl"),
    ("x.exe", None), ("x.yaml", None), ("", None), (".jsonl/", None), ("x.jsonl\n.sh", None),
])  # fmt: skip
def test_a_name_needs_no_quotes_and_no_trust(server: Any, name: str, stored: str | None) -> None:
    before = names(server.workspace)
    answer = server.upload(name, f'{{"text": "{name.encode().hex()}"}}\n'.encode())
    assert (answer.status, answer.json.get("name")) == ((200, stored) if stored else (400, None)), answer.text
    new = set(names(server.workspace)) - set(before)
    assert new == ({stored} if stored else set())
    for file in new:
        (server.workspace / file).unlink()


def test_a_file_above_the_bound_is_refused_before_it_is_read(server: Any) -> None:
    before = names(server.workspace)
    answer = server.upload("big.jsonl", b"", {"Content-Length": str(MAX_UPLOAD + 1)})
    assert answer.status == 413
    assert "into the workspace" in answer.json["error"]
    assert answer.headers["Connection"] == "close", "its bytes are not read as the next request"
    assert server.upload("empty.jsonl", b"").status == 400
    assert names(server.workspace) == before
    assert parts(server.workspace) == []


def send_half(server: Any, name: str) -> socket.socket:
    """Begin an upload of 1,000,000 bytes, and send half of them."""
    address = urlsplit(server.address)
    raw = socket.create_connection(("127.0.0.1", address.port), 30)
    head = (
        f"POST /api/upload?name={name} HTTP/1.1\r\nHost: {address.netloc}\r\nCookie: {server.cookie}\r\n"
        f"X-CSRF-Token: {server.csrf}\r\nContent-Length: 1000000\r\n\r\n"
    )
    raw.sendall(head.encode() + b"x" * 500_000)
    return raw


def test_an_upload_that_stops_leaves_nothing_and_a_slow_one_holds_nobody_up(space: Any, rows: bytes) -> None:
    slow = [send_half(space, f"slow-{n}.jsonl") for n in range(UPLOADS_AT_ONCE)]
    wait_until(lambda: len(parts(space.workspace)) == UPLOADS_AT_ONCE)
    assert space.get("/rows").status == 200
    assert space.upload("one-more.jsonl", rows).status == 409
    for raw in slow:
        raw.close()
    wait_until(lambda: parts(space.workspace) == [])
    assert names(space.workspace) == []
    assert space.upload("now.jsonl", rows).status == 200


def wait_until(is_so: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_upload_that_pauses_or_grows_is_ended(tmp_path: Path) -> None:
    async def pausing() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.sleep(30)

    async def growing() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 100

    space = Workspace(tmp_path)
    with pytest.raises(TimeoutError):
        asyncio.run(store_upload(space, "x.jsonl", pausing(), idle_seconds=0.05))
    with pytest.raises(HTTPException) as caught:
        asyncio.run(store_upload(space, "x.jsonl", growing(), limit=1_000))
    assert caught.value.status_code == 413
    assert (names(tmp_path), parts(tmp_path)) == ([], [])


def test_what_a_killed_server_left_is_removed_later(tmp_path: Path) -> None:
    space = Workspace(tmp_path)
    old, new = (space.state_folder() / name for name in ("old.part", "new.part"))
    old.write_text("x")
    new.write_text("x")
    os.utime(old, (0, 0))
    space.state_folder()
    assert (old.exists(), new.exists()) == (False, True)


def test_a_link_in_place_of_the_page_s_own_folder_is_not_followed(space: Any, rows: bytes) -> None:
    elsewhere = space.workspace.parent / "elsewhere"
    elsewhere.mkdir()
    (space.workspace / STATE).symlink_to(elsewhere)
    assert space.upload("x.jsonl", rows).status == 400
    assert (list(elsewhere.iterdir()), names(space.workspace)) == ([], [])


@pytest.mark.parametrize("model", ["/etc", "../models", "linked", "a\0b", "x" * 3_000, "~/model", "https://a.org/m"])
def test_a_model_outside_is_not_looked_at(server: Any, rows: bytes, model: str) -> None:
    (server.workspace / "mine.jsonl").write_bytes(rows)
    if not (server.workspace / "linked").is_symlink():
        (server.workspace / "linked").symlink_to("/etc")
    answer = server.post("/api/draft", {"rows": "mine.jsonl", "model": model, "gpu": "auto"})
    assert answer.status == 400, answer.text


@pytest.mark.parametrize(("content", "code"), [(b'{"text": "a"}\n', 400), (b"\xff\xfe\0", 400), (b"{" * 10_000, 400)])
def test_rows_that_cannot_be_used_are_said(server: Any, content: bytes, code: int) -> None:
    name = server.upload("odd.jsonl", content).json["name"]
    answer = server.post("/api/draft", {"rows": name, "model": "surefit/nano", "gpu": "auto"})
    assert (answer.status, bool(answer.json["error"])) == (code, True)
