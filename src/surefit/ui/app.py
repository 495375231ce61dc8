"""Every route of `surefit ui`. Requests pass `security.SecurityMiddleware` first; a page is a function of (UiContext,
request)."""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from surefit.core.errors import SureFitError
from surefit.report.build import HERE as REPORT
from surefit.ui import comparing, configs, examples, planner, runs, simulation
from surefit.ui.pages import UiContext, json_endpoint, page_endpoint, show_error
from surefit.ui.security import AccessPolicy, SecurityMiddleware
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


def redirect_to_runs(ui: UiContext, request: Request) -> Response:
    """Redirect to the list of runs, the page that users come back for."""
    return RedirectResponse("/runs", 303)


ROUTES = [
    Route("/", page_endpoint(redirect_to_runs)),
    Route("/static/{name}", page_endpoint(serve_static)),
    Route("/config", page_endpoint(configs.config_page)),
    Route("/planner", page_endpoint(planner.planner_page)),
    Route("/runs", page_endpoint(runs.runs_page)),
    Route("/run", page_endpoint(runs.run_page)),
    Route("/run/report", page_endpoint(runs.report_page)),
    Route("/run/examples", page_endpoint(examples.examples_page)),
    Route("/compare", page_endpoint(comparing.side_by_side_page)),
    Route("/api/watch", page_endpoint(runs.poll_run)),
    Route("/api/check", json_endpoint(configs.check_posted_config), methods=["POST"]),
    Route("/api/edit", json_endpoint(configs.edit_posted_config), methods=["POST"]),
    Route("/api/save", json_endpoint(configs.save_posted_config), methods=["POST"]),
    Route("/api/fit", json_endpoint(planner.estimate_fit), methods=["POST"]),
    Route("/api/simulate", simulation.simulate_plan, methods=["POST"]),
]


def create_app(workspace: Workspace, stages: StageFunctions, door: AccessPolicy) -> SecurityMiddleware:
    """Return the ASGI app that uvicorn serves."""
    app = Starlette(routes=ROUTES, exception_handlers={HTTPException: show_error, SureFitError: show_error})
    app.state.ui = UiContext(workspace, stages, door)
    return SecurityMiddleware(app, door)
