"""Saying what a check found, of a config of ours or of another tool's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.core.errors import EXIT_FINDINGS, EXIT_OK
from surefit.core.units import duration_text, plural

if TYPE_CHECKING:
    from surefit.cli.render import Output

LATER_FACTS = {"BatchFacts", "JobScript"}
"""Facts that no config can give: the batches are looked at by `train`, a batch script is checked by itself."""
FACT_NAMES = {
    "Config": "a whole run", "ResolvedConfig": "the run's steps and batches", "ModelFacts": "the model",
    "TokenizerFacts": "the tokenizer", "HardwareFacts": "the device", "DatasetFacts": "the rows",
    "AuditFacts": "the rows", "ExampleFacts": "the rows", "EvalPromptFacts": "the rows",
    "StackFacts": "the installed packages",
}  # fmt: skip
"""What a rule needs, in words."""


UNREAD = "no row was looked at: "
"""The beginning of a note that says more than the rest: nothing is known of the rows."""


def say_report(out: Output, report: dict[str, Any], path: Path, notes: Iterable[str] = (), style: str = "text") -> int:
    """Say what a check found, in the format that was asked for; the exit code.

    Args:
        report: the content of check.json.
        path: the file that was checked.
        notes: what the check does not speak for.
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
    """The codes with their reasons, in one line."""
    counts = Counter((one["code"], " ".join(one["reason"].split())) for one in suppressed)
    return "; ".join(f"{code}{f' ×{n}' if n > 1 else ''} ({reason})" for (code, reason), n in counts.items())


def skipped_rules_note(skipped: Mapping[str, Sequence[str]]) -> list[str]:
    """One line that says how many rules had nothing to judge, and what it is that is not known."""
    rules = [lacked for lacked in skipped.values() if not LATER_FACTS & set(lacked)]
    if not rules:
        return []
    unknown = dict.fromkeys(FACT_NAMES.get(fact, fact) for lacked in rules for fact in lacked)
    return [f"{plural(len(rules), 'rule')} had nothing to judge; not known here: {', '.join(unknown)}"]


def _count(report: dict[str, Any], severity: str) -> int:
    return sum(finding["severity"] == severity for finding in report["findings"])
