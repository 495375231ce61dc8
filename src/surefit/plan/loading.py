"""Importing the heavy libraries, and simulating with them, in less time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial, wraps
from typing import Any
from unittest.mock import patch


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection inside: torch, transformers and PEFT make millions of objects that all stay, and the
    collector would go through them again and again (about a tenth of the time their import takes, and of a simulation
    nearly half). What a simulated step frees is then freed at the same moment in every run, too."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def import_bitsandbytes() -> None:
    """Import it, where it is installed, without PyTorch's compiler.

    It calls `torch.compile` on functions of its CPU backend (bitsandbytes 0.50, backends/default/ops.py), which imports
    the compiler: 0.7 s of every import of PEFT. Here they are compiled when they are first called. Can go when
    bitsandbytes does that itself.
    """
    if "bitsandbytes" in sys.modules:
        return
    import torch

    compiler = torch.compile

    def later(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if function is None:
            return partial(later, **options)
        compiled = cache(partial(compiler, function, **options))
        return wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    # Whatever is wrong with it, whoever needs it says so.
    with patch.object(torch, "compile", later), suppress(Exception):
        import bitsandbytes  # noqa: F401
