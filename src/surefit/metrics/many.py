"""Scores of many rows in several processes, for scorers that take a noticeable part of a second per row."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from surefit.core.processes import pool

Item = TypeVar("Item")
Result = TypeVar("Result")
WORTH_PROCESSES = 10.0
"""Seconds of work below which one process is as fast: starting the others takes each of them about two."""
PARTS = 8
"""Portions that each process gets, so that a long row at the end keeps nobody waiting."""


def map_in_processes(
    function: Callable[[Item], Result], items: Sequence[Item], seconds: float, processes: int | None = None
) -> list[Result]:
    """The function's value for each item, in their order.

    Args:
        function: of a module, so that other processes can import it.
        seconds: what all items take one process, about.
        processes: by default as many as this process may use where that is worth it, else one.
    """
    if processes is None:
        processes = _cores() if seconds > WORTH_PROCESSES else 1
    if min(processes, len(items)) <= 1:
        return [function(item) for item in items]
    with pool(min(processes, len(items))) as workers:  # scorers import no torch
        return list(workers.map(function, items, chunksize=max(1, len(items) // (PARTS * processes))))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
