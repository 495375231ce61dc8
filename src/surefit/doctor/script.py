"""The fixes that are commands, as a script to read and then run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable

from surefit.core.env import redact
from surefit.doctor.probe import Probe

HEADER = """\
# Written by `surefit doctor --fix-script`: the commands that fix what it found, each below its reason.
# Read it first. Then run it in the shell that will train, because some lines set variables of that shell:
#     source FILE
"""


def fix_script(probes: Iterable[Probe], interpreter: str = sys.executable) -> str:
    """Return a Bash script with every fix that is a command, and the others as comments.

    Nothing in it deletes or overwrites files.

    Args:
        probes: results of the doctor.
        interpreter: the Python whose packages `pip` changes.
    """
    lines = ["#!/usr/bin/env bash", HEADER]
    for probe in probes:
        if probe.verdict == "ok" or not probe.fix:
            continue
        lines.append(f"# {probe.name}: {_one_line(probe.fact)}")
        command = f"{shlex.quote(interpreter)} -m {probe.fix}" if probe.fix.startswith("pip ") else probe.fix
        lines.append(f"{command}\n" if probe.is_command else f"#   by hand: {_one_line(probe.fix)}\n")
    if len(lines) == 2:
        lines.append("# Nothing to fix.\n")
    return "\n".join(lines)


def _one_line(text: str) -> str:
    """Join a text into one line, so that a comment does not end inside an error message: what follows would be run."""
    return redact(" ".join(text.split()))
