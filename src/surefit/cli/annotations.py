"""Findings in the formats of other programs: SARIF 2.1.0 for code scanning, GitHub's annotation lines for a log."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from surefit import __version__
from surefit.config.load import OVERRIDE
from surefit.core.errors import DataError, MachineError, ModelError, SureFitError
from surefit.lint.engine import find_rule

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_SARIF_LEVEL = {"error": "error", "warning": "warning", "info": "note"}
_GITHUB_LEVEL = {"error": "error", "warning": "warning", "info": "notice"}
_ROW = re.compile(r" row \d+$")
"""Suffix of the name of a file whose rows have no line numbers."""


def to_sarif(report: Mapping[str, Any], checked: Path) -> str:
    """Return a report as a SARIF log (OASIS, version 2.1.0), the suppressed findings with their reasons.

    Args:
        report: the content of check.json.
        checked: the file that was checked; findings that have no file of their own point to it.
    """
    suppressed: list[dict[str, Any]] = report.get("suppressed", [])
    findings = [*report["findings"], *suppressed]
    codes = sorted({finding["code"] for finding in findings})
    driver = {"name": "SureFit", "version": __version__, "rules": [_sarif_rule(code) for code in codes]}
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_sarif_result(finding, codes, checked) for finding in findings],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False)


def _sarif_rule(code: str) -> dict[str, Any]:
    rule = find_rule(code)
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": rule.summary},
        "help": {"text": rule.doc, "markdown": rule.doc},
        "defaultConfiguration": {"level": _SARIF_LEVEL[rule.severity]},
    }


def _sarif_result(finding: Mapping[str, Any], codes: Sequence[str], checked: Path) -> dict[str, Any]:
    uri, line = _place(finding, checked)
    location: dict[str, Any] = {"artifactLocation": {"uri": f"{'file://' if uri[0] == '/' else ''}{quote(uri)}"}}
    if line is not None:
        location["region"] = {"startLine": line}
    result: dict[str, Any] = {
        "ruleId": finding["code"],
        "ruleIndex": codes.index(finding["code"]),
        "level": _SARIF_LEVEL[finding["severity"]],
        "message": {"text": _text(finding)},
        "locations": [{"physicalLocation": location}],
    }
    if "reason" in finding:
        result["suppressions"] = [{"kind": "inSource", "justification": finding["reason"]}]
    return result


def to_github_annotations(report: Mapping[str, Any], checked: Path) -> str:
    """Return a report as GitHub workflow commands, one line per finding; suppressed findings are left out.

    Args:
        report: the content of check.json.
        checked: the file that was checked; findings that have no file of their own point to it.
    """
    return "\n".join(_github_line(finding, checked) for finding in report["findings"])


def _github_line(finding: Mapping[str, Any], checked: Path) -> str:
    path, line = _place(finding, checked)
    properties = {"file": path, "line": line, "title": f"{finding['code']} {finding['name']}"}
    property_text = ",".join(f"{key}={_property(str(value))}" for key, value in properties.items() if value is not None)
    return f"::{_GITHUB_LEVEL[finding['severity']]} {property_text}::{_data(_text(finding))}"


def _data(text: str) -> str:
    """
    >>> _data("100 %\\nof 3")
    '100 %25%0Aof 3'
    """
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """
    >>> _property("C:\\\\a,b%")
    'C%3A\\\\a%2Cb%25'
    """
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _text(finding: Mapping[str, Any]) -> str:
    key = f"{finding['field']}: " if finding["field"] else ""
    return f"{key}{finding['message']}" + (f"\nhelp: {finding['help']}" if finding["help"] else "")


def _place(finding: Mapping[str, Any], checked: Path) -> tuple[str, int | None]:
    """Return the (path, line) of a finding; the path is relative to the working directory if it lies below it."""
    finding_path = finding["path"]
    path = checked if finding_path in (None, OVERRIDE) else Path(_ROW.sub("", finding_path))
    try:
        path = path.absolute().relative_to(Path.cwd())
    except (ValueError, OSError):
        path = path.absolute()
    return path.as_posix(), finding["line"]


def error_report(error: SureFitError) -> dict[str, Any]:
    """Return the errors that stopped the check as a report: in continuous integration they need annotations as well."""
    codes = {DataError: "DAT001", ModelError: "MOD001", MachineError: "ENV003"}
    findings = []
    for problem in (error, *error.also):
        rule = find_rule(codes.get(type(problem), "CFG004"))
        stamped = {
            "code": rule.code,
            "name": rule.name,
            "severity": "error",
            "path": problem.path,
            "line": problem.line,
        }
        findings.append(stamped | {"field": problem.field, "message": problem.message, "help": problem.help})
    return {"findings": findings}


DOCUMENTS: dict[str, Callable[[Mapping[str, Any], Path], str]] = {"sarif": to_sarif, "github": to_github_annotations}
"""Format → (report, the file that was checked) → the text for stdout."""
