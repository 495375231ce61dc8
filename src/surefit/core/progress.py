"""How library code says how far it is: through a function that it is handed, never by printing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

OnProgress = Callable[[int, int, str], None]
"""Called with (done, total, what is being done)."""


def ignore_progress(done: int, total: int, text: str) -> None:
    """The `OnProgress` of a caller who does not want to know."""


_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def progress_listener(listener: Callable[[str], None]) -> Iterator[None]:
    """Have `emit_progress_line` say its lines to someone, in this context."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def emit_progress_line(text: str) -> None:
    """A line about work that whoever asked does not know of: any stage may be the first that needs a converted model.
    Nobody hears it where nobody listens."""
    if (listener := _listener.get()) is not None:
        listener(text)
