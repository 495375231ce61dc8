"""Facts about the machine, each with a verdict and a fix.

They work if torch is missing or broken: torch is only imported in another process.
"""

from __future__ import annotations

import locale
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import surefit
from surefit.config.resolve import missing_for_kernels
from surefit.config.trackers import TRACKERS
from surefit.core import env
from surefit.core.packaging import EXTRAS, install_extra
from surefit.core.units import GIB, bytes_text
from surefit.doctor.devices import gpu_probes
from surefit.doctor.places import disk_probes, file_system_probes, limit_probes, port_probes
from surefit.doctor.probe import Probe
from surefit.doctor.sandbox import sandbox_probes
from surefit.facts.hardware import cpu_count, installed_version, processor_name, ram_bytes

LOW_RAM = 4 * GIB
ProbeGroup = Callable[[], Iterator[Probe]]


def run_probes(further: Sequence[ProbeGroup] = ()) -> list[Probe]:
    """Run every probe, and the probes of `further`, at the same time. A probe that raises becomes a warning."""
    groups = [*GROUPS, *further]
    with ThreadPoolExecutor(len(groups)) as pool:
        return [probe for probes in pool.map(_run_probe_group, groups) for probe in probes]


def _run_probe_group(group: ProbeGroup) -> list[Probe]:
    probes: list[Probe] = []
    try:
        for probe in group():
            probes.append(probe)
    except Exception as error:
        # In a broken environment any probe can raise; the other facts matter all the more then.
        problem = env.redact(f"{type(error).__name__}: {error}")
        probes.append(
            Probe(
                group.__name__.removesuffix("_probes"),
                f"the probe failed: {problem}",
                "warn",
                "fix the other problems first",
            )
        )
    return probes


def python_probes() -> Iterator[Probe]:
    """Yield a probe of the interpreter's version against the package's requirement."""
    version = platform.python_version()
    required = _metadata("Requires-Python")
    fits = required is None or _fits(version, required)
    yield Probe(
        "python",
        f"{version} at {sys.executable}" + ("" if required is None else f" (needs {required})"),
        "ok" if fits else "fail",
        None if fits else f"create a virtual environment with Python {required}",
    )


def package_probes() -> Iterator[Probe]:
    """Yield probes of the installed versions against the ranges that SureFit was tested with."""
    requirements = metadata.requires("surefit") if installed_version("surefit") else None
    if requirements is None:
        yield Probe(
            "surefit",
            f"{surefit.__version__}, not installed as a package",
            "warn",
            install_extra("train"),
        )
        return
    yield Probe("surefit", surefit.__version__)
    fitting = []
    extras = [""] if installed_version("torch") is None else ["", *EXTRAS]
    for text in requirements:
        probe = _package(text, extras)
        if probe is not None and probe.verdict == "ok":
            fitting.append(f"{probe.name} {probe.fact}")
        elif probe is not None:
            yield probe
    yield Probe("packages", f"{len(fitting)} in the tested ranges: {', '.join(fitting)}")


def _package(text: str, extras: Sequence[str]) -> Probe | None:
    """Return the probe of one requirement; None if its marker excludes this environment and these extras, or it is
    SureFit's own."""
    from packaging.requirements import Requirement

    requirement = Requirement(text)
    if requirement.name == "surefit" or (
        requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
    ):
        return None
    version, specifier = installed_version(requirement.name), str(requirement.specifier)
    needs = f" (needs {specifier})" if specifier else ""
    fix = f"pip install '{requirement.name}{specifier}'"
    if version is None:
        return Probe(requirement.name, f"not installed{needs}", "fail", fix, True)
    if _fits(version, specifier):
        return Probe(requirement.name, version)
    return Probe(requirement.name, f"{version}, outside the tested range{needs}", "warn", fix, True)


def machine_probes() -> Iterator[Probe]:
    """Yield probes of processor and memory."""
    yield Probe("cpu", f"{processor_name()}, {cpu_count()} usable")
    ram = ram_bytes()
    if ram is None:
        yield Probe("memory", "the operating system does not report it")
    elif ram < LOW_RAM:
        yield Probe("memory", bytes_text(ram), "warn", "expect to load models under 500M parameters only")
    else:
        yield Probe("memory", bytes_text(ram))
    yield Probe("system", f"{platform.system()} {platform.release()}, {platform.machine()}")


