"""Every route of `surefit ui`. Requests pass `security.SecurityMiddleware` first; a page is a function of (UiContext,
request)."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from surefit.core.errors import SureFitError
from surefit.report.build import HERE as REPORT
from surefit.ui import chat, comparing, configs, examples, jobs, planner, rows, runs, simulation
from surefit.ui.chat_process import ChatProcess
from surefit.ui.job_runner import JobRunner
from surefit.ui.pages import UiContext, json_endpoint, page_endpoint, show_error
from surefit.ui.security import UPLOAD, AccessPolicy, SecurityMiddleware
from surefit.ui.stages import StageFunctions
from surefit.ui.workspace import Workspace

STATIC = {
    "report.css": REPORT / "page.css",
    "uplot.js": REPORT / "vendor" / "uplot" / "uPlot.iife.min.js",
    "uplot.css": REPORT / "vendor" / "uplot" / "uPlot.min.css",
} | {path.name: path for path in (Path(__file__).parent / "static").iterdir()}
"""Name → file. Style sheet and charts are the report's."""


def serve_static(ui: UiContext, request: Request) -> Response:
    """Serve one of the static files; only these have a name here."""
    path = STATIC.get(request.path_params["name"])
    if path is None:
        raise HTTPException(404, "There is no such file.")
    return FileResponse(path)


def redirect_to_first_page(ui: UiContext, request: Request) -> Response:
    """Redirect to the run that is going on, else to the page that begins with one's rows."""
    job = ui.jobs.last()
    return RedirectResponse(f"/run?{urlencode({'path': job.run})}" if job and job.running else "/rows", 303)


ROUTES = [
    Route("/", page_endpoint(redirect_to_first_page)),
    Route("/rows", page_endpoint(rows.rows_page)),
    Route("/static/{name}", page_endpoint(serve_static)),
    Route("/config", page_endpoint(configs.config_page)),
    Route("/planner", page_endpoint(planner.planner_page)),
    Route("/runs", page_endpoint(runs.runs_page)),
    Route("/run", page_endpoint(runs.run_page)),
    Route("/run/report", page_endpoint(runs.report_page)),
    Route("/run/chat", page_endpoint(chat.chat_page)),
    Route("/run/examples", page_endpoint(examples.examples_page)),
    Route("/compare", page_endpoint(comparing.side_by_side_page)),
    Route("/api/watch", page_endpoint(runs.poll_run)),
    Route(UPLOAD, rows.receive_rows, methods=["POST"]),
    Route("/api/draft", json_endpoint(rows.draft_config), methods=["POST"]),
    Route("/api/start", jobs.start_run, methods=["POST"]),
    Route("/api/stop", json_endpoint(jobs.stop_run, at_once=True), methods=["POST"]),
    Route("/api/chat", chat.answer_message, methods=["POST"]),
    Route("/api/check", json_endpoint(configs.check_posted_config), methods=["POST"]),
    Route("/api/edit", json_endpoint(configs.edit_posted_config), methods=["POST"]),
    Route("/api/save", json_endpoint(configs.save_posted_config), methods=["POST"]),
    Route("/api/fit", json_endpoint(planner.estimate_fit), methods=["POST"]),
    Route("/api/simulate", simulation.simulate_plan, methods=["POST"]),
]


def create_app(workspace: Workspace, jobs: JobRunner, stages: StageFunctions, door: AccessPolicy) -> SecurityMiddleware:
    """Return the ASGI app that uvicorn serves."""
    app = Starlette(routes=ROUTES, exception_handlers={HTTPException: show_error, SureFitError: show_error})
    app.state.ui = UiContext(workspace, stages, door, jobs, ChatProcess(workspace.root, stages.chat))
    return SecurityMiddleware(app, door)
