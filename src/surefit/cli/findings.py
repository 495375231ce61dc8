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

LATER_FACTS = {"BatchFacts", "JobScript"}
"""Facts that no config provides: `train` checks the batches, and a batch script is checked on its own."""
FACT_NAMES = {
    "SureFitConfig": "a whole run", "ResolvedConfig": "the run's steps and batches", "ModelFacts": "the model",
    "TokenizerFacts": "the tokenizer", "HardwareFacts": "the device", "DatasetFacts": "the rows",
    "AuditFacts": "the rows", "ExampleFacts": "the rows", "EvalPromptFacts": "the rows",
    "StackFacts": "the installed packages",
}  # fmt: skip
"""Facts that rules need, in words."""


UNREAD = "no row was looked at: "
"""Prefix of a note that needs attention: nothing is known of the rows."""


def say_report(out: Output, report: dict[str, Any], path: Path, notes: Iterable[str] = (), style: str = "text") -> int:
    """Print the findings of a check in the selected format; return the exit code.

    Args:
        report: the content of check.json.
        path: the file that was checked.
        notes: limits of the check.
        style: text, json, sarif or github.
    """
    from surefit.cli.annotations import DOCUMENTS

    out.findings(report["findings"])
    errors, warnings, infos = (_count(report, severity) for severity in ("error", "warning", "info"))
    if report["findings"]:
        counted = f"{plural(errors, 'error')}, {plural(warnings, 'warning')}"
        out.say(f"{path}: {counted}{f', {infos} info' if infos else ''}")
    else:
        out.say(f"{path}: no problem found by {report['rules']} rules in {duration_text(report['seconds'])}", "green")
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


def skipped_rules_note(skipped: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a note with the number of rules that were skipped for missing facts, and the names of these facts."""
    missing_by_rule = [missing_facts for missing_facts in skipped.values() if not LATER_FACTS & set(missing_facts)]
    if not missing_by_rule:
        return []
    fact_names = dict.fromkeys(
        FACT_NAMES.get(fact, fact) for missing_facts in missing_by_rule for fact in missing_facts
    )
    return [f"{plural(len(missing_by_rule), 'rule')} had nothing to judge; not known here: {', '.join(fact_names)}"]


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
