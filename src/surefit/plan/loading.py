"""Importing the heavy libraries without looking for garbage in them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection inside: torch, transformers and PEFT make millions of objects that all stay, and the
    collector would go through them again and again (about a tenth of the time their import takes)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
