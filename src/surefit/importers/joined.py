"""Files of one folder that belong together: a launch line, the script that it starts, and Accelerate's config.

Each file is checked by itself; from the others comes what decides whether it can work. Findings name the file that a
value stands in.
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
"""Shell scripts beside a Python script that are looked at."""
SPREADING = ("device_map", "DataParallel", "import vllm", "from vllm", "mp.spawn", "multiprocessing", "torchrun")
"""What a script that uses several GPUs in one process has in its text."""
FROM_SCRIPT = ("device_map", "quantization", "quant_storage", "weights_dtype", "parallel", "reentrant")
FROM_CONFIG = ("parallel", "bf16", "fp16", "fsdp_version", "fsdp_state_dict", "on_cpu")


def find_launches(script: Path) -> Iterator[tuple[JobScript, Launch]]:
    """The launch lines in the shell scripts beside a Python script, or in the folder above it, that start it."""
    here = script.resolve()
    for folder in (here.parent, here.parent.parent):
        for path in _shell_scripts(folder):
            job = _job(path)
            if job is None:
                continue
            for launch in job.launches:
                named = [base / launch.script for base in _bases(path)] if launch.script else []
                if launch.script and any(each.resolve() == here for each in named if launch.script.endswith(".py")):
                    yield job, apply_accelerate_config(launch, path)[0]


@lru_cache(maxsize=16)
def _shell_scripts(folder: Path) -> tuple[Path, ...]:
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix in SHELL and path.is_file())
    except OSError:
        return ()
    return tuple(found[:MOST])


def _job(path: Path) -> JobScript | None:
    try:
        return read_job_script(path)
    except SureFitError:
        return None


def _bases(path: Path) -> list[Path]:
    """The folders from which a shell script may be started."""
    folder = path.resolve().parent
    return [folder, folder.parent]


def apply_accelerate_config(launch: Launch, path: Path) -> tuple[Launch, Setup | None]:
    """A launch with the numbers of the Accelerate config that it names, and what else that config says."""
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
    each = processes // machines if processes and machines else launch.processes_per_machine
    return replace(launch, processes=processes, machines=machines, processes_per_machine=each), setup


def find_launched_script(launch: Launch, path: Path) -> Path | None:
    """The Python script that a launch line starts, where it is there."""
    name = launch.script or ""
    found = (base / name for base in _bases(path)) if name.endswith(".py") else ()
    return next((file for file in found if file.is_file()), None)


def find_scripts_of_config(config: Path) -> Iterator[Path]:
    """Return the Python scripts that launch lines beside an Accelerate config, or above it, start with this config."""
    here = config.resolve()
    for folder in (here.parent, here.parent.parent):
        for path in _shell_scripts(folder):
            job = _job(path)
            for launch in job.launches if job else ():
                name = launch.flags.get("config_file") if launch.tool == "accelerate" else None
                if name and any((base / name).resolve() == here for base in _bases(path)):
                    script = find_launched_script(launch, path)
                    yield from [script] if script else []


def uses_several_gpus(script: Path | None) -> bool:
    """Whether a script uses several GPUs in one process, by its text."""
    if script is None:
        return False
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return any(word in text for word in SPREADING)


def merge_setups(setup: Setup, others: Sequence[tuple[Setup, tuple[str, ...]]]) -> Setup:
    """A setup with those attributes of others that it does not say itself."""
    values: dict[str, Any] = {}
    places = dict(setup.places)
    for other, names in others:
        for name in names:
            if getattr(setup, name) is None and name not in values and getattr(other, name) is not None:
                values[name] = getattr(other, name)
                places[name] = other.places.get(name, SettingLocation(name))
    return replace(setup, places=places, **values)
