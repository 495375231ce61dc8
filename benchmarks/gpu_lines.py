"""Files of JSON lines that survive kill -9: appended whole, on the disk before the next thing happens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def append(file: Path, line: dict[str, Any]) -> None:
    """Write a line in one go, after what is there; a piece that a killed process left is closed first."""
    with file.open("ab+") as target:
        target.seek(0, os.SEEK_END)
        if target.tell():
            target.seek(-1, os.SEEK_END)
            torn = target.read(1) != b"\n"
        else:
            torn = False
        target.write((b"\n" if torn else b"") + json.dumps(line).encode() + b"\n")
        target.flush()
        os.fsync(target.fileno())


def lines(file: Path) -> list[dict[str, Any]]:
    """Every whole line; none where there is no file."""
    found = []
    for text in file.read_bytes().splitlines() if file.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found