def hub_probes() -> Iterator[Probe]:
    """Yield probes of the access to the Hugging Face hub; a token's presence, never the token."""
    if env.hub_token() is None:
        yield Probe("hub token", "not set: gated and private models cannot be downloaded (set HF_TOKEN)", "info")
    else:
        yield Probe("hub token", "set")
    if env.offline():
        yield Probe(
            "offline mode", "on: downloads are disabled", "warn", "unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE", True
        )
    else:
        yield Probe("offline mode", "off")


def tracker_probes() -> Iterator[Probe]:
    """Yield a probe per tracker of whether it is set up; never an address or a key."""
    for name, tracker in TRACKERS.items():
        if not tracker.unknown:
            continue
        stops = "; surefit train stops at once if a config names it" if tracker.login else ""
        state = "set up" if tracker.is_set_up else f"not set up: it {tracker.unknown}{stops}"
        version = installed_version(tracker.packages[0]) if tracker.packages else None
        if tracker.packages:
            state = f"{version}, {state}" if version else "not installed"
        installed = version is not None or not tracker.packages
        yield Probe(f"tracker {name}", state, "ok" if installed and tracker.is_set_up else "info")


def kernel_probes() -> Iterator[Probe]:
    """Yield a probe of the packages that `speed.kernels` needs on a GPU."""
    missing = missing_for_kernels()
    versions = ", ".join(f"{name} {installed_version(name)}" for name in ("liger-kernel", "triton"))
    yield Probe("fused kernels", f"off on a GPU: {missing} is missing" if missing else versions)


def environment_variable_probes() -> Iterator[Probe]:
    """Yield the environment variables that affect training and are set."""
    variables = ", ".join(f"{name}={value}" for name, value in env.steering_variables().items())
    yield Probe("variables", variables or "none that affects training")


def clock_probes() -> Iterator[Probe]:
    """Yield a probe of the clock against the age of the installed files: a clock in the past breaks TLS and every
    log."""
    now = datetime.now(UTC)
    installed = datetime.fromtimestamp(Path(surefit.__file__).stat().st_mtime, UTC)
    fact = f"{now:%Y-%m-%d %H:%M} UTC, time zone {time.strftime('%z') or 'unknown'}"
    if (installed - now).total_seconds() > 86_400:
        yield Probe("clock", f"{fact}, before SureFit was installed ({installed:%Y-%m-%d})", "warn", "set the clock")
    else:
        yield Probe("clock", fact)


def text_encoding_probes() -> Iterator[Probe]:
    """Yield a probe of whether files and the terminal are UTF-8."""
    encodings = {"files": locale.getpreferredencoding(False), "terminal": sys.stdout.encoding or "utf-8"}
    other_encodings = {
        name: value for name, value in encodings.items() if value.lower().replace("-", "") not in ("utf8", "cp65001")
    }
    if other_encodings:
        fact = ", ".join(f"{name} {value}" for name, value in other_encodings.items())
        yield Probe("text encoding", fact, "warn", "export PYTHONUTF8=1 LC_ALL=C.UTF-8", True)
    else:
        yield Probe("text encoding", "UTF-8")


def _metadata(field: str) -> str | None:
    if installed_version("surefit") is None:
        return None
    values = metadata.metadata("surefit").get_all(field)
    return str(values[0]) if values else None


def _fits(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    # The local part is the build (+cpu, +cu130), not the version.
    return SpecifierSet(wanted).contains(version.partition("+")[0], prereleases=True)


GROUPS: tuple[ProbeGroup, ...] = (
    python_probes,
    package_probes,
    gpu_probes,
    machine_probes,
    disk_probes,
    file_system_probes,
    limit_probes,
    sandbox_probes,
    port_probes,
    hub_probes,
    tracker_probes,
    kernel_probes,
    environment_variable_probes,
    clock_probes,
    text_encoding_probes,
)
