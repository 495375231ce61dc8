"""Number of CPU threads of a process: computed from facts, so that a resumed run has the same number of threads."""

from __future__ import annotations

SMALL_MODEL = 20_000_000
"""Parameters below which the operations are too small to share out among many threads."""
OF_A_SMALL_MODEL = 2
"""Threads for small models: the largest number measured (docs/training.md), 1.5 times the speed of one."""


def cpu_threads(parameters: int | None, cores: int, processes: int = 1, asked: int | None = None) -> int:
    """Return the number of threads of one process.

    Args:
        parameters: parameters of the model; None where they are not known.
        cores: CPU cores that this process may use.
        processes: processes of the run that share them.
        asked: OMP_NUM_THREADS, which takes precedence.

    >>> cpu_threads(1_400_000, 8), cpu_threads(135_000_000, 8), cpu_threads(135_000_000, 8, processes=3)
    (2, 8, 2)
    >>> cpu_threads(1_400_000, 8, asked=4)
    4
    """
    if asked is not None:
        return asked
    fair = max(1, cores // processes)
    return min(fair, OF_A_SMALL_MODEL) if parameters is not None and parameters < SMALL_MODEL else fair
