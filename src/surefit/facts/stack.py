"""What is installed and how the environment is set: versions and variables, never by importing."""

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
from surefit.facts.pins import compatible

PACKAGES = (
    "surefit", "torch", "torchvision", "torchaudio", "triton", "numpy", "scipy", "pandas", "pyarrow", "scikit-learn",
    "protobuf", "transformers", "tokenizers", "huggingface-hub", "safetensors", "accelerate", "peft", "trl", "datasets",
    "bitsandbytes", "flash-attn", "flash-attn-3", "kernels", "liger-kernel", "deepspeed", "xformers", "unsloth",
    "axolotl", "llamafactory", "vllm", "lm-format-enforcer", "outlines", "xgrammar",
    *(package for tracker in TRACKERS.values() for package in tracker.packages),
)  # fmt: skip
"""The packages that decide whether a training run works."""

CPU_FLAGS = frozenset({"avx2", "avx512f", "avx512_bf16", "amx_bf16"})
_DRIVER = Path("/proc/driver/nvidia/version")
_CPU = Path("/proc/cpuinfo")
_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class UnmetRequirement:
    """`package` asks for `wanted` ("torch<2.9,>=2.8"); `other` is installed as `version`; None: it is not installed."""

    package: str
    wanted: str
    other: str
    version: str | None


@dataclass(frozen=True)
class StackFacts:
    """Plain values, so that a rule's test needs no other environment.

    Attributes:
        python: the interpreter's version.
        versions: package → version with its build tag (2.13.0+cpu), of those of `PACKAGES` that are installed.
        requires: package → what it asks for (Requires-Dist), extras left out by their markers.
        torch_cuda: the CUDA version that PyTorch was built for; None for a build without.
        driver: the NVIDIA driver's version, as its kernel module says it.
        infiniband: this machine has an InfiniBand adapter.
        variables: the variables that steer training and are set; never one that may hold a secret.
        cpu_flags: those of `CPU_FLAGS` that the processor has.
        pinned: of a requirements file, package → what it asks for (>=2.1,<3); nothing need be installed.
        wheels: of a requirements file, the packages that it takes from an address or another index of its own.
        in_place: of a shell script, the packages that it builds without pip's isolation, beside an installed torch.
        model_types: what config.json may have as `model_type`; empty where transformers is not installed.
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
        """Whether the package may be one of these versions (>=2): the installed one, or any that is asked for."""
        if package in self.pinned:
            return compatible(self.pinned[package], versions)
        version = self.versions.get(package, "").partition("+")[0]
        return not version or compatible(f"=={version}", versions)

    def said(self, package: str) -> str:
        """A package with its version: pandas 2.1.4, or pandas<2.2 as a requirements file has it."""
        if package not in self.pinned:
            return f"{package} {self.versions[package]}"
        return f"{package}{self.pinned[package]}" if self.pinned[package] else f"{package} (any version)"

    def release(self, package: str) -> tuple[int, ...]:
        """The version's leading numbers: (2, 13, 0) of 2.13.0+cpu; empty where it is not installed."""
        found = re.match(r"\d+(\.\d+)*", self.versions.get(package, ""))
        return tuple(int(part) for part in found[0].split(".")) if found else ()

    def build(self, package: str) -> str:
        """The build tag: cpu of 2.13.0+cpu; empty where there is none."""
        return self.versions.get(package, "").partition("+")[2]

    def unmet(self, packages: Collection[str], others: Collection[str]) -> Iterator[UnmetRequirement]:
        """What `packages`, where they are installed, ask of `others` and do not get; "not installed" included."""
        for package in packages:
            for text in self.requires.get(package, ()) if package in self.versions else ():
                name = _plain(re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0])
                if name in others and self.pinned:
                    if name in self.pinned and not compatible(self.pinned[name], text[len(name) :]):
                        yield UnmetRequirement(package, text, name, self.pinned[name])
                elif name in others and (wanted := _unfit(text, self.versions.get(name))):
                    yield UnmetRequirement(package, wanted, name, self.versions.get(name))


def _unfit(text: str, version: str | None) -> str | None:
    """The requirement without its marker where it applies here and `version` does not fulfil it, else None."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import InvalidVersion, Version

    try:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            return None
        # The local part says which build it is (+cpu, +cu130), not which version.
        plain = Version(version.partition("+")[0]) if version else None
        fits = plain is not None and requirement.specifier.contains(plain, prereleases=True)
    except (InvalidRequirement, InvalidVersion):
        return None
    return None if fits else f"{_plain(requirement.name)}{requirement.specifier}"


def stack_facts() -> StackFacts:
    """The stack of this interpreter, in some 20 ms: reads metadata files, imports nothing of it."""
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
    """The fields of a package's METADATA, up to the description; empty where it is not installed or damaged."""
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
    """PyPI's builds carry no tag in their version: torch/version.py says what they were built for."""
    with suppress(OSError, UnicodeDecodeError):
        file = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
        found = re.search(r"^cuda\b.*= *'(\d[\d.]*)'", file.read_text(encoding="utf-8"), re.MULTILINE)
        return found[1] if found else None
    return None


def _model_types() -> frozenset[str]:
    """The `model_type`s in the tables of the installed transformers, read as text: importing them takes seconds."""
    found: set[str] = set()
    with suppress(metadata.PackageNotFoundError):
        auto = Path(str(metadata.distribution("transformers").locate_file("transformers/models/auto")))
        for name in ("auto_mappings.py", "configuration_auto.py"):  # 5.17 has them all in the second
            with suppress(OSError, UnicodeDecodeError):
                found |= set(re.findall(r'\(\s*"([^"]+)",\s*"\w+"', (auto / name).read_text(encoding="utf-8")))
    return frozenset(found)


def _driver() -> str | None:
    with suppress(OSError):
        found = re.search(r"NVRM version:.*?\s(\d{3}\.[\d.]+)", _DRIVER.read_text(encoding="utf-8", errors="replace"))
        return found[1] if found else None
    return None


def _cpu_flags() -> frozenset[str]:
    with suppress(OSError), _CPU.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("flags"):
                return CPU_FLAGS & frozenset(line.split())
    return frozenset()


def _plain(name: str) -> str:
    """A distribution's name as PEP 503 normalises it: flash_attn → flash-attn."""
    return re.sub(r"[-_.]+", "-", name).lower()
