"""What a device is: the one of this machine, asked of the operating system and the GPU driver, or one of a catalogue.

No torch: `surefit plan --gpu h100` must work on a laptop, and `surefit doctor` where torch is broken.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Literal

from surefit.core import env
from surefit.core.errors import ConfigError, did_you_mean
from surefit.core.units import MIB, bytes_of
from surefit.facts.gpus import BF16_CAPABILITY as BF16_CAPABILITY
from surefit.facts.gpus import GPUS as GPUS
from surefit.facts.gpus import find_gpu as find_gpu
from surefit.facts.gpus import sizes_of, spellings


@dataclass(frozen=True)
class HardwareFacts:
    """The device to train on and the machine around it.

    Attributes:
        name: the GPU's or the processor's name.
        memory_bytes: the GPU's memory; on a CPU the machine's RAM.
        bf16: bfloat16 is multiplied natively.
        cpu_count: processors this process may use.
        ram_bytes: the machine's memory, or the smaller limit of the container.
        disk_free_bytes: free space where `directory` is or will be, or what the config says; None where the GPU is not
            of this machine and nobody said.
        disk_source: "detected" on this machine, "config" where `hardware.disk` says it, else "unknown".
        figure: where `memory_bytes` comes from.
        gpu_count: GPUs that were detected and that `CUDA_VISIBLE_DEVICES` does not hide; 1 for a GPU of the catalogue.
        unused_gpu: a GPU that is here but that the installed, CPU-only PyTorch cannot use.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int | None
    bf16: bool
    cpu_count: int
    ram_bytes: int | None
    disk_free_bytes: int | None
    source: Literal["detected", "catalogue"]
    figure: str = ""
    compute_capability: tuple[int, int] | None = None
    gpu_count: int = 0
    unused_gpu: str | None = None
    disk_source: Literal["detected", "config", "unknown"] = "detected"

    @property
    def is_another_machine(self) -> bool:
        """Whether the GPU is one of the catalogue, which this machine does not have."""
        return self.source == "catalogue"


def hardware_facts(gpu: str = "auto", directory: Path | None = None, disk: str | None = None) -> HardwareFacts:
    """The device that the config's `hardware.gpu` means, and the disk beside it.

    Args:
        gpu: "auto" (the GPU of this machine if PyTorch can use it, else the CPU), "cpu", or a catalogue name; where
            that GPU is here, the facts are those of this machine.
        directory: where the run will write; the working directory by default.
        disk: the free space of the machine that trains, `hardware.disk`; without it this machine's.

    Raises:
        ConfigError: a name the catalogue does not have.
    """
    found = _device(gpu, disk_free_bytes(directory or Path.cwd()))
    if disk is not None:
        return replace(found, disk_free_bytes=bytes_of(disk), disk_source="config")
    return replace(found, disk_free_bytes=None, disk_source="unknown") if found.is_another_machine else found


def _device(gpu: str, disk: int) -> HardwareFacts:
    if gpu == "cpu":
        return _cpu(disk)
    found = usable_gpus(detect_gpus())
    if gpu == "auto":
        if not found or torch_is_cpu_build():
            return _cpu(disk, unused_gpu=found[0].name if found else None)
        return _detected_device(found, disk)
    same = [card for card in found if find_gpu(card.name) == find_gpu(gpu)]
    return _detected_device(same, disk) if same and not torch_is_cpu_build() else _catalogue_device(gpu, disk)


def _detected_device(found: list[DetectedGpu], disk: int) -> HardwareFacts:
    card = found[0]
    return HardwareFacts(
        "cuda", card.name, card.memory_bytes, card.compute_capability >= BF16_CAPABILITY, cpu_count(), ram_bytes(),
        disk, "detected", card.source, card.compute_capability, len(found),
    )  # fmt: skip


