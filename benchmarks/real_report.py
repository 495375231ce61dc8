"""The lines of benchmarks/real.py as the tables of docs/real.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefit.core.rundir import write_atomic
from surefit.core.units import bytes_text, duration_text

MARKS = ("<!-- benchmarks/real.py writes from here -->", "<!-- to here -->")
Line = Mapping[str, Any]


def report(lines: Sequence[Line]) -> str:
    """Two tables: what was gained, and what it took. Of each task the newest line."""
    newest = {line["task"]: line for line in lines}
    gained = [row for line in newest.values() for row in gains(line)]
    head = ["task", "rows", "metric", "base", "tuned", "difference (95 %)", "n", "won : lost", "text loss"]
    took = ["task", "rows", "steps", "tokens", "tokens/s", "wall", "processor", "training", "peak RSS",
            "memory planned", "held", "time", "disk", "certificate"]  # fmt: skip
    tables = [table(head, gained), table(took, [costs(line) for line in newest.values()])]
    return "\n\n".join(tables) + "\n"


def gains(line: Line) -> list[list[str]]:
    """A row for every scored set of a task."""
    rows = []
    for name, found in line["sets"].items():
        low, high = found["ci95"]
        text = line["text_loss"]
        rows.append([
            line["task"] if not rows else "", "held out" if name == "eval" else name.replace("_", " "), found["metric"],
            percent(found["base"]), percent(found["tuned"]),
            f"{points(found['difference'])} ({points(low)} to {points(high)})", str(found["n"]),
            f"{found['wins']} : {found['losses']}",
            f"{text['base']:.3f} → {text['tuned']:.3f}" if not rows else "",
        ])  # fmt: skip
    return rows


def costs(line: Line) -> list[str]:
    """What a task took, beside what was planned."""
    plan, against = line["memory_plan"], line["against"]
    disk = [row for what, row in against.items() if "disk" in what or "checkpoint" in what]
    whole = [sum(row[key] for row in disk if row["planned"] and row["actual"]) for key in ("planned", "actual")]
    planned = f"{gib(plan['low'])} to {gib(plan['high'])}" if plan["high"] else "not planned"
    return [
        line["task"], f"{line['train_rows']:,}", str(line["steps"]), f"{line['tokens']:,}",
        f"{line['tokens_per_second']:,.0f}", duration_text(sum(line["stage_seconds"].values())),
        duration_text(sum(line["stage_cpu_seconds"].values())),
        duration_text(line["train_seconds"]), bytes_text(max(line["rss_bytes"].values())), planned,
        gib(plan["actual"]), time_text(against), error_text(*whole), "passed" if line["certificate"] else "FAILED",
    ]  # fmt: skip


def time_text(against: Mapping[str, Any]) -> str:
    row = next((row for what, row in against.items() if what.startswith("seconds in all")), None)
    return error_text(row["planned"], row["actual"]) if row and row["planned"] else "not planned"


def error_text(planned: float | None, actual: float | None) -> str:
    """How far a plan is off, as a share of what was measured."""
    return f"{planned / actual - 1:+.1%}".replace("%", " %") if planned and actual else "not measured"


def gib(size: float | None) -> str:
    return bytes_text(size) if size else "unknown"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def points(value: float) -> str:
    return f"{100 * value:+.1f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def write_into(page: Path, text: str) -> None:
    """Replace what stands between the marks of a page.

    Raises:
        ValueError: the page has no marks.
    """
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    _, mark, after = rest.partition(MARKS[1])
    if not mark:
        raise ValueError(f"{page} has no {MARKS[0]} … {MARKS[1]}")
    write_atomic(page, f"{before}{MARKS[0]}\n\n{text}\n{mark}{after}")
