"""Installation of SureFit's extras: it is on no package index, so from its clone and with the tested versions. The hash
of what is installed."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path

import surefit

INSTALL = "pip install -c constraints.txt"
"""Command to run in the clone. On an index, the name would be somebody else's package."""


def install_extra(extra: str, *, upgrade: bool = False) -> str:
    """Return the command that installs an extra, and where to run it.

    >>> install_extra("quant")
    "in the clone of SureFit: pip install -c constraints.txt '.[quant]'"
    """
    return f"in the clone of SureFit: {INSTALL}{' --upgrade' if upgrade else ''} '.[{extra}]'"


@cache
def code_sha256() -> str:
    """Return the hash of SureFit's modules and of the names of all packages, which include their versions: with another
    version a row may become another example, and a step may need other memory."""
    root, digest = Path(surefit.__file__).parent, hashlib.sha256(sys.version.encode())
    for name in sorted({entry.name for directory in sys.path for entry in Path(directory).glob("*.dist-info")}):
        digest.update(f"{name}\n".encode())
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
