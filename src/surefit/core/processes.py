"""Python processes that SureFit starts: none of them imports code from the working directory.

`python -m NAME` and the workers of `multiprocessing` search for modules in the working directory first, where somebody
else's `yaml.py` may lie beside a config. `-P` (PYTHONSAFEPATH) excludes it, and this package is named by its file.
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
"""The file that `python -m surefit` runs; started as a file it is this very package, wherever it is installed."""


def own_command(*arguments: str) -> list[str]:
    """Return the command line of another SureFit process."""
    return [sys.executable, "-P", str(MAIN), *arguments]


@contextmanager
def pool(
    workers: int, initializer: Callable[..., None] | None = None, initargs: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of worker processes, spawned and not forked: a fork would copy the thread pools of tokenizers and
    torch without their threads, and a caller's CUDA context.
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with (
        env.safe_path_for_children(),
        ProcessPoolExecutor(workers, get_context("spawn"), initializer=initializer, initargs=initargs) as executor,
    ):
        yield executor
