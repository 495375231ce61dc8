"""The page to talk to a run's model, with its other variants beside it on request."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from surefit.config.load import load_config
from surefit.core.lock import lock_holder
from surefit.core.rundir import RunDir
from surefit.core.units import shell_quote
from surefit.ui.chat_process import IDLE_SECONDS, AnswerResponse
from surefit.ui.jobs import require_runnable
from surefit.ui.pages import UiContext, read_posted_json, require_posted_text

LONGEST_MESSAGE = 100_000
"""Characters of a message."""
Turns = list[tuple[str, dict[str, str]]]
"""A conversation: messages, each with the answers to it by variant."""
SETTLE_LOOKS, SETTLE_SECONDS = 20, 0.1
VARIANTS = ("merged", "model", "adapter", "base")
"""The best first; a run has some of them."""


class PostedMessage(NamedTuple):
    """A message to the models of a run.

    Attributes:
        run: its name.
        variants: those that answer, the base first.
        turns: the conversation before it.
        weights: the version of the run's weights.
    """

    run: str
    variants: list[str]
    message: str
    turns: Turns
    weights: str


def chat_page(ui: UiContext, request: Request) -> Response:
    """Show the conversation with a run's model (`?path=`)."""
    run = ui.workspace.run(request.query_params.get("path", ""))
    name = ui.workspace.name(run.path)
    return ui.page(
        "chat",
        name=name,
        variants=list_chat_variants(run),
        has_report=run.report.is_file(),
        holder=_memory_holder(ui, run),
        idle_minutes=int(IDLE_SECONDS / 60),
    )


def _memory_holder(ui: UiContext, run: RunDir) -> str | None:
    """Return the run that this page has started, or the command that works on this one; None if there is neither."""
    job = ui.jobs.last()
    return f"`{job.command}`" if job and job.running else lock_holder(run.lock)


def list_chat_variants(run: RunDir) -> list[str]:
    """Return the variants that can answer, the best first; the base alone where nothing is trained yet."""
    return [name for name in VARIANTS if name == "base" or (run.path / name).is_dir()]


async def answer_message(request: Request) -> Response:
    """Stream the answers to a posted message: `path`, `variants`, `message`, and the `turns` before it.

    The first line says whether the models are being `loading`, and the version of their `weights`.
    """
    ui: UiContext = request.app.state.ui
    body = await read_posted_json(request)
    for _ in range(SETTLE_LOOKS):  # an answer that the page has just left is being cut short
        if ui.chat.busy:
            await asyncio.sleep(SETTLE_SECONDS)
    async with ui.chat.lock:  # no run starts between the look for one and the start of the process
        posted = await run_sync(_read_message, ui, body)
        if ui.chat.busy:
            raise HTTPException(409, "Another answer is being written, maybe in another tab: wait for its end.")
        process, is_new = await ui.chat.open(posted.run, posted.variants, posted.weights)
    lines = ui.chat.answer(process, posted.message, posted.turns, loading=is_new, weights=posted.weights)
    return AnswerResponse(ui.chat, lines)


def weights_version(run: RunDir) -> str:
    """Return a text that changes when a run is trained or merged again."""
    states = []
    for path in sorted(path for name in VARIANTS for path in (run.path / name).glob("*")):
        with contextlib.suppress(FileNotFoundError):  # it is just being replaced
            status = path.stat()
            states.append((path.relative_to(run.path), status.st_ino, status.st_mtime_ns))
    return hashlib.sha256(repr(states).encode()).hexdigest()[:16]


def _read_turns(posted: Any, variants: Sequence[str]) -> Turns:
    """Return the conversation that was posted.

    Raises:
        HTTPException: 400 for anything else than messages, each with answers of these variants.
    """
    turns: Turns = []
    for turn in posted if isinstance(posted, list) else [None]:
        match turn:
            case [str(message), dict(answers)] if answers.keys() <= {*variants}:
                if all(isinstance(answer, str) for answer in answers.values()):
                    turns.append((message, answers))
                    continue
        raise HTTPException(400, "turns must be a list of messages, each with the answers to it by variant")
    return turns


def _read_message(ui: UiContext, body: dict[str, Any]) -> PostedMessage:
    """Return the message that was posted, with what it is for.

    Raises:
        HTTPException: 400 or 404 for a request that makes no sense, 409 while a run has the machine.
        ConfigError: the run's model must not be loaded through the page.
    """
    run = ui.workspace.run(require_posted_text(body, "path"))
    name, message = ui.workspace.name(run.path), require_posted_text(body, "message")
    possible, variants = list_chat_variants(run), body.get("variants")
    if not isinstance(variants, list) or not variants or not all(variant in possible for variant in variants):
        raise HTTPException(400, f"Choose who answers from {', '.join(possible)}.")
    if not message.strip() or len(message) > LONGEST_MESSAGE:
        raise HTTPException(
            400, f"A message has from 1 to {LONGEST_MESSAGE:,} characters; this one has {len(message):,}."
        )
    if not run.resolved.is_file():
        raise HTTPException(404, "This run has no resolved.yaml, so its model is not known.")
    require_runnable(ui.workspace, load_config(run.resolved).config, f"surefit chat {shell_quote(name)}", run)
    if holder := _memory_holder(ui, run):
        raise HTTPException(409, f"{holder} is running, and needs the memory: talk to the model once it has ended.")
    turns = _read_turns(body.get("turns"), variants)
    ordered = [variant for variant in reversed(VARIANTS) if variant in variants]
    return PostedMessage(name, ordered, message, turns, weights_version(run))
