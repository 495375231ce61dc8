"""Record of the machine and packages that a run used, written beside it: environment.json."""

from __future__ import annotations

import platform
from typing import Any

from surefit import __version__
from surefit.core import env
from surefit.facts.hardware import HardwareFacts, installed_version
from surefit.facts.threads import cpu_threads

PACKAGES = (
    "torch", "transformers", "peft", "tokenizers", "safetensors", "datasets", "numpy", "pydantic",
    "accelerate", "bitsandbytes", "triton",
)  # fmt: skip
"""Packages that can change a number in a run; those that are not installed are left out."""


def environment_record(hardware: HardwareFacts, parameters: int | None = None) -> dict[str, Any]:
    """Return the content of environment.json. No host name, no user, no path: the record may be published with the run.

    Args:
        parameters: parameters of the model, which decide the number of CPU threads.
    """
    local_processes = env.distributed_env()[3]
    return {
        "surefit": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": hardware.cpu_count,
        "threads": cpu_threads(parameters, hardware.cpu_count, local_processes, env.threads_asked())
        if hardware.kind == "cpu"
        else None,
        "memory_bytes": hardware.ram_bytes,
        "gpus": [hardware.name] * max(1, hardware.gpu_count) if hardware.kind == "cuda" else [],
        "packages": {name: version for name in sorted(PACKAGES) if (version := installed_version(name))},
    }
