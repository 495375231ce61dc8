"""What `surefit check` costs on a 3B config with 60,000 rows: CPU seconds, rows/s, heavy modules imported.

    python benchmarks/check_speed.py [--rows 60000] [--repeats 5] [--limit 2.0] [--json]

CPU seconds are user + system time of the whole process, the smallest of the repeats; a first call that warms the page
cache is not counted. The rows have xLAM's shape and size and are written into a temporary folder; the model's facts
come with the package, so no network is needed. Exits with 1 above the limit, or where a heavy module is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from startup import cpu_seconds, imported_modules

FORBIDDEN = {"torch", "transformers", "datasets", "peft", "accelerate"}
CONFIG = Path(__file__).parents[1] / "configs/function-calling-llama-3.2-3b.yaml"
VERBS = ("get", "find", "list", "convert", "book", "cancel", "rank", "translate", "measure", "compare")
NOUNS = ("weather", "flight", "invoice", "playlist", "route", "currency", "recipe", "patient", "stock", "league")


def write_rows(path: Path, count: int) -> None:
    """Rows as xLAM's 60,000: about 1.5 kB each, tools and answers as JSON text."""
    draw = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            file.write(json.dumps(_row(number, draw)) + "\n")


def _row(number: int, draw: random.Random) -> dict[str, Any]:
    tools = []
    for _ in range(draw.randint(1, 4)):
        name = f"{draw.choice(VERBS)}_{draw.choice(NOUNS)}_{draw.randint(0, 99)}"
        parameters = {
            f"{draw.choice(NOUNS)}_{key}": {"description": f"The {key} to look for in this call.", "type": "str"}
            for key in ("id", "city", "date")[: draw.randint(1, 3)]
        }
        tools.append({"name": name, "description": f"Tool {name}, one of many. " * 3, "parameters": parameters})
    called = draw.choice(tools)
    arguments = {key: f"value {draw.randint(0, 10**6)}" for key in called["parameters"]}
    query = f"Request {number}: " + " ".join(draw.choice(NOUNS + VERBS) for _ in range(20))
    answers = [{"name": called["name"], "arguments": arguments}]
    return {"query": query, "tools": json.dumps(tools), "answers": json.dumps(answers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=2.0, help="CPU seconds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        write_rows(rows, options.rows)
        size = rows.stat().st_size
        check = ["check", str(CONFIG), "--set", f"data.train={rows}", "--set", f"output_dir={folder}/run"]
        command = [sys.executable, "-m", "surefit", *check]
        cpu_seconds(command)
        started = time.perf_counter()
        seconds = [cpu_seconds(command) for _ in range(options.repeats)]
        wall = (time.perf_counter() - started) / options.repeats
        modules = imported_modules(check)
    heavy = sorted({module.partition(".")[0] for module in modules} & FORBIDDEN)
    best = min(seconds)
    result = {
        "rows": options.rows, "megabytes": round(size / 1e6, 1), "cpu_seconds": round(best, 3),
        "cpu_seconds_median": round(statistics.median(seconds), 3), "wall_seconds_mean": round(wall, 3),
        "rows_per_second": round(options.rows / best), "heavy_modules": heavy, "limit": options.limit,
        "passed": best <= options.limit and not heavy, "python": sys.version.split()[0], "cpus": os.cpu_count(),
    }  # fmt: skip
    if options.json:
        print(json.dumps(result))
    else:
        print(f"surefit check {CONFIG.name}, {options.rows:,} rows ({result['megabytes']} MB)")
        print(f"CPU: {best:.2f} s at best, {result['cpu_seconds_median']:.2f} s median of {options.repeats}")
        print(f"rows per CPU second: {result['rows_per_second']:,}")
        print(f"heavy modules imported: {', '.join(heavy) or 'none'} (of {len(modules)} modules)")
        print(
            f"{'PASSED' if result['passed'] else 'FAILED'}: limit {options.limit} s, no {', '.join(sorted(FORBIDDEN))}"
        )
    raise SystemExit(not result["passed"])


if __name__ == "__main__":
    main()
