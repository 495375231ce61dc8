"""The sinks that a config asks for. Their packages are extras: where one is missing, nothing costly is started."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from surefit.config.schema import TelemetrySection
from surefit.config.trackers import Tracker, switched_on
from surefit.core import env
from surefit.core.errors import MachineError
from surefit.core.rundir import RunDir
from surefit.telemetry.sink import Sink


def make_sinks(config: TelemetrySection, run: RunDir) -> list[Sink]:
    """The sinks of one run; to be called by the main process alone. Nothing is written and nobody is asked yet.

    Raises:
        MachineError: naming every package that is missing or broken; W&B is to be online and nobody is logged in.
    """
    if problems := list(_problems(config)):
        first, *rest = problems
        raise MachineError(first.message, field=first.field, help=first.help, also=rest)
    return [_sink(tracker, config, run) for tracker in switched_on(config)]


def _sink(tracker: Tracker, config: TelemetrySection, run: RunDir) -> Sink:
    module, _, name = tracker.sink.partition(":")
    made: Sink = getattr(importlib.import_module(f"surefit.telemetry.{module}"), name)(*tracker.arguments(config), run)
    return made


def _problems(config: TelemetrySection) -> Iterator[MachineError]:
    env.quiet_trackers()
    for tracker in switched_on(config):
        module, field, extra = tracker.module, tracker.field, tracker.name
        # Here and not in the sinks' threads: a package that cannot be imported is said before the model is loaded.
        try:
            importlib.import_module(module)
        except ImportError as error:
            yield MachineError(
                f"needs a package that is not installed or does not fit: {env.first_line(error)}",
                field=field,
                help=f"pip install 'surefit[{extra}]', or take {field} out",
            )
        except Exception as error:  # protobuf and its like fail in ways of their own
            yield MachineError(
                f"{module} cannot be imported: {type(error).__name__}: {env.first_line(error)}",
                field=field,
                help=f"pip install --upgrade 'surefit[{extra}]', or take {field} out",
            )
    if config.wandb == "online" and not env.trackers_configured()["wandb"]:
        yield MachineError(
            "online, and nobody is logged in to W&B on this machine: it would ask",
            field="telemetry.wandb",
            help="run `wandb login`, set WANDB_API_KEY, or write telemetry.wandb: offline",
        )
