"""Installed packages and environment settings: versions and variables, never by importing."""

from __future__ import annotations

import platform
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from surefit.config.trackers import TRACKERS
from surefit.core import env
from surefit.core.packaging import EXTRAS
from surefit.facts.pins import compatible

PACKAGES = (
    "surefit", "torch", "torchvision", "torchaudio", "triton", "numpy", "scipy", "pandas", "pyarrow", "scikit-learn",
    "protobuf", "transformers", "tokenizers", "huggingface-hub", "safetensors", "accelerate", "peft", "trl", "datasets",
    "bitsandbytes", "flash-attn", "flash-attn-3", "kernels", "liger-kernel", "deepspeed", "xformers", "unsloth",
    "axolotl", "llamafactory", "vllm", "lm-format-enforcer", "outlines", "xgrammar",
    *(package for tracker in TRACKERS.values() for package in tracker.packages),
)  # fmt: skip
"""Packages that determine whether a training run works."""

CPU_FLAGS = frozenset({"avx2", "avx512f", "avx512_bf16", "amx_bf16"})
_DRIVER = Path("/proc/driver/nvidia/version")
_CPU = Path("/proc/cpuinfo")
_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class UnmetRequirement:
    """A requirement of `package`, `needs` ("torch<2.9,>=2.8"), that `other` does not meet in `version`; None: `other`
    is not installed."""

    package: str
    needs: str
    other: str
    version: str | None


@dataclass(frozen=True)
class StackFacts:
    """Software stack as plain values, so that a rule's test needs no other environment.

    Attributes:
        python: the interpreter's version.
        versions: package → version with its build tag (2.13.0+cpu), for the installed packages of `PACKAGES`.
        requires: package → its requirements (Requires-Dist), extras left out by their markers.
        torch_cuda: the CUDA version that PyTorch was built for; None for a build without.
        driver: the NVIDIA driver's version, from its kernel module.
        infiniband: this machine has an InfiniBand adapter.
        variables: the environment variables that affect training and are set; never one that may hold a secret.
        cpu_flags: the flags of `CPU_FLAGS` that the processor has.
        pinned: from a requirements file, package → its version specifier (>=2.1,<3); nothing need be installed.
        wheels: from a requirements file, the packages that come from an address or another index of their own.
        in_place: from a shell script, the packages that it builds without pip's isolation, beside an installed torch.
        model_types: values of `model_type` that transformers supports; empty where it is not installed.
    """

    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    torch_cuda: str | None = None
    driver: str | None = None
    infiniband: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    cpu_flags: Collection[str] = frozenset()
    pinned: Mapping[str, str] = field(default_factory=dict)
    wheels: Collection[str] = frozenset()
    in_place: Collection[str] = frozenset()
    model_types: Collection[str] = frozenset()

    def allows(self, package: str, versions: str) -> bool:
        """Return whether the package may be one of these versions (>=2): the installed one, or any that is required."""
        if package in self.pinned:
            return compatible(self.pinned[package], versions)
        version = self.versions.get(package, "").partition("+")[0]
        return not version or compatible(f"=={version}", versions)

    def said(self, package: str) -> str:
        """Return a package with its version: pandas 2.1.4, or pandas<2.2 in the form of a requirements file."""
        if package not in self.pinned:
            return f"{package} {self.versions[package]}"
        return f"{package}{self.pinned[package]}" if self.pinned[package] else f"{package} (any version)"

    def release(self, package: str) -> tuple[int, ...]:
        """Return the version's leading numbers: (2, 13, 0) of 2.13.0+cpu; empty where it is not installed."""
        match = re.match(r"\d+(\.\d+)*", self.versions.get(package, ""))
        return tuple(int(part) for part in match[0].split(".")) if match else ()

    def build(self, package: str) -> str:
        """Return the build tag: cpu of 2.13.0+cpu; empty where there is none."""
        return self.versions.get(package, "").partition("+")[2]

    def unmet(self, packages: Collection[str], others: Collection[str]) -> Iterator[UnmetRequirement]:
        """Yield requirements of installed `packages` on `others` that are not met; "not installed" counts too."""
        for package in packages:
            for text in self.requires.get(package, ()) if package in self.versions else ():
                name = _plain(re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0])
                if name in others and self.pinned:
                    if name in self.pinned and not compatible(self.pinned[name], text[len(name) :]):
                        yield UnmetRequirement(package, text, name, self.pinned[name])
                elif name in others and (requirement := _unfit(text, self.versions.get(name), package)):
                    yield UnmetRequirement(package, requirement, name, self.versions.get(name))


