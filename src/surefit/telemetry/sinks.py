"""The sinks that a config enables. Their packages are extras: if one is missing, nothing costly is started."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from surefit.config.trackers import TRACKERS, TelemetrySection, Tracker, enabled_trackers
from surefit.core import env
from surefit.core.errors import MachineError
from surefit.core.packaging import install_extra
from surefit.core.rundir import RunDir
from surefit.telemetry.sink import FinalReportSink, Sink


def make_sinks(config: TelemetrySection, run: RunDir) -> list[Sink]:
    """Return the sinks of one run; to be called by the main process alone. Nothing is written and no server contacted
    yet.

    Raises:
        MachineError: with every package that is missing or broken, or a tracker that would prompt for a login.
    """
    trackers = enabled_trackers(config)
    if problems := [problem for name in trackers for problem in _problems(name, config)]:
        first, *more_problems = problems
        raise MachineError(first.message, code=first.code, field=first.field, help=first.help, also=more_problems)
    return [_class(tracker)(*tracker.arguments(config), run) for tracker in trackers.values()]


def final_report_sinks(config: TelemetrySection, run: RunDir) -> Iterator[tuple[str, FinalReportSink | MachineError]]:
    """Yield the trackers that accept the final report: their titles, and the sinks or the errors that prevent them."""
    for name, tracker in enabled_trackers(config).items():
        if hasattr(_class(tracker), "conclude"):
            problem = next(_problems(name, config), None)
            yield tracker.title, problem or _class(tracker)(*tracker.arguments(config), run)


def _class(tracker: Tracker) -> Any:
    module, _, name = tracker.sink.partition(":")
    return getattr(importlib.import_module(f"surefit.telemetry.{module}"), name)


def _problems(extra: str, config: TelemetrySection) -> Iterator[MachineError]:
    for tracker in TRACKERS.values():
        env.set_defaults(tracker.quiet)
    tracker = TRACKERS[extra]
    field, upgrade = tracker.key, True
    # Here and not in the sinks' threads: a package that cannot be imported is reported before the model is loaded.
    try:
        importlib.import_module(tracker.module)
    except Exception as error:  # protobuf and similar packages raise other errors
        problem = f"{tracker.module} cannot be imported: {type(error).__name__}: {env.first_line(error)}"
        if isinstance(error, ImportError):
            problem = f"needs a package that is not installed or has the wrong version: {env.first_line(error)}"
            upgrade = False
        advice = f"{install_extra(extra, upgrade=upgrade)}; or remove {field}"
        yield MachineError(problem, code="E5095", field=field, help=advice)
    if extra == "mlflow" and config.mlflow_address is None:
        yield MachineError(
            "MLFLOW_TRACKING_URI is not set",
            code="E5096",
            field=field,
            help=f"set it in the environment or in .env, or write {field}: ADDRESS",
        )
    if tracker.asks(config) and not tracker.is_set_up:
        yield MachineError(
            f"this machine is not logged in to {tracker.title}, which would prompt for a key",
            code="E5097",
            field=field,
            help=f"run `{tracker.login}`, set {tracker.variables[0]}, or write {field}: offline",
        )
