"""Faster imports of the heavy libraries, and faster simulations with them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from surefit.core.gc_pause import pause_gc


def import_libraries() -> None:
    """Import the libraries of a simulation, in two thirds of the time."""
    # An error of an import is reported where the library is used.
    with pause_gc():
        with suppress(Exception):
            _import_bitsandbytes()
        with suppress(Exception):
            _import_transformers()
        with suppress(Exception):
            import peft  # noqa: F401
            import transformers.modeling_utils  # noqa: F401


def _import_transformers() -> None:
    """Import transformers without reading all its models' files twice (0.3 s; transformers 5.23 keeps what it has read
    under two spellings of the folder's name), without splitting each of these files into lines to find `__all__` (0.3
    s), and without SciPy, which only its losses of object detection use (0.4 s). Can go when transformers does that
    itself."""
    if "transformers" in sys.modules:
        return
    from transformers import utils
    from transformers.utils import import_utils

    read_structure = import_utils.create_import_structure_from_path

    def read_once(path: str) -> Any:
        folder = Path(path)
        return read_structure(folder.parent if folder.is_file() else folder)

    fetch_all = import_utils.fetch__all__

    def fetch_from_last(content: str) -> Any:
        return fetch_all(content[content.rfind("\n__all__") + 1 :])

    with (
        patch.object(import_utils, "create_import_structure_from_path", read_once),
        patch.object(import_utils, "fetch__all__", fetch_from_last),
    ):
        import transformers.models
    with patch.object(utils, "is_scipy_available", lambda: False):
        import transformers.loss.loss_utils  # noqa: F401


def _import_bitsandbytes() -> None:
    """Import bitsandbytes, where it is installed, without PyTorch's compiler.

    It calls `torch.compile` on functions of its CPU backend (bitsandbytes 0.50, backends/default/ops.py), which imports
    the compiler: 0.7 s of every import of PEFT. Here the functions are compiled when they are first called. Can go when
    bitsandbytes does that itself.
    """
    if "bitsandbytes" in sys.modules:
        return
    import torch

    compiler = torch.compile

    def compile_lazily(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if function is None:
            return partial(compile_lazily, **options)
        compiled = cache(partial(compiler, function, **options))
        return wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    with patch.object(torch, "compile", compile_lazily):
        import bitsandbytes  # noqa: F401
