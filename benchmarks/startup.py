"""What `surefit --help` and `surefit check` cost before they answer: CPU seconds and modules imported.

    python benchmarks/startup.py [--repeats 5] [--config configs/function-calling-nano.yaml] [--json]

CPU seconds are user + system time of the whole process, the smallest and the median of the repeats. As a yardstick that
moves with the machine, the same is measured for a Python that does nothing and for `import torch`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HEAVY = ("torch", "transformers", "datasets", "peft", "pyarrow", "numpy", "pandas")


def cpu_seconds(command: list[str]) -> float:
    """User + system seconds of one finished child process; a failing one is an error."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def imported_modules(arguments: list[str]) -> list[str]:
    """The modules that `python -m surefit ARGUMENTS` imports, as `-X importtime` reports them."""
    command = [sys.executable, "-X", "importtime", "-m", "surefit", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return [line.rpartition("|")[2].strip() for line in rows[1:]]


def measure(name: str, command: list[str], repeats: int, arguments: list[str] | None) -> dict[str, Any]:
    cpu_seconds(command)  # warm-up: byte-compilation and the page cache
    seconds = [cpu_seconds(command) for _ in range(repeats)]
    row: dict[str, Any] = {"command": name, "cpu_min": min(seconds), "cpu_median": statistics.median(seconds)}
    if arguments is not None:
        modules = imported_modules(arguments)
        row["modules"] = len(modules)
        row["heavy"] = sorted({module.partition(".")[0] for module in modules} & set(HEAVY))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs/function-calling-nano.yaml")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    surefit = [sys.executable, "-m", "surefit"]
    check = ["check", str(options.config)]
    rows = [
        measure("python -c pass", [sys.executable, "-c", "pass"], options.repeats, None),
        measure("surefit --help", [*surefit, "--help"], options.repeats, ["--help"]),
        measure(f"surefit check {options.config.name}", [*surefit, *check], options.repeats, check),
        measure("python -c 'import torch'", [sys.executable, "-c", "import torch"], options.repeats, None),
    ]
    if options.json:
        print(json.dumps({"python": sys.version.split()[0], "cpus": os.cpu_count(), "rows": rows}))
        return
    print(f"{'command':44} {'CPU s min':>10} {'median':>8} {'modules':>8}  heavy modules")
    for row in rows:
        heavy = ", ".join(row["heavy"]) or "none" if "heavy" in row else ""
        seconds = f"{row['cpu_min']:10.3f} {row['cpu_median']:8.3f}"
        print(f"{row['command']:44} {seconds} {row.get('modules', ''):>8}  {heavy}")


if __name__ == "__main__":
    main()
