"""Scoring of many rows in several processes, for metrics that need a noticeable part of a second per row."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from surefit.core.processes import pool

Item = TypeVar("Item")
Result = TypeVar("Result")
WORTH_PROCESSES = 10.0
"""Seconds of work below which one process is as fast: starting each of the others needs about two."""
PARTS = 8
"""Chunks per process, so that a long row at the end does not block the others."""


def map_in_processes(
    function: Callable[[Item], Result], items: Sequence[Item], seconds: float, processes: int | None = None
) -> list[Result]:
    """Return the function's value for each item, in their order.

    Args:
        function: a module-level function, so that other processes can import it.
        seconds: estimated time of all items in one process.
        processes: by default all CPU cores available to this process if the work is worth it, else one.
    """
    if processes is None:
        processes = _cores() if seconds > WORTH_PROCESSES else 1
    if min(processes, len(items)) <= 1:
        return [function(item) for item in items]
    with pool(min(processes, len(items))) as workers:  # scorers do not import torch
        return list(workers.map(function, items, chunksize=max(1, len(items) // (PARTS * processes))))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
