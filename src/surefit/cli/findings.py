"""Print the findings of a check, for SureFit's configs and other tools'."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefit.cli.render import Output
from surefit.core.errors import EXIT_FINDINGS, EXIT_OK
from surefit.core.units import duration_text, plural
from surefit.lint.skipped import Why, skipped_text

UNREAD = "no row was looked at: "
"""Prefix of a note that needs attention: nothing is known of the rows."""


def say_report(
    out: Output,
    report: dict[str, Any],
    path: Path,
    notes: Iterable[str] = (),
    style: str = "text",
    unknown: Why | Mapping[str, Why] = "elsewhere",
) -> int:
    """Print the findings of a check in the selected format; return the exit code.

    Args:
        report: the content of check.json.
        path: the file that was checked.
        notes: limits of the check.
        style: text, json, sarif or github.
        unknown: why facts are missing, for all or by fact.
    """
    from surefit.cli.annotations import DOCUMENTS

    out.findings(report["findings"])
    errors, warnings, infos = (_count(report, severity) for severity in ("error", "warning", "info"))
    skipped = skipped_text(report["skipped"], unknown)
    not_checked = f"; {skipped}" if skipped else ""
    if report["findings"]:
        counted = f"{plural(errors, 'error')}, {plural(warnings, 'warning')}"
        out.say(f"{path}: {counted}{f', {infos} info' if infos else ''}{not_checked}")
    else:
        outcome = f"no problem found by {report['rules']} rules in {duration_text(report['seconds'])}"
        out.say(f"{path}: {outcome}{not_checked}", None if skipped else "green")
    if report["suppressed"]:
        out.say(f"{path}: not counted, by lint.ignore: {_suppressed_text(report['suppressed'])}")
    for line in notes:
        if line.startswith(UNREAD):
            out.say(line, "yellow")
        else:
            out.note(line)
    if style in DOCUMENTS:
        out.document(DOCUMENTS[style](report, path))
    out.result(report)
    return EXIT_FINDINGS if errors else EXIT_OK


def _suppressed_text(suppressed: Sequence[dict[str, Any]]) -> str:
    """Return the suppressed codes with their reasons, in one line."""
    counts = Counter((finding["code"], " ".join(finding["reason"].split())) for finding in suppressed)
    return "; ".join(f"{code}{f' ×{n}' if n > 1 else ''} ({reason})" for (code, reason), n in counts.items())


def _count(report: dict[str, Any], severity: str) -> int:
    return sum(finding["severity"] == severity for finding in report["findings"])


@contextlib.contextmanager
def show_findings_on_failure(out: Output) -> Iterator[None]:
    """Print the findings of a check that stops the verb; with --json they are in the error."""
    from surefit.stages.checking import CheckFailed

    try:
        yield
    except CheckFailed as error:
        if not out.as_json:
            out.findings(error.findings)
            error.also = ()
        raise
