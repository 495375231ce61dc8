"""Starting, continuing and stopping a run through the page, and what must not be run through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from surefit.config.load import load_config
from surefit.config.schema import SureFitConfig, path_texts
from surefit.core.errors import ConfigError
from surefit.core.lock import lock_holder
from surefit.core.rundir import RunDir
from surefit.core.units import shell_quote
from surefit.data.read.file_io import is_url
from surefit.stages.events import is_trained
from surefit.ui.pages import UiContext, read_posted_json, require_posted_text
from surefit.ui.workspace import Workspace


def require_runnable(workspace: Workspace, config: SureFitConfig, command: str, run: RunDir | None = None) -> RunDir:
    """Return the run directory of a config; raise if it must not be run, or its model not be loaded, through the page.

    Args:
        command: does it on the command line.
        run: the run whose config it is; by default the config's `output_dir`.

    Raises:
        ConfigError: it runs code that comes with the model, or uses something outside the workspace.
    """
    if config.model.trust_remote_code:
        raise ConfigError(
            "this config runs code that comes with the model (model.trust_remote_code), and this page does not",
            code="E1076",
            field="model.trust_remote_code",
            help=f"read that code first, then use the command line: `{command}`",
        )
    for problem in workspace.refuse(config, command):
        raise problem
    run = run or RunDir((workspace.root / Path(config.output_dir).expanduser()).resolve())
    links = [path for path in run.path.rglob("*") if path.is_symlink() and not workspace.leads_inside(path)]
    outside = [(key, text) for key, text in path_texts(config) if is_url(text)]
    uri = config.telemetry.mlflow_uri or "env"
    if uri != "env" and not uri.lower().startswith(("http://", "https://")):  # a database or a directory
        outside.append(("telemetry.mlflow_uri", uri))
    for key, text in [*outside, *(("output_dir", workspace.name(path)) for path in links)]:
        raise ConfigError(
            f"{text!r} leads out of the workspace, so this page does not use it",
            code="E1077",
            field=key,
            help=f"use the command line: `{command}`",
        )
    return run


async def start_run(request: Request) -> Response:
    """Start a config (`config`), or go on with a run (`run`)."""
    ui: UiContext = request.app.state.ui
    body = await read_posted_json(request)
    command, run, shown = await run_sync(_prepare, ui, body)
    async with ui.chat.lock:  # a message that comes now finds the run
        await ui.chat.end("A run has started, and needs the memory.")
        record = await run_sync(ui.jobs.start, command, run, shown)
    return JSONResponse({"run": record.run, "command": record.command})


def _prepare(ui: UiContext, body: dict[str, Any]) -> tuple[list[str], str, str]:
    """Return the command that runs what was posted, the run's directory, and the command as one writes it.

    Raises:
        HTTPException: 409 if the run cannot be started now.
        ConfigError: it must not be started through the page, or the config is not valid.
    """
    resume = "run" in body
    earlier = ui.workspace.run(require_posted_text(body, "run")) if resume else None
    file = earlier.resolved if earlier else ui.workspace.config(require_posted_text(body, "config"))
    target = ui.workspace.name(earlier.path if earlier else file)
    if not file.is_file():
        raise HTTPException(404, "There is no such file in the workspace.")
    shown = f"surefit run {shell_quote(target)}" + (" --resume" if resume else "")
    run = require_runnable(ui.workspace, load_config(file).config, shown, earlier)
    name = ui.workspace.name(run.path)
    if holder := lock_holder(run.lock):
        raise HTTPException(409, f"{name} is in use by {holder}.")
    if not resume and run.resolved.exists() and (run.checkpoints.exists() or is_trained(run)):
        raise HTTPException(409, f"{name} has a run already: open it to go on with it, or choose another output_dir.")
    argument = f"./{target}" if target.startswith("-") else target
    return ui.stages.run(argument, resume), name, shown


def stop_run(ui: UiContext, body: dict[str, Any]) -> dict[str, Any]:
    """Stop a run (`run`) that the page has started."""
    return {"run": ui.jobs.stop(require_posted_text(body, "run")).run}
