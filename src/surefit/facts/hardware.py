"""Facts about a device: this machine's, from the operating system and the GPU driver, or a GPU of the catalogue.

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
from difflib import get_close_matches
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Literal

from surefit.core import env
from surefit.core.errors import ConfigError, did_you_mean
from surefit.core.units import MIB, bytes_of
from surefit.facts.gpus import BF16_CAPABILITY as BF16_CAPABILITY
from surefit.facts.gpus import GPUS as GPUS
from surefit.facts.gpus import GpuSpec, generic_gpu, sizes_of, spellings
from surefit.facts.gpus import find_gpu as find_gpu


@dataclass(frozen=True)
class HardwareFacts:
    """The device to train on and the machine around it.

    Attributes:
        name: the GPU's or the processor's name.
        memory_bytes: the GPU's memory; on a CPU the machine's RAM.
        bf16: bfloat16 is multiplied natively.
        cpu_count: processors this process may use.
        ram_bytes: the machine's memory, or the smaller limit of the container.
        disk_free_bytes: free space where `directory` is or will be, or the config's value; None where the GPU is of
            another machine and the config has no value.
        disk_source: "detected" on this machine, "config" where `hardware.disk` is set, else "unknown".
        figure: source of `memory_bytes`.
        gpu_count: GPUs that were detected and that `CUDA_VISIBLE_DEVICES` does not hide; 1 for a GPU of the catalogue.
        unused_gpu: a GPU of this machine that the installed, CPU-only PyTorch cannot use.
        assumed: what is assumed of a GPU of which only the memory is known, or which is not NVIDIA's; else empty.
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
    assumed: str = ""

    @property
    def is_another_machine(self) -> bool:
        """Return whether the GPU is from the catalogue, so that another machine has it."""
        return self.source == "catalogue"


def hardware_facts(gpu: str = "auto", directory: Path | None = None, disk: str | None = None) -> HardwareFacts:
    """Return the device that the config's `hardware.gpu` selects, and the free disk space.

    Args:
        gpu: "auto" (the GPU of this machine if PyTorch can use it, else the CPU), "cpu", a catalogue name, or an amount
            of memory, such as 12GB; where this machine has the named GPU, the facts are this machine's.
        directory: directory that the run will write to; the working directory by default.
        disk: free space of the machine that trains, `hardware.disk`; without it this machine's.

    Raises:
        ConfigError: a name the catalogue does not have, or a size that no card has.
    """
    device = _device(gpu, disk_free_bytes(directory or Path.cwd()))
    if disk is not None:
        return replace(device, disk_free_bytes=bytes_of(disk), disk_source="config")
    return replace(device, disk_free_bytes=None, disk_source="unknown") if device.is_another_machine else device


def _device(gpu: str, disk: int) -> HardwareFacts:
    if gpu == "cpu":
        return _cpu(disk)
    cards = usable_gpus(detect_gpus())
    if gpu == "auto":
        if not cards or torch_is_cpu_build():
            return _cpu(disk, unused_gpu=cards[0].name if cards else None)
        return _detected_device(cards, disk)
    if (generic := generic_gpu(gpu)) is not None:
        return _another_device(generic, disk)
    specs = [GPUS[key] for key in sizes_of(gpu)] or [spec for spec in (find_gpu(gpu),) if spec]
    matching = [card for card in cards if card.name == gpu or find_gpu(card.name, card.memory_bytes) in specs]
    return _detected_device(matching, disk) if matching and not torch_is_cpu_build() else _catalogue_device(gpu, disk)


def _detected_device(found: list[DetectedGpu], disk: int) -> HardwareFacts:
    card = found[0]
    return HardwareFacts(
        "cuda", card.name, card.memory_bytes, card.compute_capability >= BF16_CAPABILITY, cpu_count(), ram_bytes(),
        disk, "detected", card.source, card.compute_capability, len(found),
    )  # fmt: skip


def _same_number(gpu: str) -> list[str]:
    """Return the known names that a name may be a misspelling of: its number has the same digits, or some more or
    fewer at the end; another number is another card.

    >>> [name for name in ("rtx4090", "h100") if name in _same_number("rtx4080")]
    []
    >>> "rtx4090" in _same_number("rtx4900x"), "h100" in _same_number("h1000")
    (True, True)
    """
    digits = re.sub(r"\D", "", re.sub(r"(?<=\d)o|o(?=\d)", "0", gpu.lower()))
    numbers = {name: re.sub(r"\D", "", name) for name in spellings()}
    return [
        name
        for name, number in numbers.items()
        if sorted(number) == sorted(digits) or number.startswith(digits) or (number and digits.startswith(number))
    ]


