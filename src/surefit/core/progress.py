"""Progress of library code: reported through a callback, never printed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

OnProgress = Callable[[int, int, str], None]
"""Called with (done, total, description of the work)."""


def ignore_progress(done: int, total: int, text: str) -> None:
    """Ignore progress; the default `OnProgress`."""


def offset_progress(on_progress: OnProgress, before: int, total: int, label: str = "") -> OnProgress:
    """Report the progress of a part of the work as progress of all: `before` are done, and the label comes first."""
    return lambda done, _, text: on_progress(before + done, total, f"{label} {text}".strip())


_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def progress_listener(listener: Callable[[str], None]) -> Iterator[None]:
    """Send the lines of `emit_progress_line` to a listener, in this context."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def emit_progress_line(text: str) -> None:
    """Report a line about work that the caller did not request: any stage may be the first that needs a converted
    model. Without a listener it is dropped.
    """
    if (listener := _listener.get()) is not None:
        listener(text)
