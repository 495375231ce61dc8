"""How many broken files of other tools `surefit check` finds the fault of, and how many sound ones it calls broken.

PYTHONPATH=src python benchmarks/breakages.py [--misses] [--json] [--select axolotl]

`breakages/index.jsonl` has a line per case: its folder, its tool, the file to check, whether it is broken, and by what.
A fault is found where an error or a warning names the key at fault or stands within a line of it; a sound file is
wronged by any error. Nothing is fetched.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

from typer.testing import CliRunner

from surefit.cli.app import app

CASES = Path(__file__).with_name("breakages")
JUDGED = ("error", "warning")


@dataclass
class Result:
    """One case: what was said of it, and whether that names its fault."""

    case: str
    tool: str
    broken: bool
    kind: str | None
    what: str
    findings: list[str] = field(default_factory=list)
    errors: int = 0
    caught: bool = False
    caught_as_info: bool = False
    crashed: str = ""


def names(entry: dict[str, Any]) -> list[str]:
    """The names of the key at fault, any of which will do."""
    at_fault = entry.get("field") or []
    return [at_fault] if isinstance(at_fault, str) else list(at_fault)


def points_at(finding: dict[str, Any], entry: dict[str, Any], file: Path) -> bool:
    """Whether a finding names the key at fault or stands within a line of it."""
    said = f"{finding.get('field') or ''}\n{finding.get('message') or ''}"
    if any(re.search(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])", said) for name in names(entry)):
        return True
    line, wanted = finding.get("line"), entry.get("line")
    same = Path(finding.get("path") or file).name == file.name
    return bool(same and line and wanted and abs(line - wanted) <= 1)


def refusal(said: dict[str, Any]) -> dict[str, Any]:
    """A file that cannot be read at all, as a finding."""
    return {"severity": "error", "code": said["error"], **{key: said.get(key) for key in ("field", "line", "message")}}


def judged(entry: dict[str, Any], runner: CliRunner) -> Result:
    """Check one case from inside its folder, as its user would."""
    one = Result(entry["case"], entry["tool"], entry["broken"], entry.get("kind"), entry["what"])
    file = CASES / entry["case"] / entry["check"]
    with contextlib.chdir(file.parent), contextlib.redirect_stderr(io.StringIO()):
        answer = runner.invoke(app, ["check", file.name, "--json"])
    lines = answer.stdout.strip().splitlines()
    try:
        said = json.loads(lines[-1])
        findings = said["findings"] if "findings" in said else [refusal(said)]
    except (IndexError, KeyError, TypeError, json.JSONDecodeError):
        one.crashed = (lines[-1] if lines else repr(answer.exception))[:300]
        return one
    for found in findings:
        severity = found["severity"]
        one.findings.append(f"{severity} {found['code']}:{found.get('line')}: {found['message']}")
        one.errors += severity == "error"
        if entry["broken"] and points_at(found, entry, file):
            one.caught |= severity in JUDGED
            one.caught_as_info |= severity not in JUDGED
    return one


def share(part: int, whole: int) -> str:
    """A count of a whole, with its percentage."""
    return f"{part}/{whole} ({100 * part / whole:.0f} %)" if whole else "0/0"


def table(results: list[Result]) -> str:
    """A line per tool, and one for all."""
    tools: dict[str, list[Result]] = defaultdict(list)
    for one in results:
        tools[one.tool].append(one)
    lines = [f"{'tool':16}{'caught':>18}{'info only':>12}{'wrong errors on sound':>24}"]
    for tool, of in [*tools.items(), ("all", results)]:
        broken, sound = [one for one in of if one.broken], [one for one in of if not one.broken]
        caught = share(sum(one.caught for one in broken), len(broken))
        info = sum(one.caught_as_info and not one.caught for one in broken)
        lines.append(f"{tool:16}{caught:>18}{info:>12}{share(sum(one.errors > 0 for one in sound), len(sound)):>24}")
    return "\n".join(lines)


def main() -> int:
    """Judge every case and say what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--misses", action="store_true", help="list the faults missed and the sound files wronged")
    parser.add_argument("--json", action="store_true", help="print every case as JSON")
    parser.add_argument("--select", default="", help="only the cases whose name contains this")
    options = parser.parse_args()
    entries = [json.loads(line) for line in (CASES / "index.jsonl").read_text(encoding="utf-8").splitlines()]
    runner = CliRunner()
    results = [judged(entry, runner) for entry in entries if options.select in entry["case"]]
    if options.json:
        print(json.dumps([asdict(one) for one in results], indent=1, ensure_ascii=False))
        return 0
    print(table(results))
    for crash in (one for one in results if one.crashed):
        print(f"no findings read: {crash.case}: {crash.crashed}")
    if options.misses:
        for one in results:
            if (one.broken and not one.caught) or (not one.broken and one.errors):
                print(f"\n{one.case}: {one.what}", *one.findings, sep="\n    ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
