"""The page to talk to a run's model, with its other variants beside it on request."""

from __future__ import annotations

import asyncio
from typing import Any

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
SETTLE_LOOKS, SETTLE_SECONDS = 20, 0.1
VARIANTS = ("merged", "model", "adapter", "base")
"""The best first; a run has some of them."""


def chat_page(ui: UiContext, request: Request) -> Response:
    """Show the conversation with a run's model (`?path=`)."""
    run = ui.workspace.run(request.query_params.get("path", ""))
    name = ui.workspace.name(run.path)
    return ui.page(
        "chat",
        name=name,
        variants=list_chat_variants(run),
        has_report=run.report.is_file(),
        idle_minutes=int(IDLE_SECONDS / 60),
    )


def list_chat_variants(run: RunDir) -> list[str]:
    """Return the variants that can answer, the best first; the base alone where nothing is trained yet."""
    return [name for name in VARIANTS if name == "base" or (run.path / name).is_dir()]


async def answer_message(request: Request) -> Response:
    """Stream the answers to a posted message: `path`, `variants`, `message`, and `again` to forget the conversation."""
    ui: UiContext = request.app.state.ui
    body = await read_posted_json(request)
    run, variants, message = await run_sync(_read_message, ui, body, limiter=ui.limiter)
    for _ in range(SETTLE_LOOKS):  # an answer that the page has just left is being cut short
        if ui.chat.busy:
            await asyncio.sleep(SETTLE_SECONDS)
    if ui.chat.busy:
        raise HTTPException(409, "Another answer is being written: wait for its end, or stop it.")
    ui.chat.busy = True
    return AnswerResponse(ui.chat, ui.chat.answer(run, variants, message, body.get("again") is True))


def _read_message(ui: UiContext, body: dict[str, Any]) -> tuple[str, list[str], str]:
    """Return the run's name, the variants and the message that were posted.

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
    job = ui.jobs.last()
    holder = job.command if job and job.running else lock_holder(run.lock)
    if holder:
        raise HTTPException(409, f"{holder} is running, and needs the memory: talk to the model once it has ended.")
    return name, [variant for variant in reversed(VARIANTS) if variant in variants], message
