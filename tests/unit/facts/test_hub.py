"""The hub, against a small server that speaks its protocol: what is asked, and what each refusal becomes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from surefit.facts.hub import PATIENCE_S
from surefit.facts.model import catalogue

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {**catalogue()["Qwen/Qwen3-0.6B"]["config"], "architectures": ["SomethingForCausalLM"]}
WEIGHTS = save({"model.embed_tokens.weight": torch.zeros(30, 4), "model.layers.0.q.weight": torch.zeros(8, 4)})
FILES = {
    "open/model": {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": WEIGHTS,
        "tokenizer_config.json": b'{"chat_template": "hello"}',
    },
    "open/pickled": {"config.json": json.dumps(CONFIG).encode(), "pytorch_model.bin": b"x"},
    "open/data": {"README.md": b"no model"},
    "open/damaged": {"config.json": b"{", "model.safetensors": WEIGHTS},
    "closed/model": {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": WEIGHTS},
}


class Hub(BaseHTTPRequestHandler):
    """GET and HEAD of /api/models/NAME and /NAME/resolve/REVISION/FILE."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        type(self).asked.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._info("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main")
        else:
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _info(self, name: str, revision: str) -> None:
        if name not in FILES:
            return self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", COMMIT):
            return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        gated = "manual" if name.startswith("closed/") else False
        siblings = [{"rfilename": file} for file in FILES[name]]
        body = {"id": name, "sha": COMMIT, "gated": gated, "siblings": siblings, "private": False}
        return self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, revision: str, file: str) -> None:
        if name.startswith("closed/"):
            return self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if file not in FILES.get(name, {}):
            return self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        body, headers = (
            FILES[name][file],
            {"X-Repo-Commit": COMMIT, "ETag": f'"{name}-{file}"', "Accept-Ranges": "bytes"},
        )
        wanted = self.headers.get("Range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            part = body[int(first) : int(last or len(body)) + 1]
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(body)}"
            return self._answer(206, part, headers)
        return self._answer(200, body, headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


ASK = """
import json, sys
from surefit.core.errors import SureFitError
from surefit.facts.model import model_facts
answers = []
for name, revision in json.loads(sys.argv[1]):
    try:
        facts = model_facts(name, revision)
        answers.append({key: getattr(facts, key) for key in ("source", "parameters", "linear_modules", "chat_template",
                        "pickle_only", "gated", "has_weights", "weight_bytes")})
    except SureFitError as error:
        answers.append(error.as_dict())
assert not {"torch", "transformers"} & set(sys.modules)
print(json.dumps(answers))
"""


def ask(endpoint: str, cache: Path, *models: tuple[str, str | None], **environment: str) -> list[dict[str, Any]]:
    """model_facts in another process: huggingface_hub reads its settings once, when it is imported."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS"))}
    settings = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(models)],
        env=clean | settings | environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_facts_and_refusals(hub: str, tmp_path: Path) -> None:
    names = ["open/model", "open/pickled", "open/data", "open/damaged", "closed/model", "open/nothing"]
    whole, pickled, no_config, damaged, gated, absent, revision = ask(
        hub, tmp_path, *[(name, None) for name in names], ("open/model", "v9")
    )
    assert whole == {
        "source": "hub", "parameters": 152, "linear_modules": {"model.layers.0.q": [8, 4]}, "chat_template": "hello",
        "pickle_only": False, "gated": False, "has_weights": False, "weight_bytes": 608,
    }  # fmt: skip
    assert (pickled["pickle_only"], pickled["parameters"]) == (True, None)
    assert "no config.json" in no_config["message"]
    assert "not valid JSON" in damaged["message"]
    assert "gated" in gated["message"]
    assert "https://huggingface.co/closed/model" in gated["help"]
    assert "'open/nothing'" in absent["message"]
    assert "no revision 'v9'" in revision["message"]
    assert {answer.get("error") for answer in (no_config, damaged, gated, absent, revision)} == {"ModelError"}


def test_weights_are_never_downloaded(hub: str, tmp_path: Path) -> None:
    Hub.asked.clear()
    ask(hub, tmp_path, ("open/model", None))
    weights = [line for line in Hub.asked if line.startswith("GET") and "model.safetensors" in line]
    assert weights
    assert all("bytes=" in line for line in weights)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_hub_that_does_not_answer_is_the_machine_s_problem(tmp_path: Path) -> None:
    (answer,) = ask("http://127.0.0.1:9", tmp_path, ("open/model", None))
    assert (answer["error"], answer["exit_code"]) == ("MachineError", 3)
    assert "cannot be reached" in answer["message"]


def test_the_token_is_never_in_a_message(tmp_path: Path) -> None:
    token = "hf_" + "a1B2" * 8
    (answer,) = ask("http://127.0.0.1:9", tmp_path, ("open/model", None), HF_TOKEN=token)
    assert token not in json.dumps(answer)


@pytest.mark.slow
def test_a_check_does_not_wait_for_a_hub_that_never_answers(tmp_path: Path) -> None:
    """Connections are taken and nothing is ever said: the check says so once, and is done in seconds."""
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen(16)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS"))}
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "HF_HOME": str(tmp_path)}
    (tmp_path / "axolotl.yml").write_text(
        "base_model: nobody/nothing-7b\nsequence_len: 512\nmicro_batch_size: 1\nlearning_rate: 1.0e-4\n"
        "datasets: [{path: nobody/rows, type: alpaca}]\ngradient_accumulation_steps: 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "surefit", "check", "axolotl.yml", "--json"],
        cwd=tmp_path, env=clean | settings, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    silent.close()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["seconds"] < PATIENCE_S + 4, "one wait, and the rules"
    assert done.stderr.count("did not answer") == 1
