"""Reports of the stages after training to the trackers: final metrics, files, and a few rows side by side.

Each of these stages sends everything that the run directory then holds. So a tracker that was unreachable during
evaluation gets the scores with the report.
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
from surefit.core.sampling import evenly_spaced
from surefit.core.units import shell_quote, truncate_text
from surefit.evaluate.answers import align_answers, base_variant, read_variant, select_tuned_variant
from surefit.stages.events import is_trained
from surefit.stages.progress_listener import ProgressListener
from surefit.telemetry.conclusion import FinalReport, send_final_report
from surefit.telemetry.numbers import numbers_of

ROWS = 20
"""Largest number of examples that a tracker gets."""
LONGEST = 500
"""Largest number of characters of a text in them."""


@contextlib.contextmanager
def report_stage_to_trackers(
    run: RunDir, stage: str, watcher: ProgressListener, section: TelemetrySection | None = None, first: bool = True
) -> Iterator[None]:
    """Send the run's results to its trackers when the stage has ended, also when its result did not pass.

    A failing tracker only causes a note.

    Args:
        section: the trackers; by default those in resolved.yaml.
        first: False in all processes of a stage but the first; they send nothing.
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
    saved_section = _saved_tracker_section(run)
    section = section or saved_section
    if section is None or not enabled_trackers(section):
        return
    try:
        faults = _send(run, section)
    except Exception as error:  # a failed report is no reason to fail the stage
        faults = {"the trackers": redact(f"{type(error).__name__}: {first_line(error)}")}
    if faults:
        unreached = "; ".join(f"{tracker} ({reason})" for tracker, reason in faults.items())
        # A tracker enabled with --set is not in resolved.yaml, which is all that `report` reads.
        report = f"`surefit report {shell_quote(run.path)}`"
        retry_command = report if section == saved_section else f"`surefit {stage}` with the same arguments"
        watcher.note(
            f"the results could not be sent to {unreached}. They are in the run directory; "
            f"{retry_command} sends them again"
        )


def _saved_tracker_section(run: RunDir) -> TelemetrySection | None:
    """Return the trackers in resolved.yaml; None where it cannot be read, which other code reports."""
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
    """Return `certificate/passed`, and each check's value as `certificate/` and its name."""
    measured = {check["name"]: check["value"] for check in certificate["checks"]}
    numbers = numbers_of({"passed": certificate["passed"], **measured})
    return {f"certificate/{name}": value for name, value in numbers.items()}


def score_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return `SET/VARIANT/METRIC`, with `_low` and `_high` for the ends of its 95 % interval; likewise the paired
    difference of base and tuned model, as `SET/TUNED_minus_BASE/METRIC`; `gate/passed`, if a gate passed or failed.
    """
    values: dict[str, float] = {}
    for name, set_scores in summary["sets"].items():
        for variant, metrics in set_scores["variants"].items():
            for metric, estimate in metrics.items():
                values |= _with_interval(f"{name}/{variant}/{metric}", estimate["mean"], estimate["ci95"])
        tuned = select_tuned_variant(set_scores["variants"])
        for pair in set_scores["comparisons"]:
            if tuned and (pair["a"], pair["b"]) == (base_variant(tuned), tuned):
                key = f"{name}/{tuned}_minus_{pair['a']}/{pair['metric']}"
                values |= _with_interval(key, pair["difference"], pair["ci95"])
    if summary["gate"] and summary["gate"].get("outcome") != "cannot tell":
        values["gate/passed"] = float(summary["gate"]["passed"])
    return values


def _with_interval(name: str, value: float, interval: Sequence[float]) -> dict[str, float]:
    low, high = interval
    return {name: float(value), f"{name}_low": float(low), f"{name}_high": float(high)}


def select_example_rows(run: RunDir, summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return rows that base and tuned model answered, from the first set that has both; evenly spaced over all of them,
    not the best. Without secrets, and long texts truncated.

    Columns: question, expected, base, tuned, outcome: won, lost or same by the primary metric, or empty where a recipe
    has no such metric per row.
    """
    for name, set_scores in summary["sets"].items():
        tuned = select_tuned_variant(set_scores["variants"])
        if tuned and base_variant(tuned) in set_scores["variants"]:
            with contextlib.suppress(SureFitError):  # answers that are missing, or to other rows
                return _side_by_side(run, name, tuned, set_scores.get("primary_metric", summary["primary_metric"]))
    return []


def _side_by_side(run: RunDir, set_name: str, tuned: str, metric: str) -> list[dict[str, str]]:
    base_answers, tuned_answers = (read_variant(run, set_name, variant) for variant in (base_variant(tuned), tuned))
    pairs = list(zip(align_answers(base_answers, tuned_answers), tuned_answers.lines, strict=True))
    return [_row(*pair, metric) for pair in evenly_spaced(pairs, ROWS)]


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
    """Return text without secrets that may leave this machine; before it is truncated, because half a key would not be
    recognized.
    """
    from surefit.report.text import drop_surrogates

    if value is None:
        return ""
    return drop_surrogates(redact(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
