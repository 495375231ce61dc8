"""How SureFit's extras are installed: it is on no package index, so from its clone and with the tested versions."""

from __future__ import annotations

INSTALL = "pip install -c constraints.txt"
"""In the clone. A name on an index would be somebody else's package."""


def install_extra(extra: str, *, upgrade: bool = False) -> str:
    """The command that installs an extra, and where it works.

    >>> install_extra("quant")
    "in the clone of SureFit: pip install -c constraints.txt '.[quant]'"
    """
    return f"in the clone of SureFit: {INSTALL}{' --upgrade' if upgrade else ''} '.[{extra}]'"
