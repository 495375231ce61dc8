"""Every route of `surefit ui`. A request passes `security.Guard` first; a page is a function of (Ui, request)."""

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
from surefit.ui.pages import Ui, get, post, show_error
from surefit.ui.security import Door, Guard
from surefit.ui.stages import Stages
from surefit.ui.workspace import Workspace

STATIC = {
    "report.css": REPORT / "page.css",
    "uplot.js": REPORT / "vendor" / "uplot" / "uPlot.iife.min.js",
    "uplot.css": REPORT / "vendor" / "uplot" / "uPlot.min.css",
} | {path.name: path for path in (Path(__file__).parent / "static").iterdir()}
"""Name → file. The look and the charts are the report's."""


def static(ui: Ui, request: Request) -> Response:
    """One of our own files; nothing else has a name here."""
    path = STATIC.get(request.path_params["name"])
    if path is None:
        raise HTTPException(404, "There is no such file.")
    return FileResponse(path)


def start(ui: Ui, request: Request) -> Response:
    """The runs are what one comes back for."""
    return RedirectResponse("/runs", 303)


ROUTES = [
    Route("/", get(start)),
    Route("/static/{name}", get(static)),
    Route("/config", get(configs.show)),
    Route("/planner", get(planner.show)),
    Route("/runs", get(runs.show_all)),
    Route("/run", get(runs.show)),
    Route("/run/report", get(runs.report)),
    Route("/run/examples", get(examples.show)),
    Route("/compare", get(comparing.show)),
    Route("/api/watch", get(runs.watch)),
    Route("/api/check", post(configs.check), methods=["POST"]),
    Route("/api/edit", post(configs.edit), methods=["POST"]),
    Route("/api/save", post(configs.save), methods=["POST"]),
    Route("/api/fit", post(planner.fit), methods=["POST"]),
    Route("/api/simulate", simulation.simulate, methods=["POST"]),
]


def create_app(workspace: Workspace, stages: Stages, door: Door) -> Guard:
    """The program that uvicorn serves."""
    app = Starlette(routes=ROUTES, exception_handlers={HTTPException: show_error, SureFitError: show_error})
    app.state.ui = Ui(workspace, stages, door)
    return Guard(app, door)
