"""The machine as facts, each with a verdict and what to do about it.

Works where torch is missing or broken: torch is only ever imported in another process.
"""

from __future__ import annotations

import locale
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal

import surefit
from surefit.core import env
from surefit.core.units import GIB, bytes_text
from surefit.facts.hardware import (
    cpu_count,
    detect_gpus,
    disk_free_bytes,
    installed_version,
    nearest_existing,
    processor_name,
    ram_bytes,
    usable_gpus,
)

Verdict = Literal["ok", "warn", "fail"]
LOW_DISK, NO_DISK = 10 * GIB, GIB // 2
LOW_RAM = 4 * GIB
IMPORT_SECONDS = 120


@dataclass(frozen=True)
class Probe:
    """One fact about the machine.

    Attributes:
        name: what was looked at.
        fact: what was found.
        verdict: ok; warn, where something will be slower or missing; fail, where SureFit will not work.
        fix: what to do, a command where there is one; None where nothing needs doing.
    """

    name: str
    fact: str
    verdict: Verdict = "ok"
    fix: str | None = None

    def as_dict(self) -> dict[str, str | None]:
        return asdict(self)


def probe_all() -> list[Probe]:
    """Every probe. One that fails itself becomes a warning, not an exception."""
    probes: list[Probe] = []
    for group in GROUPS:
        try:
            probes += group()
        except Exception as error:
            # In a broken environment anything can raise; the other facts matter all the more then.
            problem = env.redact(f"{type(error).__name__}: {error}")
            probes.append(Probe(group.__name__, f"could not look: {problem}", "warn"))
    return probes


def python() -> Iterator[Probe]:
    """The interpreter, against what the package asks for."""
    version = platform.python_version()
    wanted = _metadata("Requires-Python")
    fits = wanted is None or _fits(version, wanted)
    yield Probe(
        "python",
        f"{version} at {sys.executable}" + ("" if wanted is None else f" (needs {wanted})"),
        "ok" if fits else "fail",
        None if fits else f"make a virtual environment with a Python that is {wanted}",
    )


def packages() -> Iterator[Probe]:
    """Installed versions against the ranges SureFit was tested with."""
    requirements = metadata.requires("surefit") if installed_version("surefit") else None
    if requirements is None:
        yield Probe(
            "surefit", f"{surefit.__version__}, not installed as a package", "warn", "pip install -e . in the clone"
        )
        return
    yield Probe("surefit", surefit.__version__)
    for text in requirements:
        yield from _package(text)


def _package(text: str) -> Iterator[Probe]:
    from packaging.requirements import Requirement

    requirement = Requirement(text)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return
    version, wanted = installed_version(requirement.name), str(requirement.specifier)
    needs = f" (needs {wanted})" if wanted else ""
    fix = f"pip install '{requirement.name}{wanted}'"
    if version is None:
        yield Probe(requirement.name, f"not installed{needs}", "fail", fix)
    elif _fits(version, wanted):
        yield Probe(requirement.name, f"{version}{needs}")
    else:
        yield Probe(requirement.name, f"{version}, which SureFit was not tested with{needs}", "warn", fix)


def gpu() -> Iterator[Probe]:
    """GPUs, their driver, and whether the installed PyTorch can use them."""
    cards = detect_gpus()
    for card in cards:
        memory = bytes_text(card.memory_bytes) if card.memory_bytes else "memory not reported"
        major, minor = card.compute_capability
        yield Probe("gpu", f"{card.name}, {memory}, compute capability {major}.{minor}, driver {card.driver}")
    if not cards:
        yield Probe("gpu", "none (nvidia-smi is not here, or lists nothing): training runs on the CPU")
    usable = usable_gpus(cards)
    if len(usable) < len(cards):
        yield Probe("gpu", f"CUDA_VISIBLE_DEVICES leaves {len(usable)} of {len(cards)} to use")
    yield torch_probe(bool(usable))


