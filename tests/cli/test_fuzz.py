"""A reduced run of benchmarks/fuzz_inputs.py: whatever is in the files, a message and a documented exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/fuzz_inputs.py"


def test_mutated_inputs_end_with_a_message() -> None:
    command = [sys.executable, str(SCRIPT), "--n", "20", "--seed", "7", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    summary = json.loads(done.stdout)
    assert summary["cases"] == 20
    assert len(summary["exit_codes"]) >= 2, "some files are fine, some are not"
    assert summary["failures"] == []
