"""Simulations of earlier processes, so that a run which was planned before starts without simulating its step again.

A simulation follows from the settings of the step, the model's code and SureFit's own. CACHE/simulations/KEY.json is
named by all of them. What is measured (the process, the disk) is no part of it, and is measured anew for every plan.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from surefit.core import env
from surefit.core.errors import SureFitError
from surefit.core.packaging import code_sha256
from surefit.core.reading import read_json_file
from surefit.core.rundir import write_json
from surefit.plan.simulate import PhasePeak, SimulatedMemory, simulate_memory_cached
from surefit.plan.step_config import StepConfig
from surefit.plan.trace import Allocation

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
"""Packages whose code a simulation runs."""


def simulate_or_load(setting: StepConfig, cache: Path | None = None) -> SimulatedMemory:
    """Return `simulate_memory` of a setting, from the cache if an earlier process has simulated the same.

    Args:
        cache: the directory of the cache; `core.env.cache_dir()` if None.

    Raises:
        ConfigError, ModelError: as `simulate_memory`.
    """
    key = simulation_key(setting)
    if key is None:
        return simulate_memory_cached(setting.known)
    path = (cache if cache is not None else env.cache_dir()) / "simulations" / f"{key}.json"
    if (stored := _load(path)) is not None:
        return stored
    memory = simulate_memory_cached(setting.known)
    _store(path, memory)
    return memory


def simulation_key(setting: StepConfig) -> str | None:
    """Return the hash of everything that a simulation depends on; None where the versions of the packages do not tell
    their code: a model with code of its own, and packages installed from a directory that may be edited."""
    module = type(setting.config).__module__
    if not module.startswith("transformers.models.") or getattr(setting.config, "auto_map", None):
        return None
    if any(map(_has_unversioned_code, LIBRARIES)):
        return None
    machine = platform.platform(), torch.backends.cpu.get_cpu_capability()
    parts = [code_sha256(), torch.__version__, machine, setting.known.text]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def _has_unversioned_code(package: str) -> bool:
    """Return whether a package comes from a directory or a repository, where one version may have other code."""
    try:
        origin = metadata.distribution(package).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return False
    return origin is not None and "archive_info" not in json.loads(origin)


def _load(path: Path) -> SimulatedMemory | None:
    try:
        values = read_json_file(path)
        return SimulatedMemory(
            _phases(values["phases"]),
            {str(term): int(size) for term, size in values["terms"].items()},
            Allocation(**values["peak"] | {"shape": tuple(values["peak"]["shape"])}),
            values["layers_simulated"],
            values["context"],
            _phases(values["kept"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _phases(values: list[dict[str, Any]]) -> tuple[PhasePeak, ...]:
    return tuple(PhasePeak(**phase) for phase in values)


def _store(path: Path, memory: SimulatedMemory) -> None:
    """Store a simulation; if it cannot be written, the next process simulates again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(memory))
    except (OSError, SureFitError):
        return