def torch_probe(gpu_present: bool, interpreter: str = sys.executable) -> Probe:
    """Import torch in another process, which may crash or hang there, and ask what it can use."""
    if installed_version("torch") is None and interpreter == sys.executable:
        return Probe("torch works", "not installed", "fail", "pip install torch")
    code = "import torch; print(torch.__version__, torch.version.cuda or 'none', torch.cuda.is_available())"
    try:
        answer = subprocess.run(
            [interpreter, "-c", code], capture_output=True, text=True, errors="replace", timeout=IMPORT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Probe("torch works", f"no: {type(error).__name__}", "fail", _REINSTALL)
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
        return Probe("torch works", f"import fails: {env.redact(last)[:200]}", "fail", _REINSTALL)
    version, cuda, available = answer.stdout.split()[-3:]
    build = "built for the CPU" if cuda == "none" else f"built for CUDA {cuda}"
    if gpu_present and available != "True":
        fix = _CUDA_BUILD if cuda == "none" else "update the NVIDIA driver: it is older than this CUDA version needs"
        return Probe("torch works", f"{version}, {build}: it cannot use the GPU that is here", "warn", fix)
    return Probe("torch works", f"{version}, {build}" + (", sees the GPU" if available == "True" else ""))


_REINSTALL = "pip install --force-reinstall 'torch>=2.11,<2.14'"
_CUDA_BUILD = "install a CUDA build of torch: https://pytorch.org/get-started/locally/"


def machine() -> Iterator[Probe]:
    """Processor and memory."""
    yield Probe("cpu", f"{processor_name()}, {cpu_count()} usable")
    ram = ram_bytes()
    if ram is None:
        yield Probe("memory", "the operating system does not say")
    elif ram < LOW_RAM:
        yield Probe("memory", bytes_text(ram), "warn", "expect to load models under 500M parameters only")
    else:
        yield Probe("memory", bytes_text(ram))
    yield Probe("system", f"{platform.system()} {platform.release()}, {platform.machine()}")


def disks() -> Iterator[Probe]:
    """Space and permission where runs, models and tokenised data go."""
    places = {"working directory": Path.cwd(), "model cache": env.hub_cache(), "surefit cache": env.cache_dir()}
    for name, place in places.items():
        yield _disk(name, place)


def _disk(name: str, place: Path) -> Probe:
    existing = nearest_existing(place)
    fact = f"{place}, {bytes_text(disk_free_bytes(place))} free"
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".surefit-probe-"):
            pass
    except OSError as error:
        return Probe(name, f"{fact}, not writable: {error.strerror}", "fail", f"get write permission for {existing}")
    free = disk_free_bytes(place)
    if free < LOW_DISK:
        return Probe(name, fact, "fail" if free < NO_DISK else "warn", f"free some space on the disk of {existing}")
    return Probe(name, fact)


def hub() -> Iterator[Probe]:
    """Access to the Hugging Face hub; a token's presence, never the token."""
    if env.hub_token() is None:
        yield Probe("hub token", "not set: gated and private models cannot be downloaded")
    else:
        yield Probe("hub token", "set")
    if env.offline():
        yield Probe(
            "offline mode", "on: nothing will be downloaded", "warn", "unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE"
        )
    else:
        yield Probe("offline mode", "off")


def clock() -> Iterator[Probe]:
    """The clock, against the age of the installed files: a clock in the past breaks TLS and every log."""
    now = datetime.now(UTC)
    installed = datetime.fromtimestamp(Path(surefit.__file__).stat().st_mtime, UTC)
    fact = f"{now:%Y-%m-%d %H:%M} UTC, time zone {time.strftime('%z') or 'unknown'}"
    if (installed - now).total_seconds() > 86_400:
        yield Probe("clock", f"{fact}, before SureFit was installed ({installed:%Y-%m-%d})", "warn", "set the clock")
    else:
        yield Probe("clock", fact)


def text_encoding() -> Iterator[Probe]:
    """Whether files and the terminal are UTF-8."""
    encodings = {"files": locale.getpreferredencoding(False), "terminal": sys.stdout.encoding or "utf-8"}
    other = {
        name: value for name, value in encodings.items() if value.lower().replace("-", "") not in ("utf8", "cp65001")
    }
    if other:
        found = ", ".join(f"{name} {value}" for name, value in other.items())
        yield Probe("text encoding", found, "warn", "export PYTHONUTF8=1 LC_ALL=C.UTF-8")
    else:
        yield Probe("text encoding", "UTF-8")


def _metadata(field: str) -> str | None:
    if installed_version("surefit") is None:
        return None
    found = metadata.metadata("surefit").get_all(field)
    return str(found[0]) if found else None


def _fits(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    # The local part says which build it is (+cpu, +cu130), not which version.
    return SpecifierSet(wanted).contains(version.partition("+")[0], prereleases=True)


GROUPS: tuple[Callable[[], Iterator[Probe]], ...] = (
    python, packages, gpu, machine, disks, hub, clock, text_encoding,
)  # fmt: skip