def _catalogue_device(gpu: str, disk: int) -> HardwareFacts:
    if sizes := sizes_of(gpu):
        raise ConfigError(
            f"{gpu} is made with different amounts of memory",
            code="E2400",
            field="hardware.gpu",
            help=f"write {' or '.join(sizes)}",
        )
    card = find_gpu(gpu)
    if card is None:
        raise ConfigError(
            f"no GPU named {gpu!r} is known{did_you_mean(gpu.lower(), spellings())}",
            code="E2068",
            field="hardware.gpu",
            help=f"auto, cpu, or one of {', '.join(GPUS)}",
        )
    return HardwareFacts(
        "cuda", card.name, card.memory_bytes, card.multiplies_bf16, cpu_count(), ram_bytes(),
        disk, "catalogue", card.source, card.compute_capability, 1,
    )  # fmt: skip


def _cpu(disk: int, unused_gpu: str | None = None) -> HardwareFacts:
    ram = ram_bytes()
    return HardwareFacts(
        "cpu", processor_name(), ram, True, cpu_count(), ram, disk, "detected", "the machine's RAM",
        unused_gpu=unused_gpu,
    )  # fmt: skip


@dataclass(frozen=True)
class DetectedGpu:
    """A GPU that nvidia-smi lists."""

    name: str
    memory_bytes: int | None
    compute_capability: tuple[int, int]
    driver: str
    source: str = "nvidia-smi, the whole card: PyTorch sees a few hundred MiB less"


def detect_gpus() -> list[DetectedGpu]:
    """The NVIDIA GPUs of this machine; empty where there is no driver, or it does not answer in ten seconds."""
    tool = shutil.which("nvidia-smi")
    # Drivers before 510 refuse a query that names compute_cap.
    for fields in ("name,memory.total,driver_version,compute_cap", "name,memory.total,driver_version") if tool else ():
        with suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.run(
                [str(tool), f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
                capture_output=True, text=True, errors="replace", timeout=10, check=True,
            )  # fmt: skip
            return [gpu for line in answer.stdout.splitlines() if (gpu := _parse_gpu(line))]
    return []


def usable_gpus(cards: Sequence[DetectedGpu]) -> list[DetectedGpu]:
    """Those that `CUDA_VISIBLE_DEVICES` does not hide, in its order.

    Its numbers are taken for nvidia-smi's. CUDA's own put the fastest GPU first unless `CUDA_DEVICE_ORDER=PCI_BUS_ID`,
    which differs only where a machine has different GPUs.
    """
    visible = env.visible_gpus()
    if visible is None:
        return list(cards)
    return [cards[number] for number in takewhile(lambda number: number < len(cards), visible)]


def _parse_gpu(line: str) -> DetectedGpu | None:
    """`NVIDIA H200, 143771, 580.65.06, 9.0` → facts; None for a line of another shape."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) not in (3, 4):
        return None
    name, memory, driver, *capability = fields
    found = re.fullmatch(r"(\d+)\.(\d+)", "".join(capability))
    known = find_gpu(name)
    major_minor = (int(found[1]), int(found[2])) if found else (known and known.compute_capability) or (0, 0)
    # A partition of a GPU has no memory.total of its own.
    return DetectedGpu(name, int(memory) * MIB if memory.isdigit() else None, major_minor, driver)


def torch_is_cpu_build() -> bool:
    """Whether the installed PyTorch says, in its version, that it was built without CUDA."""
    version = installed_version("torch")
    return version is not None and version.endswith("+cpu")


def installed_version(package: str) -> str | None:
    """A package's version from its metadata, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_count() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ram_bytes() -> int | None:
    """The machine's memory, or the container's smaller limit (cgroup 2, then 1)."""
    limits = []
    with suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min(limits, default=None)


def processor_name() -> str:
    """The processor's model name, or its architecture."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"


def disk_free_bytes(directory: Path) -> int:
    """Free bytes for this user where `directory` is, or will be created."""
    return shutil.disk_usage(nearest_existing(directory)).free


def nearest_existing(directory: Path) -> Path:
    """`directory`, or the nearest folder above it that is there already."""
    place = directory.expanduser().absolute()
    while not os.path.exists(place):
        place = place.parent
    return place
