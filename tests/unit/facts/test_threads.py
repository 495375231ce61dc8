"""Threads come from facts and from OMP_NUM_THREADS, never from how busy the machine is."""

import pytest

from surefit.facts.threads import SMALL_MODEL, cpu_threads


@pytest.mark.parametrize(
    ("parameters", "cores", "processes", "asked", "threads"),
    [
        (1_400_000, 2, 1, None, 2),
        (SMALL_MODEL - 1, 64, 1, None, 2),
        (SMALL_MODEL - 1, 64, 64, None, 1),
        (SMALL_MODEL, 64, 1, None, 64),
        (135_000_000, 2, 1, None, 2),
        (135_000_000, 64, 4, None, 16),
        (135_000_000, 2, 4, None, 1),
        (None, 2, 1, None, 2),
        (1_400_000, 2, 1, 1, 1),
        (135_000_000, 64, 1, 3, 3),
    ],
)
def test_threads(parameters: int | None, cores: int, processes: int, asked: int | None, threads: int) -> None:
    assert cpu_threads(parameters, cores, processes, asked) == threads
