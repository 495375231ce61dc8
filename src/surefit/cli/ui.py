"""The verb `ui`: serve the pages of `surefit.ui` from this machine, until it is interrupted."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import typer

from surefit.cli.exits import run_verb
from surefit.cli.render import Output
from surefit.core import env
from surefit.core.errors import EXIT_OK, ConfigError, MachineError, SureFitError
from surefit.core.packaging import install_extra
from surefit.core.processes import own_command

if TYPE_CHECKING:
    from surefit.ui.stages import ForbiddenPaths, StageFunctions

AT_ONCE = 100
"""Connections accepted per event loop round: a few rounds, and `ui.connection.MOST`, fit in 1,024 open files."""


def ui(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8365,
    host: Annotated[str, typer.Option(help="Where to listen; by default this machine only.")] = "127.0.0.1",
    workspace: Annotated[Path, typer.Option(metavar="DIR", help="All that the pages read and write.")] = Path("."),
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    """Serve a local page: begin with your rows, train, talk to the result; write configs, plan, compare runs."""
    run_verb(False, lambda out: _serve(out, host, port, workspace, not no_open))


def _serve(out: Output, host: str, port: int, workspace: Path, opened: bool) -> int:
    """Serve `workspace` until interrupted.

    Args:
        host: address to listen on.
        port: 0 for any free one.
        workspace: the only directory that the pages read and write.
        opened: open the page in the user's browser.
    """
    try:
        import uvicorn

        from surefit.ui.app import create_app
        from surefit.ui.connection import IdleConnectionLimit
        from surefit.ui.job_runner import JobRunner
        from surefit.ui.security import AccessPolicy, is_loopback
        from surefit.ui.workspace import Workspace
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "starlette", "anyio"):
            raise
        raise MachineError(f"{error.name} is not installed", code="E1046", help=install_extra("ui")) from None
    root = _directory(workspace)
    listener = _listen(host, port)
    policy = AccessPolicy(host, listener.getsockname()[1], secrets.token_urlsafe(24))
    os.chdir(root)  # a config's paths are relative to where its commands are run
    address = _address(policy.host, policy.port, policy.token)
    out.own_address(f"SureFit serves {root} at", address)
    out.note("the token in it is shown only here: it lets its reader use the page, and so this workspace")
    if not is_loopback(host):
        out.note(
            "what goes over the network is not encrypted: listen on this machine only, and use an SSH tunnel (ssh -L)"
        )
    out.note("Ctrl-C stops it; runs go on")
    sys.stdout.flush()
    if opened:
        import webbrowser

        webbrowser.open(address)
    served = Workspace(root)
    jobs = JobRunner(served)
    app: Any = create_app(served, jobs, build_stage_functions(), policy)
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, proxy_headers=False, lifespan="off",
        timeout_graceful_shutdown=2, http=IdleConnectionLimit, backlog=AT_ONCE,
    )  # fmt: skip
    try:
        uvicorn.Server(settings).run(sockets=[listener])  # raises the signal that has stopped it again
    finally:
        if (job := jobs.last()) and job.running:
            how = f"`surefit ui` shows it again, `kill -INT {job.pid}` stops it"
            out.note(f"`{job.command}` goes on as process {job.pid}: {how}")
    return EXIT_OK


def _directory(workspace: Path) -> Path:
    try:
        return workspace.expanduser().resolve(strict=True) if workspace.is_dir() else _no_directory(workspace)
    except OSError:
        return _no_directory(workspace)


def _no_directory(workspace: Path) -> Path:
    raise ConfigError("there is no such directory", code="E1047", path=workspace, help="surefit ui --workspace DIR")


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        MachineError: the address is not this machine's, or in use.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=AT_ONCE)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise MachineError(
            f"cannot listen on {host}:{port}: {reason}", code="E1048", help="another --port, or --port 0"
        ) from None


def _address(host: str, port: int, token: str) -> str:
    name = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        name = socket.gethostname()
    return f"http://{name}:{port}/?{urlencode({'token': token})}"


def build_stage_functions() -> StageFunctions:
    """Return the functions of the other verbs that the pages call."""
    from surefit.cli.runs.summary import find_runs, summarize_runs
    from surefit.ui.stages import StageFunctions

    return StageFunctions(
        check=check_config_text,
        runs=lambda directory: summarize_runs(find_runs(directory)),
        plan=lambda path: own_command("plan", str(path), "--json"),
        run=lambda target, resume: own_command("run", target, *(["--resume"] if resume else [])),
        chat=lambda run, variants: own_command(
            "chat-worker", f"./{run}", *(option for name in variants for option in ("--variant", name)), "--json"
        ),
    )


def check_config_text(text: str, name: str, refuse: ForbiddenPaths) -> dict[str, Any]:
    """Return the findings of `surefit check` for a config that is not saved.

    Args:
        text: the config.
        name: its file name in the findings.
        refuse: returns the paths in it that must not be read.
    """
    from surefit.cli.annotations import error_report
    from surefit.cli.check import why_facts_are_missing
    from surefit.config.load import load_config
    from surefit.core.rundir import write_atomic
    from surefit.lint.skipped import skipped_text
    from surefit.stages.checking import run_check
    from surefit.stages.run_context import load_run_context

    with tempfile.TemporaryDirectory(prefix="surefit-ui-") as folder:
        path = Path(folder) / name
        write_atomic(path, text.encode("utf-8", "replace"))
        try:
            loaded = load_config(path)
            refused = list(refuse(loaded.config))
            for problem in refused:
                problem.path, problem.line = str(path), loaded.lines.get(problem.field or "")
            if refused:
                refused[0].also = tuple(refused[1:])
                raise refused[0]
            context = load_run_context(path, look=True)
            report = run_check(context)
            report["skipped_text"] = skipped_text(report["skipped"], why_facts_are_missing(context, report))
        except SureFitError as error:
            report = error_report(error)
        return {
            key: [_named(finding, folder) for finding in value] if key in ("findings", "suppressed") else value
            for key, value in report.items()
        }


def _named(finding: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return a finding with the config's name instead of the temporary file's, and without secrets."""
    return {
        key: env.redact(value.replace(f"{folder}/", "")) if isinstance(value, str) else value
        for key, value in finding.items()
        if key != "evidence"
    }
