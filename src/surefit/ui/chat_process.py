"""The process that answers in the page's chat (`cli/chat_worker.py`). It alone has the models, so that this server
never imports torch; it reads messages and writes answers, a line of JSON each.

The first message starts it. It ends when it was idle for a while, when a run starts, and with the server, which closes
its input.
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
        models: the run and the variants that the process has loaded.
        busy: whether an answer is being written.
        settled: whether the process has written all of the last answer.
        ended_because: why the process was ended in the middle of an answer.
    """

    root: Path
    command: Callable[[str, Sequence[str]], list[str]]
    idle_seconds: float = IDLE_SECONDS
    process: asyncio.subprocess.Process | None = None
    models: tuple[str, ...] = ()
    busy: bool = False
    settled: bool = True
    ended_because: str = ""
    timer: asyncio.TimerHandle | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def answer(self, run: str, variants: Sequence[str], message: str, again: bool) -> AsyncIterator[bytes]:
        """Yield the lines of an answer, beginning with one about loading where the models are not loaded yet.

        Args:
            again: forget the conversation first.
        """
        self.settled = False
        if self.process is None or self.process.returncode is not None or self.models != (run, *variants):
            await self.end()
            yield _line(loading=True)
            self.ended_because = ""
            self.process = await asyncio.create_subprocess_exec(
                *self.command(run, variants), cwd=self.root, stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, limit=LINE_BYTES,
                start_new_session=True,
            )  # fmt: skip
            self.models = (run, *variants)
        process = self.process
        assert process.stdin
        with contextlib.suppress(ConnectionError):  # it has ended: its output says why
            process.stdin.write(_line(message=message, again=again))
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

        def look() -> None:
            if not self.busy:
                self._do(self.end())

        self.timer = asyncio.get_running_loop().call_later(self.idle_seconds, look)

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
