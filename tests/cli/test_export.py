"""`surefit export`, `push` and `serve-check`, from a run of three steps."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from surefit.core.rundir import RunDir, read_json, read_jsonl


class Model(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that knows the answers by heart."""

    answers: dict[str, str] = {}  # noqa: RUF012

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._send({"data": [{"id": "one", "owned_by": "vllm"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = asked["messages"][-1]["content"]
        text = next((text for part, text in self.answers.items() if part in said), "nothing that the run said")
        message = {"message": {"content": text}, "finish_reason": "stop"}
        self._send({"choices": [message], "usage": {"completion_tokens": 3}})


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_from_a_run_to_the_hub_and_to_a_server(surefit: Any, config: Path, url: str) -> None:
    run = RunDir(Path("runs/one"))
    assert surefit("train", config).code == 0
    refused = surefit("export", run.path)
    assert (refused.code, "has no certificate" in refused.text) == (1, True)
    assert surefit("merge", run.path).code == 0

    dry = surefit("export", run.path, "--dry-run", "--json").json
    assert (dry["dry_run"], "model.safetensors" in dry["files"]) == (True, True)
    assert not run.exports.exists()
    assert surefit("push", run.path, "me/one", "--dry-run").code == 2

    made = surefit("export", run.path, "--json")
    assert made.code == 0, made.text
    card = (run.exports / "hub/README.md").read_text()
    assert "It has not been scored" in card
    assert str(Path.cwd()) not in card
    assert read_json(run.exports / "hub/certificate.json")["passed"]

    alone = surefit("export", run.path, "--format", "adapter", "--json")
    assert alone.code == 0, alone.text
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= alone.json["files"].keys()
    assert "library_name: peft" in (run.exports / "adapter/README.md").read_text()
    assert surefit("push", run.exports / "adapter", "me/one", "--dry-run").code == 0
    assert "without its base" in surefit("serve-check", run.exports / "adapter").text

    pushed = surefit("push", run.path, "me/one", "--dry-run", "--json").json
    assert (pushed["private"], pushed["url"]) == (True, None)
    assert set(pushed["files"]) == {*made.json["files"], "export.json"}

    said = surefit("serve-check", run.path, "--json").json
    vllm = said["commands"]["vLLM"][0]
    assert "--dtype float32 --max-model-len 2048" in vllm
    assert any("--enable-lora --max-lora-rank 16" in line[0] for line in said["commands"].values())
    beside = [line[0] for name, line in said["commands"].items() if "the base with the adapter" in name]
    assert len(beside) == 2
    assert all("/adapter/chat_template.jinja" in line.partition("--chat-template ")[2] for line in beside)
    assert said["facts"]["stop tokens"] == "<|end|> (1)"

    scored = surefit("evaluate", run.path, "--variant", "merged", "--set", "evaluate.max_examples=4")
    assert scored.code in (0, 1), scored.text
    lines = read_jsonl(run.eval / "eval/merged.predictions.jsonl")
    for one in lines:  # three steps teach nothing: the answers are what a server would have to repeat
        one["truncated"], one["text"] = False, f"said to {one['where']}"
    (run.eval / "eval/merged.predictions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    rows = read_jsonl(Path("rows.jsonl"))
    Model.answers = {f"{rows[int(one['where'].rpartition(':')[2]) - 1]['query']}": one["text"] for one in lines}
    same = surefit("serve-check", run.path, "--url", url, "--json")
    assert (same.code, same.json["same"]) == (0, 3), same.text
    Model.answers = {}
    other = surefit("serve-check", run.path, "--url", url)
    assert (other.code, "DIFFERENT" in other.stdout) == (1, True)


def test_formats_that_this_machine_cannot_make(surefit: Any, tmp_path: Path) -> None:
    assert surefit("export", tmp_path, "--format", "awq").code == 2
    answer = surefit("export", tmp_path)
    assert (answer.code, "E8031" in answer.text) == (2, True)
    assert surefit("serve-check", tmp_path).code == 2
