"""A reduced run of benchmarks/fuzz_inputs.py: whatever is in the files, a message and a documented exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/fuzz_inputs.py"


@pytest.mark.slow
def test_mutated_inputs_end_with_a_message() -> None:
    command = [sys.executable, str(SCRIPT), "--n", "20", "--seed", "7", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    summary = json.loads(done.stdout)
    assert summary["cases"] == 20
    assert len(summary["exit_codes"]) >= 2, "some files are fine, some are not"
    assert summary["failures"] == []


READERS = SCRIPT.with_name("fuzz_readers.py")


def readers(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(READERS), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    summary: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return summary


@pytest.mark.slow
def test_every_light_reader_says_what_is_wrong_with_a_file() -> None:
    """Those that need neither torch nor a trained run."""
    summary = readers("--light", "--n", "150", "--seed", "3")
    assert summary["failures"] == []
    assert (summary["cases"], summary["readers"]) == (150, 11)
    assert summary["refused"] > 40, "most damage is noticed"


@pytest.mark.long
def test_every_reader_says_what_is_wrong_with_a_file() -> None:
    summary = readers("--n", "2100", "--seed", "1")
    assert summary["failures"] == []
    assert summary["readers"] == 21
    assert summary["refused"] > 800
