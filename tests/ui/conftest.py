"""A real `surefit ui` process over a workspace of its own."""

from __future__ import annotations

import http.client
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest

pytest.importorskip("uvicorn", reason="the extra ui is not installed")
pytest.importorskip("starlette", reason="the extra ui is not installed")

REPOSITORY = Path(__file__).parents[2]
MAKE = runpy.run_path(str(REPOSITORY / "tests" / "unit" / "report" / "make_run.py"))
OTHER_WORKER = """
import sys
from surefit.cli import app, ui
code, own_command = sys.argv.pop(1), ui.own_command
ui.own_command = lambda *words: [sys.executable, "-c", code] if words[0] == "chat-worker" else own_command(*words)
app.main()
"""
REPORT = "<!doctype html><title>A report</title><h1>The verdict</h1><script>document.title = 'ran'</script>"


@dataclass
class Answer:
    """What the server said."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    """A running server, and a client that sends exactly what it is told to."""

    process: subprocess.Popen[str]
    address: str
    workspace: Path
    _csrf: str = field(default="")

    @property
    def origin(self) -> str:
        parts = urlsplit(self.address)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def token(self) -> str:
        return dict(parse_qsl(urlsplit(self.address).query))["token"]

    @property
    def cookie(self) -> str:
        return f"surefit_{urlsplit(self.address).port}={self.token}"

    def ask(self, method: str, target: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        parts = urlsplit(self.address)
        connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=60)
        try:
            connection.putrequest(method, target, skip_host=True)
            sent = {"Host": parts.netloc, "Cookie": self.cookie, **(headers or {})}
            if body is not None:
                sent.setdefault("Content-Length", str(len(body)))
            for name, value in sent.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def get(self, target: str, **headers: str) -> Answer:
        return self.ask("GET", target, headers={name.replace("_", "-"): value for name, value in headers.items()})

    def post(self, target: str, value: Any, headers: dict[str, str] | None = None) -> Answer:
        """As one of our pages posts."""
        sent = {"X-CSRF-Token": self.csrf, "Content-Type": "application/json", **(headers or {})}
        return self.ask("POST", target, json.dumps(value).encode(), sent)

    def upload(self, name: str, body: bytes, headers: dict[str, str] | None = None) -> Answer:
        """As one of our pages sends a file."""
        target = f"/api/upload?{urlencode({'name': name})}"
        return self.ask("POST", target, body, {"X-CSRF-Token": self.csrf, **(headers or {})})

    @property
    def csrf(self) -> str:
        if not self._csrf:
            found = re.search(r'name="csrf" content="([^"]+)"', self.get("/rows").text)
            assert found
            self._csrf = found[1]
        return self._csrf

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


@contextmanager
def serving(workspace: Path, *options: str, worker: str = "") -> Iterator[Server]:
    """Start `surefit ui`, and end it.

    Args:
        worker: the code of a program that answers in the chat, in place of `surefit chat-worker`.
    """
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    program = ["-c", OTHER_WORKER, worker] if worker else ["-m", "surefit"]
    command = [sys.executable, *program, "ui", "--no-open", "--port", "0", "--workspace", str(workspace)]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        assert process.stdout
        said = process.stdout.readline()
        found = re.search(r"http://\S+", said)
        assert found, said
        yield Server(process, found[0], workspace)
    finally:
        process.kill()
        process.wait(30)


def chat_rows(count: int = 60) -> bytes:
    """Rows of a support chat, as somebody brings them."""
    things = ("kettle", "toaster", "lamp", "fan", "radio")
    lines = []
    for n in range(count):
        thing, part = things[n % 5], n % 12
        answer = f"Open the {thing}, take out part {part}, and put in the new one."
        turns = [{"role": "user", "content": f"How do I replace part {part} of the {thing}?"},
                 {"role": "assistant", "content": answer}]  # fmt: skip
        lines.append(json.dumps({"messages": turns}))
    return ("\n".join(lines) + "\n").encode()


def fill(workspace: Path) -> Path:
    """A workspace with a config, two runs and a secret."""
    (workspace / "configs").mkdir(parents=True)
    shutil.copy(REPOSITORY / "configs" / "function-calling-nano.yaml", workspace / "configs" / "nano.yaml")
    for name in ("first", "second"):
        run = MAKE["write_run"](workspace / "runs" / name)
        run.report.write_text(REPORT)
    (workspace / ".env").write_text(f"HF_TOKEN=hf_{'x' * 24}\n")
    (workspace / "notes.txt").write_text("not for the page\n")
    return workspace


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(fill(tmp_path_factory.mktemp("work") / "space")) as running:
        yield running


@pytest.fixture(scope="session")
def start() -> Callable[..., Any]:
    return serving


@pytest.fixture(scope="session")
def rows() -> bytes:
    return chat_rows()


@pytest.fixture(scope="session")
def filled() -> Callable[[Path], Path]:
    return fill
