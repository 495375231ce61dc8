"""Writes the generated sample sets: `python scripts/nano/make_samples.py [--out DIR]`. Same bytes every time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import amr_rows
import corpus
import math_code_rows
import rec_rows
import request_rows
import summary_rows
from surefit.core.rundir import write_atomic

PACKAGE_FOLDER = Path(__file__).resolve().parents[2] / "src" / "surefit" / "samples"


def main() -> None:
    """Writes one JSONL file per sample set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PACKAGE_FOLDER, help="folder to write (default: the package's)")
    for path in write_samples(parser.parse_args().out):
        print(f"{path}  {path.stat().st_size} bytes")


def write_samples(folder: Path) -> list[Path]:
    """Generates every sample set and writes it into `folder`."""
    paths = []
    sets = [part.sample_sets() for part in (corpus, request_rows, amr_rows, math_code_rows, rec_rows, summary_rows)]
    for name, rows in (item for part in sets for item in part.items()):
        path = folder / f"{name}.jsonl"
        write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        paths.append(path)
    return paths


if __name__ == "__main__":
    main()
