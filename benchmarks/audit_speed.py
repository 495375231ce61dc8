"""What a whole audit costs: rows per second of CPU time of one process, and the share of each stage.

    python benchmarks/audit_speed.py [--rows 60000] [--kind short|tools] [--json]

short: questions of the shipped sample with their calls as text answers (prompt and completion, no tools shown);
tools: the sample's own rows, each with the JSON of its tools. Every row gets words of its own: no two are equal.
Tokens are nano's, near-duplicates and round trips included; nothing is held back for several processes. Set
RAYON_NUM_THREADS=1 and OMP_NUM_THREADS=1, or tokenizers uses every core.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

from surefit import recipes, samples
from surefit.config.schema import ModelSection
from surefit.core import env
from surefit.data.audit import chunk, whole
from surefit.data.audit.chunk import AuditJob, ChunkAuditor
from surefit.data.read.load import load_rows
from surefit.data.tokens import tokenize
from surefit.model.tokenizer import load_tokenizer

WORDS = [
    word for name in ("amber barley canal dune ember fern", "glade harbour inlet jetty kelp") for word in name.split()
]
STAGES: list[tuple[str, Any, str]] = [
    ("detectors", chunk, "run_detectors"),
    ("rows to examples", ChunkAuditor, "_examples"),
    ("chat template", tokenize, "_all_segments"),
    ("template and tokenizer", ChunkAuditor, "_lengths"),
    ("round trips", ChunkAuditor, "_round_trips"),
    ("MinHash", chunk, "text_keys"),
    ("content hashes", chunk, "_digests"),
    ("repeated rows found", whole, "_observe_duplicates"),
]
INSIDE = {"chat template": "template and tokenizer"}
"""Stages whose time is also counted in another."""


def made_rows(count: int, kind: str) -> list[dict[str, Any]]:
    """`count` rows varied from the shipped sample."""
    draw = random.Random(0)
    source = list(load_rows(f"{samples.PREFIX}function-calling-train"))
    rows = []
    for number in range(count):
        row = source[number % len(source)]
        query = f"{row['query']}, {' '.join(draw.choices(WORDS, k=5))} {draw.randrange(10**6)}"
        if kind == "tools":
            rows.append({**row, "id": f"row-{number}", "query": query})
        else:
            rows.append({"prompt": query, "completion": row["answers"]})
    return rows


def timed(seconds: Counter[str], stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        start = time.process_time()
        try:
            return function(*arguments, **named)
        finally:
            seconds[stage] += time.process_time() - start

    return run


def measure(path: Path, kind: str) -> dict[str, Any]:
    tokenizer = load_tokenizer(ModelSection(name_or_path="surefit/nano"))
    recipe = "function_calling" if kind == "tools" else "chat"
    question = AuditJob(
        source=str(path),
        columns=(),
        recipe=partial(recipes.get_recipe, recipe),
        recipe_name=recipe,
        tokenizer=lambda: tokenizer,
        max_length=1024,
    )
    seconds: Counter[str] = Counter()
    for stage, owner, name in STAGES:
        setattr(owner, name, timed(seconds, stage, getattr(owner, name)))
    start = time.process_time()
    rows = load_rows(str(path))
    seconds["reading"] = time.process_time() - start
    found = whole.audit_rows(rows, question, expected=recipes.get_recipe(recipe).columns)
    total = time.process_time() - start
    for part, outer in INSIDE.items():
        seconds[outer] -= seconds[part]
    seconds["tokenizer"] = seconds.pop("template and tokenizer")
    seconds["the rest"] = total - sum(seconds.values())
    return {
        "kind": kind,
        "rows": len(rows),
        "tokens_per_row": round(found.whole.total / len(found.whole), 1),
        "seconds": round(total, 2),
        "rows_per_second": round(len(rows) / total),
        "shares": {stage: round(spent / total, 4) for stage, spent in seconds.most_common()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--kind", choices=("short", "tools"), default="short")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    env.quiet_libraries()
    env.one_tokenizer_thread()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in made_rows(options.rows, options.kind)))
        result = measure(path, options.kind)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['rows']:,} rows of {result['tokens_per_row']} tokens: {result['seconds']} s of CPU time, ", end="")
    print(f"{result['rows_per_second']:,} rows/s in one process")
    for stage, share in result["shares"].items():
        print(f"  {stage:26} {share:6.1%}")


if __name__ == "__main__":
    main()
