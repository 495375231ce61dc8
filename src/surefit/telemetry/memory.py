"""The memory that a run used, phase by phase: PyTorch's allocator statistics on a GPU, the process's RAM on a CPU.

The counters are read and reset at a change of phase, never inside one: a step costs nothing more.
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
    """The peak memory of every phase of a run, in bytes.

    On a GPU `allocated` is in tensors, `reserved` from the driver, and `held` in tensors at the phase's end. On a CPU
    `resident` is the peak RAM of the process from `reset_peak` to the phase's end: within a run it never falls.

    Attributes:
        phases: phase → these figures; before the first `enter` the phase is "load".
    """

    def __init__(self) -> None:
        self.phases: dict[str, dict[str, int]] = {}
        self._cuda = torch.cuda.is_available()
        self._now = "load"

    def enter(self, name: str) -> None:
        """Begin another phase; nothing happens if it is the current one."""
        if name == self._now:
            return
        self._read()
        self._now = name
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Interrupt the current phase by another one."""
        interrupted = self._now
        self.enter(name)
        try:
            yield
        finally:
            self.enter(interrupted)

    @contextmanager
    def noted(self, run: RunDir) -> Iterator[None]:
        """Write the phases into events.jsonl at the end, whichever way the run ends."""
        try:
            yield
        finally:
            self._read()
            with suppress(SureFitError):  # a full disk must not hide the error that filled it
                run.note("train", "memory", phases=self.phases)

    def _read(self) -> None:
        current = _on_gpu() if self._cuda else {"resident": _resident()}
        peaks = self.phases.get(self._now, current)
        self.phases[self._now] = {key: max(peaks[key], value) for key, value in current.items()}


def reset_peak() -> None:
    """Reset the process's peak RAM, so that earlier use, as in a notebook, is not counted as the run's.

    Linux only (proc(5), clear_refs); elsewhere, and without permission, the peak is not reset.
    """
    with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _on_gpu() -> dict[str, int]:
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "held": torch.cuda.memory_allocated(),
    }


def _resident() -> int:
    """Return the peak RAM of this process in bytes.

    Linux's `ru_maxrss` starts with the RAM of the parent process, so on Linux the peak is read from /proc; macOS counts
    `ru_maxrss` in bytes.
    """
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else KIB)
