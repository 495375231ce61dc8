"""How far the answers of a run follow the rule of its pairs: `preference_rule.py RUN [--rule polite|shorter] [--json]`.

Reads what `surefit evaluate RUN` generated (RUN/eval/SET/VARIANT.predictions.jsonl): of each set and model, the share
of polite answers, or the mean number of words, with its 95 % interval. An answer is polite if it has a word of courtesy
(scripts/preference_rows.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import numpy as np
from preference_rows import is_polite

from surefit.core.rundir import read_jsonl
from surefit.evaluate.stats import bootstrap_mean


def measure(run: Path, rule: str) -> list[dict[str, Any]]:
    """Return a row for each set and model that was evaluated."""
    rows = []
    for file in sorted(run.glob("eval/*/*.predictions.jsonl")):
        answers = [line["text"] for line in read_jsonl(file)]
        values = [float(is_polite(answer) if rule == "polite" else len(answer.split())) for answer in answers]
        value = float(np.mean(values))
        if rule == "polite":
            low, high = bootstrap_mean(values).low, bootstrap_mean(values).high  # Wilson's, of a share
        else:
            half = 1.96 * float(np.std(values, ddof=1)) / len(values) ** 0.5
            low, high = value - half, value + half
        variant = file.name.partition(".")[0]
        row = {"set": file.parent.name, "variant": variant, "answers": len(answers), "value": value}
        rows.append(row | {"low": low, "high": high})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rule", choices=("polite", "shorter"), default="polite")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = measure(asked.run, asked.rule)
    if not rows:
        print(f"{asked.run} has no generated answers: run `surefit evaluate {asked.run}` first", file=sys.stderr)
        return 1
    for row in rows:
        numbers = [row[key] for key in ("value", "low", "high")]
        said = "polite {:.1%} [{:.1%}, {:.1%}]" if asked.rule == "polite" else "words {:.1f} [{:.1f}, {:.1f}]"
        print(f"{row['set']:<8}{row['variant']:<9}{said.format(*numbers)} of {row['answers']} answers")
    if asked.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
