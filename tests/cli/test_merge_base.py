"""An adapter whose base model cannot be had: the adapter's file, the base, the cause, and what to type."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ANSWERS = {
    "someone/gated": (403, "GatedRepo"),
    "someone/private": (401, ""),
    "someone/renamed": (404, "RepoNotFound"),
    "someone/broken": (500, ""),
}


class Hub(BaseHTTPRequestHandler):
    """Gives nothing away, each name in its own way."""

    def do_GET(self) -> None:
        status, code = next((answer for name, answer in ANSWERS.items() if name in self.path), (404, "RepoNotFound"))
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "2")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"{}")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


SCRIPT = """
import json, sys
from typer.testing import CliRunner
from surefit.cli.app import app
said = [CliRunner().invoke(app, ["merge", *arguments]) for arguments in json.loads(sys.argv[1])]
print(json.dumps([[one.exit_code, one.stderr] for one in said]))
"""


def merges(endpoint: str, folder: Path, *calls: list[str], **environment: str) -> list[tuple[int, str]]:
    """What merge says, in another process: huggingface_hub reads its settings once, when it is imported."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS"))}
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hub"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(calls)],
        env=clean | settings | environment, cwd=folder, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [(code, text) for code, text in json.loads(done.stdout.splitlines()[-1])]


def adapter(folder: Path, base: str) -> str:
    path = folder / base.replace("/", "-").strip("-")
    path.mkdir()
    settings = {"base_model_name_or_path": base, "peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path.name


@pytest.mark.slow
def test_what_the_hub_refuses_is_said_of_the_adapters_file(hub: str, tmp_path: Path) -> None:
    names = [*ANSWERS, "/gone/base"]
    folders = [adapter(tmp_path, name) for name in names]
    said = merges(hub, tmp_path, *[[folder] for folder in folders], [folders[0], "--base", "someone/renamed"])
    assert [code for code, _ in said] == [2] * 6
    for name, folder, (_, text) in zip(names, folders, said, strict=False):
        place = rf"{re.escape(str(folder))}/adapter_config\.json: error\[E\d+\] base_model_name_or_path"
        assert re.search(rf"{place}: its base model {name} ", text)
        assert "or name a copy of it with --base" in text
    gated, private, renamed, broken, gone, chosen = (text for _, text in said)
    assert "is gated" in gated
    assert "https://huggingface.co/someone/gated" in gated
    assert "HF_TOKEN" in gated
    assert "is private, or the hub rejected the token (401)" in private
    assert "HF_TOKEN" in private
    assert "is not on the hub, or is private" in renamed
    assert "whether it was renamed" in renamed
    assert "the hub returned an unexpected response" in broken or "the hub cannot be reached" in broken
    assert "no such directory" in gone
    assert "] --base: is not on the hub" in chosen


@pytest.mark.slow
@pytest.mark.parametrize("offline", [True, False])
def test_without_a_network(tmp_path: Path, offline: bool) -> None:
    folder = adapter(tmp_path, "someone/base")
    environment = {"HF_HUB_OFFLINE": "1"} if offline else {}
    ((code, text),) = merges("http://127.0.0.1:9", tmp_path, [folder], **environment)
    assert code == 2
    place = rf"{re.escape(str(folder))}/adapter_config\.json: error\[E\d+\] base_model_name_or_path"
    assert re.search(f"{place}: its base model someone/base is not in the", text)
    assert "the hub cannot be reached or HF_HUB_OFFLINE is set" in text
    assert "or name a copy of it with --base" in text