def _unfit(text: str, version: str | None, package: str) -> str | None:
    """Return a package's requirement without its marker where it applies here and `version` does not satisfy it, else
    None. SureFit's include the requirements of `packaging.EXTRAS`, without which nothing is trained."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import InvalidVersion, Version

    try:
        requirement = Requirement(text)
        extras = ("", *EXTRAS) if package == "surefit" else ("",)
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            return None
        # The local part identifies the build (+cpu, +cu130), not the version.
        release = Version(version.partition("+")[0]) if version else None
        fits = release is not None and requirement.specifier.contains(release, prereleases=True)
    except (InvalidRequirement, InvalidVersion):
        return None
    return None if fits else f"{_plain(requirement.name)}{requirement.specifier}"


def stack_facts() -> StackFacts:
    """Return the stack of this interpreter, in some 20 ms: reads metadata files, imports no package."""
    versions: dict[str, str] = {}
    requires: dict[str, tuple[str, ...]] = {}
    for package in PACKAGES:
        headers = _headers(package)
        if headers.get("Version"):
            versions[package] = headers["Version"][0]
            requires[package] = tuple(headers.get("Requires-Dist", ()))
    return StackFacts(
        python=platform.python_version(),
        versions=versions,
        requires=requires,
        torch_cuda=_torch_cuda() if "torch" in versions else None,
        driver=_driver(),
        infiniband=_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()),
        variables=env.steering_variables(),
        cpu_flags=_cpu_flags(),
        model_types=_model_types(),
    )


def _headers(package: str) -> dict[str, list[str]]:
    """Return the fields of a package's METADATA, up to the description; empty where it is not installed or damaged."""
    try:
        text = metadata.distribution(package).read_text("METADATA") or ""
    except (metadata.PackageNotFoundError, OSError, UnicodeDecodeError):
        return {}
    headers: dict[str, list[str]] = {}
    for line in text.partition("\n\n")[0].splitlines():
        name, colon, value = line.partition(": ")
        if colon:
            headers.setdefault(name, []).append(value.strip())
    return headers


def _torch_cuda() -> str | None:
    """Return the CUDA version in torch/version.py: PyPI's builds have no tag in their version."""
    with suppress(OSError, UnicodeDecodeError):
        file = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
        match = re.search(r"^cuda\b.*= *'(\d[\d.]*)'", file.read_text(encoding="utf-8"), re.MULTILINE)
        return match[1] if match else None
    return None


def _model_types() -> frozenset[str]:
    """Return the `model_type`s in the tables of the installed transformers, read as text: an import costs seconds."""
    model_types: set[str] = set()
    with suppress(metadata.PackageNotFoundError):
        auto = Path(str(metadata.distribution("transformers").locate_file("transformers/models/auto")))
        for name in ("auto_mappings.py", "configuration_auto.py"):  # 5.17 has them all in the second
            with suppress(OSError, UnicodeDecodeError):
                model_types |= set(re.findall(r'\(\s*"([^"]+)",\s*"\w+"', (auto / name).read_text(encoding="utf-8")))
    return frozenset(model_types)


def _driver() -> str | None:
    with suppress(OSError):
        match = re.search(r"NVRM version:.*?\s(\d{3}\.[\d.]+)", _DRIVER.read_text(encoding="utf-8", errors="replace"))
        return match[1] if match else None
    return None


def _cpu_flags() -> frozenset[str]:
    with suppress(OSError), _CPU.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("flags"):
                return CPU_FLAGS & frozenset(line.split())
    return frozenset()


def _plain(name: str) -> str:
    """Normalize a distribution's name as in PEP 503: flash_attn → flash-attn."""
    return re.sub(r"[-_.]+", "-", name).lower()
