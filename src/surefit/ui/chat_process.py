"""The process that answers in the page's chat (`cli/chat_worker.py`). It alone has the models, so that this server
never imports torch; it reads messages and writes answers, a line of JSON each.

The first message starts it. It ends when it was idle for a while, when a run starts, when its models were trained
again, and with the server, which closes its input. It may therefore be another one at every message: each comes with
the conversation before it, which only the page keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

IDLE_SECONDS = 600.0
"""After so long without a message the process ends, and frees the memory of its models."""
CUT_SECONDS, END_SECONDS = 20.0, 5.0
"""Longest wait for an answer to be cut short, and for the process to end."""
LINE_BYTES = 1 << 20


@dataclass
class ChatProcess:
    """The process that answers, if there is one.

    Attributes:
        command: (a run directory, its variants) → the command.
        models: the run, the variants and the version of their weights that the process has loaded.
        lock: held to start or end the process, and while a run starts: no message then loads a model beside it.
        busy: whether an answer is being written.
        settled: whether the process has written all of the last answer.
        ended_because: why the process was ended in the middle of an answer.
    """

    root: Path
    command: Callable[[str, Sequence[str]], list[str]]
    idle_seconds: float = IDLE_SECONDS
    process: asyncio.subprocess.Process | None = None
    models: tuple[str, ...] = ()
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    busy: bool = False
    settled: bool = True
    ended_because: str = ""
    timer: asyncio.TimerHandle | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def open(self, run: str, variants: Sequence[str], weights: str) -> tuple[asyncio.subprocess.Process, bool]:
        """Take the process for one answer, and return it and whether it had to be started to have these models.

        The caller holds `lock`, and has seen that it is not `busy`.
        """
        self.busy, models = True, (run, *variants, weights)
        if self.process is not None and self.process.returncode is None and self.models == models:
            return self.process, False
        try:
            await self.end()
            self.process = await asyncio.create_subprocess_exec(
                *self.command(run, variants), cwd=self.root, stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, limit=LINE_BYTES,
                start_new_session=True,
            )  # fmt: skip
        except BaseException:
            self.busy = False
            raise
        self.models, self.ended_because = models, ""
        return self.process, True

    async def answer(
        self, process: asyncio.subprocess.Process, message: str, turns: Sequence[Any], **first: Any
    ) -> AsyncIterator[bytes]:
        """Yield the lines of an answer.

        Args:
            turns: the conversation before the message, as `cli/chat_worker.py` reads it.
            first: what the first line says.
        """
        yield _line(**first)
        self.settled = False
        assert process.stdin
        with contextlib.suppress(ConnectionError):  # it has ended: its output says why
            process.stdin.write(_line(message=message, turns=turns))
            await process.stdin.drain()
        async for record in _records(process):
            self.settled = bool(record.get("done"))
            if record.get("last"):
                self.models = ()  # the next message starts another
            yield _line(**record)
            if self.settled:
                return
        self.settled = True
        because = self.ended_because or f"The process that answers has ended, with exit code {await process.wait()}."
        yield _line(done=True, error=because)

    def settle(self) -> None:
        """Make the process ready for the next message: an answer that the reader left is cut short."""
        self._do(self._settle())

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)  # the loop keeps only a weak reference
        task.add_done_callback(self.tasks.discard)

    async def _settle(self) -> None:
        try:
            process = self.process
            if not self.settled and process is not None and process.returncode is None:
                process.send_signal(signal.SIGINT)
                async with asyncio.timeout(CUT_SECONDS):
                    async for record in _records(process):
                        if record.get("done"):
                            break
        except (TimeoutError, ProcessLookupError):
            await self.end()
        finally:
            self.busy, self.settled = False, True
            self._wait_idle()

    def _wait_idle(self) -> None:
        """End the process once nothing was written for a while."""
        if self.timer is not None:
            self.timer.cancel()

        loop = asyncio.get_running_loop()
        self.timer = loop.call_later(self.idle_seconds, lambda: self._do(self._end_if_idle()))

    async def _end_if_idle(self) -> None:
        async with self.lock:
            if not self.busy:
                await self.end()

    async def end(self, because: str = "") -> None:
        """End the process, if there is one."""
        process, self.process, self.models = self.process, None, ()
        if process is None or process.returncode is not None:
            return
        self.ended_because = because
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            try:
                async with asyncio.timeout(END_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def _records(process: asyncio.subprocess.Process) -> AsyncIterator[dict[str, Any]]:
    """Yield the objects that the process writes; an error that ends it is the last."""
    assert process.stdout
    async for line in process.stdout:
        try:
            record = json.loads(line)
        except ValueError:  # a library's own print
            continue
        if isinstance(record, dict):
            if "exit_code" in record:
                record = {"done": True, "last": True, "error": record["message"], "help": record["help"]}
            yield record


def _line(**record: Any) -> bytes:
    return json.dumps(record).encode() + b"\n"


class AnswerResponse(StreamingResponse):
    """The lines of an answer; when the reader has left or has everything, the process is made ready again."""

    def __init__(self, chat: ChatProcess, lines: AsyncIterator[bytes]) -> None:
        super().__init__(lines, media_type="application/x-ndjson")
        self.chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.chat.settle()
