"""Installation of SureFit's extras: it is on no package index, so from its clone and with the tested versions."""

from __future__ import annotations

INSTALL = "pip install -c constraints.txt"
"""Command to run in the clone. On an index, the name would be somebody else's package."""


def install_extra(extra: str, *, upgrade: bool = False) -> str:
    """Return the command that installs an extra, and where to run it.

    >>> install_extra("quant")
    "in the clone of SureFit: pip install -c constraints.txt '.[quant]'"
    """
    return f"in the clone of SureFit: {INSTALL}{' --upgrade' if upgrade else ''} '.[{extra}]'"
