"""A probe of whether programs written by models can be run here: the sandbox, tested."""

from __future__ import annotations

from collections.abc import Iterator

from surefit.core.errors import MachineError
from surefit.core.jail import find_working_sandbox
from surefit.doctor.probe import Probe

_WAYS = {"own": "Linux namespaces", "bwrap": "bubblewrap"}


def sandbox_probes() -> Iterator[Probe]:
    """Yield a probe that runs a one-line program in the sandbox: the way that works, or the reason that none does."""
    try:
        way = find_working_sandbox()
    except MachineError as error:
        fact = f"none, so the recipe code_generation cannot score: {error.message}"
        yield Probe("sandbox", fact, "warn", error.help)
    else:
        yield Probe("sandbox", f"{_WAYS[way]}, tested: generated programs run without files, network or permissions")