def _catalogue_device(gpu: str, disk: int) -> HardwareFacts:
    if sizes := sizes_of(gpu):
        raise ConfigError(
            f"{gpu} exists with different amounts of memory",
            code="E2400",
            field="hardware.gpu",
            help=f"write {' or '.join(sizes)}",
        )
    card = find_gpu(gpu)
    if card is None:
        raise ConfigError(
            f"there is no GPU named {gpu!r}{did_you_mean(gpu.lower(), _same_number(gpu))}",
            code="E2068",
            field="hardware.gpu",
            help=f"write auto, cpu, {_similar(gpu)}; all {len(GPUS)} names: docs/reference/gpus.md",
        )
    return _another_device(card, disk)


def _similar(gpu: str) -> str:
    """Return the catalogue's names that resemble one it does not have, or else names of common cards; and a size.

    >>> _similar("12")
    '12GB (a card by its memory), or a name, such as rtx4090'
    """
    if gpu.isdigit() and 1 <= int(gpu) <= 192:
        return f"{gpu}GB (a card by its memory), or a name, such as rtx4090"
    near = get_close_matches(gpu.lower(), GPUS, 4, 0.6) or ["rtx3060-12", "rtx4090", "a100-80", "h100"]
    return f"{', '.join(near)}, or the card's memory, such as 12GB"


def _another_device(card: GpuSpec, disk: int) -> HardwareFacts:
    return HardwareFacts(
        "cuda", card.name, card.memory_bytes, card.multiplies_bf16, cpu_count(), ram_bytes(),
        disk, "catalogue", card.source, card.compute_capability, 1, assumed=card.assumed,
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
    """List the NVIDIA GPUs of this machine; empty where there is no driver, or it does not answer in ten seconds."""
    tool = shutil.which("nvidia-smi")
    # Drivers before 510 reject a query that names compute_cap.
    for fields in ("name,memory.total,driver_version,compute_cap", "name,memory.total,driver_version") if tool else ():
        with suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.run(
                [str(tool), f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
                capture_output=True, text=True, errors="replace", timeout=10, check=True,
            )  # fmt: skip
            return [gpu for line in answer.stdout.splitlines() if (gpu := _parse_gpu(line))]
    return []


def usable_gpus(cards: Sequence[DetectedGpu]) -> list[DetectedGpu]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` does not hide, in its order.

    Its numbers are assumed to be nvidia-smi's. CUDA's own put the fastest GPU first unless
    `CUDA_DEVICE_ORDER=PCI_BUS_ID`, which differs only where a machine has different GPUs.
    """
    visible = env.visible_gpus()
    if visible is None:
        return list(cards)
    return [cards[number] for number in takewhile(lambda number: number < len(cards), visible)]


def _parse_gpu(line: str) -> DetectedGpu | None:
    """Parse `NVIDIA H200, 143771, 580.65.06, 9.0`; None for a line of another form."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) not in (3, 4):
        return None
    name, memory, driver, *capability = fields
    match = re.fullmatch(r"(\d+)\.(\d+)", "".join(capability))
    spec = find_gpu(name)
    major_minor = (int(match[1]), int(match[2])) if match else (spec and spec.compute_capability) or (0, 0)
    # A partition of a GPU has no memory.total of its own.
    return DetectedGpu(name, int(memory) * MIB if memory.isdigit() else None, major_minor, driver)


def torch_is_cpu_build() -> bool:
    """Return whether the installed PyTorch was built without CUDA, by its version."""
    version = installed_version("torch")
    return version is not None and version.endswith("+cpu")


def installed_version(package: str) -> str | None:
    """Return a package's version from its metadata, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_count() -> int:
    """Return the number of processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ram_bytes() -> int | None:
    """Return the machine's memory, or the container's smaller limit (cgroup 2, then 1)."""
    limits = []
    with suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min(limits, default=None)


def processor_name() -> str:
    """Return the processor's model name, or its architecture."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"


def disk_free_bytes(directory: Path) -> int:
    """Return the free bytes for this user where `directory` is, or will be created."""
    return shutil.disk_usage(nearest_existing(directory)).free


def nearest_existing(directory: Path) -> Path:
    """Return `directory`, or the nearest folder above it that exists."""
    path = directory.expanduser().absolute()
    while not os.path.exists(path):
        path = path.parent
    return path
