"""What a run on a CPU takes of RAM beside its tensors: the process itself, measured in the one that plans. Torch-free.

`surefit train` plans in the process that trains, and `surefit plan` imports the same libraries for its simulation, so
what either has when the simulation is done is what a step will find there. Which libraries are installed decides it:
transformers, PEFT and PyTorch import some of the others. A program that plans through the Python interface has data of
its own, which a run that it starts with `surefit.train` will have beside it, and another process will not.
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
"""Where nothing has been imported yet, or the system does not say what a process has: 597 MiB before the weights are
read, with torch, transformers and PEFT imported, the plan made and a tokenizer of 49,152 entries."""
LATER = (-30 * MIB, 130 * MIB)
"""What a run has in the end beside that: a plan's own objects go; the rows, a tokenizer, and the pages of the libraries
that only a step with numbers reads come."""


_for_another_process: ContextVar[bool] = ContextVar("for_another_process", default=False)


@contextmanager
def planning_for_new_process() -> Iterator[None]:
    """Plan for a process to come in this block: what the program that calls has in memory is not the run's."""
    token = _for_another_process.set(True)
    try:
        yield
    finally:
        _for_another_process.reset(token)


def process_overhead_bytes() -> tuple[int, int, str]:
    """Return what the process will take at least and at most, and how that is known."""
    resident = _resident() if "torch" in sys.modules and "peft" in sys.modules else None
    if resident is None:
        return *ASSUMED, "assumed"
    if _for_another_process.get() and resident > ASSUMED[1]:
        return *ASSUMED, f"assumed: the {bytes_text(resident)} of the program that plans are not counted"
    return resident + LATER[0], resident + LATER[1], "as measured"


def _resident() -> int | None:
    """The RAM this process has now, what it could give back left out; None where the system does not say."""
    gc.collect()
    trim_heap()
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * KIB
    return None
