"""The parts that every page shares: the templates, the workspace behind them, and the endpoints for posted forms."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import anyio
from anyio.to_thread import run_sync
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from surefit import __version__
from surefit.core.env import redact
from surefit.core.errors import SureFitError
from surefit.core.units import bytes_text, duration_text
from surefit.report import text
from surefit.ui.chat_process import ChatProcess
from surefit.ui.job_runner import JobRunner
from surefit.ui.security import AccessPolicy
from surefit.ui.stages import StageFunctions
from surefit.ui.workspace import Workspace

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters.update(
    bytes=bytes_text,
    duration=duration_text,
    percent=text.percent,
    words=text.readable_metric,
    ticked=text.ticked,
    utc=text.utc,
    query=urlencode,
    pairs=lambda values: [(value, value) for value in values],
)
AT_ONCE = 2
"""Number of checks and fits that run at the same time; the others wait."""


@dataclass
class UiContext:
    """The state that the pages use; `app.state.ui`."""

    workspace: Workspace
    stages: StageFunctions
    door: AccessPolicy
    jobs: JobRunner
    chat: ChatProcess
    limiter: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(AT_ONCE))
    simulating: bool = False
    uploads: int = 0

    def page(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        """Render a page of `templates/`."""
        workspace = str(self.workspace.root)
        shared = {"csrf": self.door.csrf, "workspace": workspace, "version": __version__, "here": template}
        job = self.jobs.last()
        shared["running"] = job.run if job and job.running else ""
        return HTMLResponse(TEMPLATES.get_template(f"{template}.html.j2").render(**shared, **values), status)


PageFunction = Callable[[UiContext, Request], Response]
JsonFunction = Callable[[UiContext, dict[str, Any]], Any]


def page_endpoint(show: PageFunction) -> Callable[[Request], Response]:
    """Return the endpoint of a page; Starlette runs it in a thread."""

    def endpoint(request: Request) -> Response:
        return show(request.app.state.ui, request)

    return endpoint


def json_endpoint(answer: JsonFunction, *, at_once: bool = False) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of a posted JSON object, which answers with JSON from a thread.

    Args:
        at_once: it takes no time, and so never waits for a check or a fit.
    """

    async def endpoint(request: Request) -> Response:
        ui, body = request.app.state.ui, await read_posted_json(request)
        return JSONResponse(await run_sync(answer, ui, body, limiter=None if at_once else ui.limiter))

    return endpoint


async def read_posted_json(request: Request) -> dict[str, Any]:
    """Return the posted JSON object.

    Raises:
        HTTPException: 400, for anything else.
    """
    try:
        body = json.loads(await request.body())
        json.dumps(body, ensure_ascii=False).encode()  # raises for a lone surrogate, which UTF-8 cannot encode
    except (ValueError, RecursionError):
        raise HTTPException(400, "not JSON in UTF-8") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "not a JSON object")
    return body


def require_posted_text(body: dict[str, Any], name: str) -> str:
    """Return a text field of a posted object.

    Raises:
        HTTPException: 400 if there is none of that name.
    """
    value = body.get(name)
    if not isinstance(value, str):
        raise HTTPException(400, f"{name} must be a text")
    return value


def show_error(request: Request, error: Exception) -> Response:
    """Return an error in the user's terms: JSON for a script, a page for a person."""
    headers = None
    if isinstance(error, HTTPException):
        status, message, help_text, headers = error.status_code, str(error.detail), "", error.headers
    else:
        assert isinstance(error, SureFitError)
        status, message, help_text = 400, redact(error.message), redact(error.help or "")
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": message, "help": help_text}, status, headers)
    ui: UiContext = request.app.state.ui
    return ui.page("message", status, message=message, help=help_text)
