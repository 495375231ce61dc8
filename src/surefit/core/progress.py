"""How library code says how far it is: through a function that it is handed, never by printing."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int, str], None]
"""Called with (done, total, what is being done)."""


def silent(done: int, total: int, text: str) -> None:
    """The `OnProgress` of a caller who does not want to know."""
