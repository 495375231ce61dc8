"""The full, simulated plan, in a process of its own: it imports torch and takes seconds. One at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError
from surefit.core.rundir import write_atomic
from surefit.ui.pages import UiContext, read_posted_json
from surefit.ui.planner import config_from_form, format_plan, parse_price

SECONDS = 180


async def simulate_plan(request: Request) -> Response:
    """Run `surefit plan` on the planner's form."""
    ui: UiContext = request.app.state.ui
    body = await read_posted_json(request)
    config, price = await run_sync(config_from_form, ui, body), parse_price(body)
    if config.model.trust_remote_code:
        problem = "this model comes with its own code, which this page does not run"
        raise ConfigError(problem, code="E1069", help="use the command line: `surefit plan CONFIG`")
    if ui.simulating:
        raise HTTPException(409, "Another simulation is running; only one runs at a time.")
    ui.simulating = True
    try:
        document = await _plan(ui, config)
    finally:
        ui.simulating = False
    return JSONResponse(format_plan(document, config, price))


async def _plan(ui: UiContext, config: SureFitConfig) -> dict[str, Any]:
    """Return the content of plan.json.

    Raises:
        HTTPException: the simulation took too long.
        ConfigError: the plan could not be made, with the command's reason.
    """
    with tempfile.TemporaryDirectory(prefix="surefit-ui-") as folder:
        path = Path(folder) / "config.yaml"
        write_atomic(path, json.dumps(config.model_dump()))  # JSON is YAML
        process = await asyncio.create_subprocess_exec(
            *ui.stages.plan(path),
            cwd=ui.workspace.root,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), SECONDS)
        except TimeoutError:
            raise HTTPException(504, f"The simulation took more than {SECONDS} seconds and was stopped.") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
    lines = output.decode("utf-8", "replace").strip().splitlines()
    document: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if "estimate" not in document:
        raise ConfigError(str(document.get("message", "the plan failed")), code="E1070", help=document.get("help"))
    return document
