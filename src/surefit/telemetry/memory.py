"""What memory a run really took, phase by phase: on a GPU as PyTorch's allocator counts it, on a CPU the process's.

The counters are read and reset where a phase changes, never inside one: a step costs nothing more.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from surefit.core.errors import SureFitError
from surefit.core.rundir import RunDir
from surefit.core.units import KIB


class PhaseMemory:
    """The fullest moment of every phase of a run, in bytes.

    On a GPU `allocated` is in tensors, `reserved` from the driver, and `held` in tensors at the phase's end. On a CPU
    `resident` is the most RAM that the process had from `reset_peak` to the phase's end: within a run it never falls.

    Attributes:
        phases: phase → those figures; what comes before the first `enter` is "load".
    """

    def __init__(self) -> None:
        self.phases: dict[str, dict[str, int]] = {}
        self._cuda = torch.cuda.is_available()
        self._now = "load"

    def enter(self, name: str) -> None:
        """From here on it is another phase; nothing happens where it is the same."""
        if name == self._now:
            return
        self._read()
        self._now = name
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """A phase that interrupts the one it is in."""
        before = self._now
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def noted(self, run: RunDir) -> Iterator[None]:
        """Write the phases into events.jsonl at the end, whatever end it is."""
        try:
            yield
        finally:
            self._read()
            with suppress(SureFitError):  # a full disk must not hide the error that filled it
                run.note("train", "memory", phases=self.phases)

    def _read(self) -> None:
        now = _on_gpu() if self._cuda else {"resident": _resident()}
        before = self.phases.get(self._now, now)
        self.phases[self._now] = {key: max(before[key], value) for key, value in now.items()}


def reset_peak() -> None:
    """Count the process's most RAM from here on, so that what it had before, as in a notebook, is not taken for the
    run's. Linux only (proc(5), clear_refs); elsewhere, and where it is not allowed, the count goes on."""
    with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _on_gpu() -> dict[str, int]:
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "held": torch.cuda.memory_allocated(),
    }


def _resident() -> int:
    """The most RAM this process ever had. Linux's `ru_maxrss` begins with what the process had that started this one,
    so there it is read elsewhere; macOS counts it in bytes."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else KIB)
