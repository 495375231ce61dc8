"""What the stages after training tell the trackers: final numbers, files, and a few rows side by side.

Each of these stages sends all that the run directory holds by then. So a tracker that was away when the scores came up
gets them with the report.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from surefit.config.load import load_config
from surefit.config.trackers import TelemetrySection, enabled_trackers
from surefit.core.env import first_line, redact
from surefit.core.errors import GateError, SureFitError
from surefit.core.rundir import RunDir, read_json
from surefit.core.sampling import evenly_spaced_indices
from surefit.core.units import shell_quote, truncate_text
from surefit.evaluate.answers import align_answers, base_variant, read_variant, select_tuned_variant
from surefit.stages.events import is_trained
from surefit.stages.progress_listener import ProgressListener
from surefit.telemetry.conclusion import FinalReport, send_final_report
from surefit.telemetry.numbers import numbers_of

ROWS = 20
"""Examples that a tracker gets at most."""
LONGEST = 500
"""Characters of a text among them."""


@contextlib.contextmanager
def report_stage_to_trackers(
    run: RunDir, stage: str, watcher: ProgressListener, section: TelemetrySection | None = None, first: bool = True
) -> Iterator[None]:
    """Send what is known to the run's trackers when the stage has ended, and when its result did not pass.

    A tracker that does not take it is a note and no more.

    Args:
        section: the trackers; by default those of resolved.yaml.
        first: False in all processes of a stage but the first, which send nothing.
    """
    try:
        yield
    except GateError:
        _send_report(run, stage, watcher, section, first)
        raise
    _send_report(run, stage, watcher, section, first)


def _send_report(
    run: RunDir, stage: str, watcher: ProgressListener, section: TelemetrySection | None, first: bool
) -> None:
    if not first or not is_trained(run):
        return
    written = _saved_tracker_section(run)
    section = section or written
    if section is None or not enabled_trackers(section):
        return
    try:
        faults = _send(run, section)
    except Exception as error:  # what is said about a stage is no reason to fail it
        faults = {"the trackers": redact(f"{type(error).__name__}: {first_line(error)}")}
    if faults:
        lacking = "; ".join(f"{tracker} ({why})" for tracker, why in faults.items())
        # A tracker that was given with --set is not in resolved.yaml, which is all that `report` reads.
        report = f"`surefit report {shell_quote(run.path)}`"
        again = report if section == written else f"`surefit {stage}`, called as before,"
        watcher.note(f"the results did not reach {lacking}. They are in the run directory: {again} sends them again")


def _saved_tracker_section(run: RunDir) -> TelemetrySection | None:
    """The trackers of resolved.yaml; None where it cannot be read, which is for others to say."""
    try:
        return load_config(run.resolved).config.telemetry
    except SureFitError:
        return None


def _send(run: RunDir, section: TelemetrySection) -> dict[str, str]:
    files = [path for path in (run.certificate, run.eval_summary, run.report) if path.exists()]
    numbers: dict[str, float] = {}
    rows: list[dict[str, str]] = []
    if run.certificate.exists():
        numbers |= certificate_metrics(read_json(run.certificate))
    if run.eval_summary.exists():
        summary = read_json(run.eval_summary)
        numbers |= score_metrics(summary)
        rows = select_example_rows(run, summary)
    return send_final_report(FinalReport(numbers, files, rows), section, run) if files else {}


def certificate_metrics(certificate: Mapping[str, Any]) -> dict[str, float]:
    """`certificate/passed`, and what was measured for it: `certificate/` and the name of the check."""
    measured = {check["name"]: check["value"] for check in certificate["checks"]}
    told = numbers_of({"passed": certificate["passed"], **measured})
    return {f"certificate/{name}": value for name, value in told.items()}


def score_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """`SET/VARIANT/METRIC`, with `_low` and `_high` for the ends of its 95 % interval; likewise the paired difference
    of base and tuned model, as `SET/TUNED_minus_BASE/METRIC`; `gate/passed`, if a gate passed or failed."""
    found: dict[str, float] = {}
    for name, scored in summary["sets"].items():
        for variant, metrics in scored["variants"].items():
            for metric, estimate in metrics.items():
                found |= _with_interval(f"{name}/{variant}/{metric}", estimate["mean"], estimate["ci95"])
        tuned = select_tuned_variant(scored["variants"])
        for pair in scored["comparisons"]:
            if tuned and (pair["a"], pair["b"]) == (base_variant(tuned), tuned):
                key = f"{name}/{tuned}_minus_{pair['a']}/{pair['metric']}"
                found |= _with_interval(key, pair["difference"], pair["ci95"])
    if summary["gate"] and summary["gate"].get("outcome") != "cannot tell":
        found["gate/passed"] = float(summary["gate"]["passed"])
    return found


def _with_interval(name: str, value: float, interval: Sequence[float]) -> dict[str, float]:
    low, high = interval
    return {name: float(value), f"{name}_low": float(low), f"{name}_high": float(high)}


def select_example_rows(run: RunDir, summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """Rows that base and tuned model answered, of the first set that has both; evenly chosen from all of them, not
    from the best. Without secrets, and long texts cut.

    Columns: question, expected, base, tuned, outcome: won, lost or same by the primary metric, or nothing where a
    recipe has no such score of a single row.
    """
    for name, scored in summary["sets"].items():
        tuned = select_tuned_variant(scored["variants"])
        if tuned and base_variant(tuned) in scored["variants"]:
            with contextlib.suppress(SureFitError):  # answers that are gone, or to other rows
                return _side_by_side(run, name, tuned, summary["primary_metric"])
    return []


def _side_by_side(run: RunDir, set_name: str, tuned: str, metric: str) -> list[dict[str, str]]:
    before, after = (read_variant(run, set_name, variant) for variant in (base_variant(tuned), tuned))
    pairs = list(zip(align_answers(before, after), after.lines, strict=True))
    return [_row(*pairs[i], metric) for i in evenly_spaced_indices(len(pairs), ROWS)]


def _row(before: Mapping[str, Any], after: Mapping[str, Any], metric: str) -> dict[str, str]:
    from surefit.report.examples import last_turn

    return {
        "question": last_turn(_safe(after.get("prompt")), LONGEST),
        "expected": truncate_text(_safe(after.get("gold")), LONGEST),
        "base": truncate_text(_safe(before.get("text")), LONGEST),
        "tuned": truncate_text(_safe(after.get("text")), LONGEST),
        "outcome": _outcome(before["scores"].get(metric), after["scores"].get(metric)),
    }


def _outcome(old: float | None, new: float | None) -> str:
    if old is None or new is None:
        return ""
    return "same" if old == new else "won" if new > old else "lost"


def _safe(value: Any) -> str:
    """As text that may leave this machine, before it is cut: the half of a key would no longer look like one."""
    from surefit.report.text import drop_surrogates

    if value is None:
        return ""
    return drop_surrogates(redact(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
