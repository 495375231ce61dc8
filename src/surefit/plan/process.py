"""The RAM that a run on a CPU needs besides its tensors: the process itself, measured in the process that plans.
Torch-free.

`surefit train` plans in the process that trains, and `surefit plan` imports the same libraries for its simulation, so
the resident memory of either after the simulation is what a step will find there. It depends on the installed
libraries: transformers, PEFT and PyTorch import some of the others. A program that plans through the Python interface
has data of its own, which a run that it starts with `surefit.train` will have beside it, and another process will not.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from surefit.core.malloc import trim_heap
from surefit.core.units import KIB, MIB, bytes_text

ASSUMED = (500 * MIB, 740 * MIB)
"""Least and most bytes where nothing has been imported yet, or the system does not report a process's memory: 597 MiB
were measured before the weights are read, with torch, transformers and PEFT imported, the plan made and a tokenizer of
49,152 entries."""
LATER = (-30 * MIB, 130 * MIB)
"""Least and most bytes that a run adds by its end: a plan's own objects go; the rows, a tokenizer, and the pages of the
libraries that only a step with numbers reads come."""


_for_another_process: ContextVar[bool] = ContextVar("for_another_process", default=False)


@contextmanager
def planning_for_new_process() -> Iterator[None]:
    """Plan for a future process in this block: the memory of the calling program does not count."""
    token = _for_another_process.set(True)
    try:
        yield
    finally:
        _for_another_process.reset(token)


def process_overhead_bytes() -> tuple[int, int, str]:
    """Return the least and most bytes that the process will need, and how they are known."""
    resident = _resident() if "torch" in sys.modules and "peft" in sys.modules else None
    if resident is None:
        return *ASSUMED, "assumed"
    if _for_another_process.get() and resident > ASSUMED[1]:
        return *ASSUMED, f"assumed; the {bytes_text(resident)} of the planning process are not counted"
    return resident + LATER[0], resident + LATER[1], "as measured"


def _resident() -> int | None:
    """Return the RAM of this process in bytes, without memory that it could give back; None where the system does not
    report it."""
    gc.collect()
    trim_heap()
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * KIB
    return None
