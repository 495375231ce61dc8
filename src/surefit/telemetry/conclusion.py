"""The final report of a run, sent to the trackers; it neither fails nor delays the stage that sends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefit.config.trackers import TelemetrySection
from surefit.core.errors import MachineError
from surefit.core.rundir import RunDir
from surefit.telemetry.sink import PATIENCE, FinalReportSink, one_line_error
from surefit.telemetry.sinks import final_report_sinks


@dataclass(frozen=True)
class FinalReport:
    """The arguments of `FinalReportSink.conclude`."""

    numbers: Mapping[str, float]
    files: Sequence[Path]
    examples: Sequence[Mapping[str, str]]


def send_final_report(
    found: FinalReport, config: TelemetrySection, run: RunDir, patience: float | None = None
) -> dict[str, str]:
    """Send the final report to every tracker that supports it, each in a thread of its own.

    Args:
        patience: seconds to wait for all of them together (default `PATIENCE`); a missing package is reported at once.

    Returns:
        Title of a tracker that did not get it → the reason.
    """
    faults: dict[str, str] = {}
    threads, patience = [], PATIENCE if patience is None else patience
    for title, sink in final_report_sinks(config, run):
        if isinstance(sink, MachineError):
            faults[title] = f"{sink.message}: {sink.help}"
            continue
        faults[title] = f"no answer within {patience:g} s"
        # A daemon: a tracker that never answers must not keep the process alive.
        threads.append(threading.Thread(target=_deliver, args=(title, sink, found, faults), daemon=True))
    for thread in threads:
        thread.start()
    limit = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
    return dict(faults)


def _deliver(title: str, sink: FinalReportSink, found: FinalReport, faults: dict[str, str]) -> None:
    try:
        sink.conclude(found.numbers, found.files, found.examples)
    except Exception as error:
        faults[title] = one_line_error(error)
    else:
        del faults[title]
