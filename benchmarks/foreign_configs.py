"""What `surefit check` and `surefit import` make of a collection of other tools' configs.

PYTHONPATH=src python benchmarks/foreign_configs.py --data DIR [--json] [--starts 20]

DIR has an `index.jsonl` with a line per file: its path, its tool (`other`: none that SureFit knows), a tag, and what
the tool's own parser says where it rejects the file. An error in any other file is a wrong one. A key is lost where
neither a value that `import` writes nor a comment names it. Times of one file are those of a process of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from surefit.cli.other_tools import run_applicable_rules
from surefit.core.errors import SureFitError
from surefit.importers import ImportedConfig, read_tool_config
from surefit.importers.write import to_config_yaml
from surefit.lint.engine import all_rules

REJECTED = "the_tools_own_parser_rejects"
REFUSED = "not a file of a tool that SureFit knows"
PARTS = ("accelerate", "deepspeed", "peft", "slurm")
"""Tools whose files describe a part of a run, of which no config is made."""


@dataclass
class Judged:
    """One file: what it is, what was found, and which of its keys `import` leaves unnamed."""

    file: str
    tool: str
    tag: str
    taken_for: str = ""
    refused: str = ""
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    imported: bool = False
    lost: list[str] = field(default_factory=list)
    rejected_by_the_tool: bool = False

    @property
    def wrong(self) -> bool:
        """Whether a file that its own tool takes is called broken."""
        return bool(self.errors) and not self.rejected_by_the_tool


def judged(root: Path, entry: dict[str, str]) -> Judged:
    """Check and import one file of the collection."""
    one = Judged(entry["file"], entry["tool"], entry["tag"], rejected_by_the_tool=REJECTED in entry)
    try:
        found = read_tool_config(root / one.file)
    except SureFitError as error:
        one.refused = error.message
        if REFUSED not in error.message:
            one.errors = [f"{error.line}: {error.message}"]
        return one
    one.taken_for = found.tool
    for finding in run_applicable_rules(found, all_rules())[0].findings:
        said = f"{finding.code}:{finding.line}: {finding.message}"
        {"error": one.errors, "warning": one.warnings}.get(finding.severity, []).append(said)
    if found.loaded is not None:
        one.imported = True
        one.lost = unnamed(found)
    return one


def unnamed(found: ImportedConfig) -> list[str]:
    """Keys that are set in the file and stand nowhere in what `import` writes."""
    text = to_config_yaml(found)
    wrong = tuple(f"{problem.field}." for problem in found.problems)
    named = set(re.findall(r"\w+", text))
    return [key for key in leaves(found.values) if key.rpartition(".")[2] not in named and not key.startswith(wrong)]


def leaves(tree: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys with a value that is not null, those in the entries of lists as well."""
    if isinstance(tree, list):
        for child in tree:
            yield from leaves(child, prefix) if isinstance(child, dict | list) else ()
        if prefix and not any(isinstance(child, dict) for child in tree):
            yield prefix
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    elif tree is not None:
        yield prefix


def seconds_per_start(root: Path, files: list[str]) -> float:
    """The median of the CPU seconds that `surefit check FILE` takes, each in a process of its own."""
    taken = []
    for file in files:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "surefit", "check", str(root / file)], capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(taken)


def summary(results: list[Judged]) -> dict[str, Any]:
    """The figures of all files."""
    tools = sorted({one.tool for one in results})
    return {
        "files": len(results),
        "wrong_errors": {tool: sum(one.wrong for one in results if one.tool == tool) for tool in tools},
        "files_by_tool": {tool: sum(one.tool == tool for one in results) for tool in tools},
        "taken_for_another_tool": sum(
            bool(one.taken_for) and one.taken_for != one.tool for one in results if one.tool != "other"
        ),
        "others_taken_for_a_tool": sum(one.tool == "other" and bool(one.taken_for) for one in results),
        "refused": sum(bool(one.refused) for one in results if one.tool != "other"),
        "rejected_by_the_tool": sum(one.rejected_by_the_tool for one in results),
        "of_them_found": sum(one.rejected_by_the_tool and bool(one.errors) for one in results),
        "imported": sum(one.imported for one in results),
        "with_lost_keys": sum(bool(one.lost) for one in results),
        "warnings": dict(Counter(said.partition(":")[0] for one in results for said in one.warnings).most_common()),
    }


def main() -> int:
    """Run it; 1 where more than a file in a hundred is wrongly called broken or a key is lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", action="store_true", help="every file with its findings, as JSON")
    parser.add_argument("--starts", type=int, default=0, help="files to time, each in a process of its own")
    given = parser.parse_args()
    index = [json.loads(line) for line in (given.data / "index.jsonl").read_text(encoding="utf-8").splitlines()]
    results = [judged(given.data, entry) for entry in index]
    figures = summary(results)
    if given.starts:
        files = [entry["file"] for entry in index[:: max(1, len(index) // given.starts)]][: given.starts]
        figures["median_cpu_seconds"] = round(seconds_per_start(given.data, files), 2)
    if given.json:
        print(json.dumps({**figures, "results": [asdict(one) for one in results]}, indent=1))
    else:
        print(json.dumps(figures, indent=1))
        for one in results:
            for error in one.errors if one.wrong else ():
                print(f"{one.file}: {error}")
            if one.lost:
                print(f"{one.file}: lost: {', '.join(one.lost)}")
    wrong = sum(figures["wrong_errors"].values())
    return 1 if wrong > len(results) / 100 or figures["with_lost_keys"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
