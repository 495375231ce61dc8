"""The page's chat: a process of its own that streams, is cut short, and ends when idle or when a run starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from surefit.core.rundir import RunDir, directory_atomic
from surefit.ui.chat import LONGEST_MESSAGE, weights_version
from surefit.ui.chat_process import ChatProcess
from surefit.ui.security import LOCAL_ONLY, MAX_BODY, AccessPolicy, SecurityMiddleware

ECHO = """
import json, os, sys, time
def say(**record): print(json.dumps(record), flush=True)
if "broken" in sys.argv: say(exit_code=2, message="no such model", help="train first"); sys.exit(2)
if "dead" in sys.argv: sys.exit(9)
print("a library's own line", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    try:
        if request["message"] == "long": time.sleep(60)
        for variant in sys.argv[2:]: say(variant=variant, text=f"{request['message']} {os.getpid()}")
        say(done=True, turns=request["turns"])
    except KeyboardInterrupt: say(done=True, interrupted=True)
"""


def echo(run: str, variants: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", ECHO, run, *variants]


async def ask(
    chat: ChatProcess, message: str, run: str = "runs/x", *variants: str, weights: str = "1", turns: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    async with chat.lock:
        process, is_new = await chat.open(run, variants or ("base", "merged"), weights)
    lines = [json.loads(line) async for line in chat.answer(process, message, turns, loading=is_new)]
    chat.settle()
    while chat.tasks:
        await asyncio.gather(*chat.tasks)
    return lines


def test_answers_are_streamed_by_one_process_until_it_is_idle(tmp_path: Path) -> None:
    async def talk() -> None:
        chat = ChatProcess(tmp_path, echo, idle_seconds=5)  # longer than a busy machine takes between messages
        first = await ask(chat, "a\nb")
        assert [line.get("variant") for line in first] == [None, "base", "merged", None]
        assert (first[0], first[-1]["done"]) == ({"loading": True}, True)
        assert chat.process
        pid = chat.process.pid
        assert (await ask(chat, "c"))[:2] == [{"loading": False}, {"variant": "base", "text": f"c {pid}"}]
        other = await ask(chat, "d", "runs/x", "merged")
        assert other[1]["text"] != f"d {pid}"
        process = chat.process
        assert process
        await asyncio.wait_for(process.wait(), 20)
        assert chat.process is None

    asyncio.run(talk())


def test_an_answer_that_is_left_is_cut_short_and_the_process_stays(tmp_path: Path) -> None:
    async def talk() -> None:
        chat = ChatProcess(tmp_path, echo)
        await ask(chat, "a")
        process = chat.process
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ask(chat, "long"), 0.5)
        chat.settle()
        await asyncio.gather(*chat.tasks)
        assert process
        assert (await ask(chat, "b"))[1]["text"] == f"b {process.pid}"
        await chat.end()

    asyncio.run(talk())


def test_a_process_that_ends_is_said_and_the_next_message_starts_another(tmp_path: Path) -> None:
    async def talk() -> None:
        chat = ChatProcess(tmp_path, echo)
        failed = await ask(chat, "a", "broken")
        assert (failed[-1]["error"], failed[-1]["help"]) == ("no such model", "train first")
        assert "exit code 9" in (await ask(chat, "a", "dead"))[-1]["error"]
        assert (await ask(chat, "a"))[-1]["done"]
        ending = asyncio.create_task(ask(chat, "long"))
        await asyncio.sleep(0.3)
        await chat.end("A run has started.")
        assert (await ending)[-1]["error"] == "A run has started."
        await chat.end()

    asyncio.run(talk())


def test_another_process_answers_after_a_training_and_gets_the_conversation(tmp_path: Path) -> None:
    async def talk() -> None:
        chat = ChatProcess(tmp_path, echo)
        turns = [["Hi", {"base": "Hello", "merged": "Hey"}]]
        assert (await ask(chat, "a"))[-1]["turns"] == []
        assert chat.process
        first = chat.process.pid
        told = await ask(chat, "b", weights="2", turns=turns)
        assert (told[0], told[-1]["turns"]) == ({"loading": True}, turns)
        assert chat.process.pid != first
        await chat.end()
        assert (await ask(chat, "c", weights="2", turns=turns))[-1]["turns"] == turns, "no process remembers anything"
        await chat.end()

    asyncio.run(talk())


def test_an_end_while_the_process_is_being_started_is_not_lost(tmp_path: Path) -> None:
    async def talk() -> None:
        chat = ChatProcess(tmp_path, echo)
        asking = asyncio.create_task(ask(chat, "long"))
        await asyncio.sleep(0)
        assert chat.lock.locked()
        async with chat.lock:
            await chat.end("A run has started.")
            assert chat.process is None
        assert (await asking)[-1]["error"] == "A run has started."

    asyncio.run(talk())


def test_a_process_that_cannot_be_started_does_not_stay_busy(tmp_path: Path) -> None:
    async def talk() -> None:
        chat = ChatProcess(tmp_path, lambda run, variants: [str(tmp_path / "none")])
        with pytest.raises(FileNotFoundError):
            await ask(chat, "a")
        assert not chat.busy

    asyncio.run(talk())


def test_the_weights_have_another_version_once_they_are_trained_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with directory_atomic(run.adapter) as folder:
        (folder / "adapter_model.safetensors").write_bytes(b"1")
    first = weights_version(run)
    run.note("evaluate", "started")
    assert weights_version(run) == first
    with directory_atomic(run.adapter) as folder:
        (folder / "adapter_model.safetensors").write_bytes(b"2")
    assert weights_version(run) != first


def test_the_worker_answers_with_the_models_of_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    text = "recipe: chat\nmodel: {name_or_path: surefit/nano}\ndata: {train: rows.jsonl}\noutput_dir: run\n"
    run.resolved.write_text(text + "evaluate: {max_new_tokens: 4}\n")
    row = {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"},
                        {"role": "assistant", "content": "Hello"}]}  # fmt: skip
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 30)
    turns = [["What is a kettle?", {"base": "A pot."}]]
    messages = [
        {"message": "Hi\nthere", "turns": []},
        {"message": "Hi\nthere", "turns": turns},
        {"message": "Hi\nthere", "turns": []},
        {"message": "x " * 50_000, "turns": []},
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "surefit", "chat-worker", "./run", "--variant", "base", "--json"], cwd=tmp_path,
        input="".join(json.dumps(message) + "\n" for message in messages), capture_output=True, text=True, timeout=300,
        check=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert any("Be short." in line.get("note", "") for line in lines)
    assert all(line["variant"] == "base" and line["text"] for line in lines if "variant" in line)
    first, told, again, last = (line for line in lines if "done" in line)
    assert (first["cut"], first["full"]) == (["base"], [])
    assert first["answers"]["base"] == again["answers"]["base"] != told["answers"]["base"], "it answers the turns, too"
    streamed = "".join(line["text"] for line in lines[: lines.index(first)] if "variant" in line)
    assert first["answers"] == {"base": streamed}
    assert last["full"] == ["base"], "a message longer than the context is said, and is no crash"


@pytest.mark.parametrize(("change", "status"), [
    ({"message": "x" * (LONGEST_MESSAGE + 1)}, 400), ({"message": " "}, 400), ({"message": 1}, 400),
    ({"message": "x" * MAX_BODY}, 413), ({"variants": ["served"]}, 400), ({"variants": []}, 400),
    ({"variants": "base"}, 400), ({"variants": [["base"]]}, 400), ({"path": "runs/none"}, 404), ({"path": "../x"}, 404),
    ({"turns": None}, 400), ({"turns": "Hi"}, 400), ({"turns": [1]}, 400), ({"turns": [["Hi"]]}, 400),
    ({"turns": [[1, {}]]}, 400), ({"turns": [["Hi", {"base": 1}]]}, 400), ({"turns": [["Hi", {"served": "x"}]]}, 400),
    ({"turns": [["Hi", {}]], "variants": []}, 400), ({"turns": [["Hi", {"base": "x" * MAX_BODY}]]}, 413),
])  # fmt: skip
def test_a_message_that_makes_no_sense_starts_nothing(server: Any, change: dict[str, Any], status: int) -> None:
    usual = {"path": "runs/first", "variants": ["base"], "message": "Hi", "turns": []}
    assert server.post("/api/chat", usual | change).status == status
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    assert children.strip() == ""


@pytest.mark.parametrize(("line", "said"), [
    ("model: {name_or_path: surefit/nano, trust_remote_code: true}", "trust_remote_code"),
    ("model: {name_or_path: /models/llama}", "outside"), ("model: {name_or_path: out}", "outside"),
])  # fmt: skip
def test_a_model_that_must_not_be_loaded_is_not(server: Any, line: str, said: str) -> None:
    if not (server.workspace / "out").is_symlink():
        (server.workspace / "out").symlink_to("/etc")
    run = RunDir(server.workspace / "runs" / f"not-loaded-{len(line)}")
    run.create()
    run.resolved.write_text(f"recipe: chat\n{line}\ndata: {{train: rows.jsonl}}\noutput_dir: {run.path.name}\n")
    body = {"path": f"runs/{run.path.name}", "variants": ["base"], "message": "Hi", "turns": []}
    answer = server.post("/api/chat", body)
    assert answer.status == 400
    assert said in answer.json["error"]
    assert f"surefit chat runs/{run.path.name}" in answer.json["help"]


@pytest.mark.parametrize(
    ("client", "status"), [("192.0.2.7", 403), ("::ffff:192.0.2.7", 403), ("", 403), ("127.0.0.1", 404), ("::1", 404)]
)
@pytest.mark.parametrize("path", LOCAL_ONLY)
def test_only_this_machine_stores_and_starts(path: str, client: str, status: int) -> None:
    door = AccessPolicy("0.0.0.0", 80, "token")
    sent: list[dict[str, Any]] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"192.0.2.1"), (b"cookie", b"surefit_80=token"), (b"x-csrf-token", door.csrf.encode())]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": headers,
        "query_string": b"",
        "client": (client, 1),
    }
    asyncio.run(SecurityMiddleware(inner, door)(scope, receive, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == status
