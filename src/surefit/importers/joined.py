"""Related files of one folder: a launch script, the Python script that it starts, and Accelerate's config.

Each file is checked by itself; the others add the settings that decide whether it can work. Findings name the file that
contains the value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from surefit.core.errors import SureFitError
from surefit.facts.job_script import JobScript, Launch, read_job_script
from surefit.facts.setup import SettingLocation, Setup
from surefit.importers.configs import read_tool_file

SHELL = (".sh", ".bash", ".sbatch", ".slurm")
MOST = 60
"""The largest number of shell scripts beside a Python script that are read."""
SPREADING = ("device_map", "DataParallel", "import vllm", "from vllm", "mp.spawn", "multiprocessing", "torchrun")
"""Texts that a script contains if it uses several GPUs in one process."""
FROM_SCRIPT = ("device_map", "quantization", "quant_storage", "weights_dtype", "parallel", "reentrant")
FROM_CONFIG = ("parallel", "bf16", "fp16", "fsdp_version", "fsdp_state_dict", "on_cpu")


def find_launches(script: Path) -> Iterator[tuple[JobScript, Launch]]:
    """Yield the launches of a Python script in the shell scripts beside it or in its parent folder."""
    target = script.resolve()
    for folder in (target.parent, target.parent.parent):
        for path in _shell_scripts(folder):
            job = _job(path)
            if job is None:
                continue
            for launch in job.launches:
                candidates = [base / launch.script for base in _bases(path)] if launch.script else []
                if launch.script and any(
                    candidate.resolve() == target for candidate in candidates if launch.script.endswith(".py")
                ):
                    yield job, apply_accelerate_config(launch, path)[0]


@lru_cache(maxsize=16)
def _shell_scripts(folder: Path) -> tuple[Path, ...]:
    try:
        scripts = sorted(path for path in folder.iterdir() if path.suffix in SHELL and path.is_file())
    except OSError:
        return ()
    return tuple(scripts[:MOST])


def _job(path: Path) -> JobScript | None:
    try:
        return read_job_script(path)
    except SureFitError:
        return None


def _bases(path: Path) -> list[Path]:
    """Return the folders from which a shell script may be started."""
    folder = path.resolve().parent
    return [folder, folder.parent]


def apply_accelerate_config(launch: Launch, path: Path) -> tuple[Launch, Setup | None]:
    """Return a launch with the process counts of its Accelerate config, and the other settings of that config."""
    name = launch.flags.get("config_file") if launch.tool == "accelerate" else None
    file = next((base / name for base in _bases(path) if name and (base / name).is_file()), None)
    if file is None:
        return launch, None
    try:
        setup = read_tool_file(file, "accelerate").setup
    except SureFitError:
        return launch, None
    machines = launch.machines if "num_machines" in launch.flags else setup.machines or 1
    processes = launch.processes or (None if "num_processes" in launch.flags else setup.processes)
    per_machine = processes // machines if processes and machines else launch.processes_per_machine
    return replace(launch, processes=processes, machines=machines, processes_per_machine=per_machine), setup


def find_launched_script(launch: Launch, path: Path) -> Path | None:
    """Return the Python script that a launch starts, if it exists."""
    name = launch.script or ""
    candidates = (base / name for base in _bases(path)) if name.endswith(".py") else ()
    return next((file for file in candidates if file.is_file()), None)


def find_scripts_of_config(config: Path) -> Iterator[Path]:
    """Yield the Python scripts that are launched with an Accelerate config, by shell scripts beside it or in its parent
    folder."""
    target = config.resolve()
    for folder in (target.parent, target.parent.parent):
        for path in _shell_scripts(folder):
            job = _job(path)
            for launch in job.launches if job else ():
                name = launch.flags.get("config_file") if launch.tool == "accelerate" else None
                if name and any((base / name).resolve() == target for base in _bases(path)):
                    script = find_launched_script(launch, path)
                    yield from [script] if script else []


def uses_several_gpus(script: Path | None) -> bool:
    """Return whether a script uses several GPUs in one process, by its text."""
    if script is None:
        return False
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return any(word in text for word in SPREADING)


def merge_setups(setup: Setup, others: Sequence[tuple[Setup, tuple[str, ...]]]) -> Setup:
    """Return a setup with the named attributes of others that it does not set itself."""
    values: dict[str, Any] = {}
    places = dict(setup.places)
    for source, names in others:
        for name in names:
            if getattr(setup, name) is None and name not in values and getattr(source, name) is not None:
                values[name] = getattr(source, name)
                places[name] = source.places.get(name, SettingLocation(name))
    return replace(setup, places=places, **values)
