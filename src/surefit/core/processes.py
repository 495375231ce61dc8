"""Python processes that SureFit starts: none of them takes code from the directory that one works in.

`python -m NAME` and the workers of `multiprocessing` look for modules in the working directory first, where somebody
else's `yaml.py` may lie beside a config. `-P` (PYTHONSAFEPATH) leaves it out, and this package is named by its file.
https://docs.python.org/3/using/cmdline.html#cmdoption-P
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefit.core import env

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

MAIN = Path(__file__).resolve().parents[1] / "__main__.py"
"""What `python -m surefit` runs; started as a file it is this very package, wherever that lies."""


def own_command(*arguments: str) -> list[str]:
    """The command line of another process of SureFit."""
    return [sys.executable, "-P", str(MAIN), *arguments]


@contextmanager
def pool(
    workers: int, initializer: Callable[..., None] | None = None, initargs: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """Worker processes, spawned and not forked: a fork would copy the thread pools of tokenizers and torch without
    their threads, and a caller's CUDA context."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with (
        env.safe_path_for_children(),
        ProcessPoolExecutor(workers, get_context("spawn"), initializer=initializer, initargs=initargs) as executor,
    ):
        yield executor
