"""The speed of a device: measured by `surefit calibrate` and kept as JSON, or taken from its data sheet. Torch-free."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from surefit.core.env import cache_dir
from surefit.core.errors import ConfigError, MachineError
from surefit.core.reading import read_json_file
from surefit.core.rundir import write_atomic
from surefit.facts.gpus import GpuSpec, find_gpu
from surefit.facts.hardware import HardwareFacts, processor_name
from surefit.facts.sdpa import Capability, share_of_products

SpeedCurve = Sequence[tuple[float, float]]
"""(size, speed) from small to large: FLOP and FLOP/s of a product, or bytes and bytes/s of a copy."""
HEADS_WIDE = (64, 128)
"""Head dimensions that attention is measured with."""

PRODUCTS, MOVEMENT = 0.70, 0.82
"""Shares of a data sheet's FLOP/s, and of its bandwidth, that training reaches."""
LAUNCH_SECONDS = 21e-6
"""Processor time of an operator in transformers' and PEFT's own Python. All three are fitted to the steps of 16
published runs of Llama-3.2-3B on an L40S (`benchmarks/time_published.py`): full training, whose bytes are mostly the
optimizer's, separates the second from the first. Runs on an A100 and an H100 agree (docs/plan-method.md)."""
SHEET_MARGIN = 0.20
"""Relative error that nine in ten of those runs stay within, each predicted from the others."""
CALIBRATED_MARGIN = 0.15
"""Relative error for a measured device; an assumption, until runs on GPUs have been compared with it."""


@dataclass(frozen=True)
class DeviceRates:
    """Speeds of a device that `plan.time` needs.

    Attributes:
        matmul: FLOP/s of matrix products over FLOP, by torch's name of the type.
        copy: bytes/s, read and written together, over bytes.
        launch: seconds per kernel.
        peak: the highest FLOP/s by type, the base of MFU: the data sheet's where there is one.
        margin: possible error of a prediction with these rates, as a share of it.
        source: their origin, in words.
        attention: FLOP/s over FLOP of the measured attention kernels, by `attention_key`.
        capability: a GPU's compute capability, which decides the share of the fastest product that attention reaches
            where it was not measured; None: all of it.
        overlaps: whether kernels run while the next are launched, as on a GPU.
    """

    matmul: Mapping[str, SpeedCurve]
    copy: SpeedCurve
    launch: float
    peak: Mapping[str, float]
    margin: float
    source: str
    attention: Mapping[str, SpeedCurve] = field(default_factory=dict)
    capability: Capability | None = None
    overlaps: bool = True

    def product_speed(self, dtype: str, flops: float) -> float:
        """Return the FLOP/s of a product; float32's for a dtype without a rate of its own."""
        return interpolate_speed(self.matmul.get(dtype) or self.matmul["float32"], flops)

    def attention_speed(self, kernel: str, backward: bool, width: int, dtype: str, flops: float) -> float:
        """Return the FLOP/s of an attention kernel, measured with heads about as wide, or else a share of the
        products'."""
        curves = {
            measured_width: curve
            for measured_width in HEADS_WIDE
            if (curve := self.attention.get(attention_key(kernel, backward, measured_width, dtype)))
        }
        if curves:
            return interpolate_speed(curves[min(curves, key=lambda measured_width: abs(measured_width - width))], flops)
        share = share_of_products(kernel, self.capability, backward=backward, width=width) if self.capability else 1.0
        return share * max(speed for _, speed in self.matmul.get(dtype) or self.matmul["float32"])


@dataclass(frozen=True)
class DeviceProfile:
    """Measurements of `surefit calibrate`.

    Attributes:
        device: the GPU's name, or the processor's with the number of threads.
        kind: "cuda" or "cpu".
        threads: number that PyTorch used on a CPU; None for a GPU.
        matmul, copy, launch, attention: as in `DeviceRates`; older profiles, made before attention was measured, lack
            it.
        memory_bytes: as PyTorch reports it; None for a CPU.
        context_bytes, workspace_bytes: of the CUDA context and cuBLAS; None for a CPU or where unknown.
        seconds: duration of the measurement.
    """

    device: str
    kind: str
    threads: int | None
    torch: str
    driver: str | None
    matmul: dict[str, list[tuple[float, float]]]
    copy: list[tuple[float, float]]
    launch: float
    memory_bytes: int | None
    context_bytes: int | None
    workspace_bytes: int | None
    seconds: float
    attention: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the profile atomically."""
        write_atomic(path, json.dumps(asdict(self), indent=2) + "\n")

    @property
    def stored_at(self) -> Path:
        """Path where SureFit keeps the profile, and looks for it."""
        return profile_folder() / f"{re.sub(r'[^a-z0-9]+', '-', self.device.lower()).strip('-')}.json"


def attention_key(kernel: str, backward: bool, width: int, dtype: str) -> str:
    """Return a profile's name of an attention kernel with a head dimension, such as "flash backward 64 bfloat16"."""
    return f"{kernel} {'backward' if backward else 'forward'} {width} {dtype}"


def profile_folder() -> Path:
    """Return the folder of the profiles."""
    return cache_dir() / "profiles"


def cpu_name(threads: int) -> str:
    """Return the name of this processor with a number of threads: another number is another speed."""
    return f"{processor_name()}, {threads} thread{'' if threads == 1 else 's'}"


def load_profile(path: Path) -> DeviceProfile:
    """Read a profile.

    Raises:
        ConfigError: the file is not a profile.
    """
    try:
        content = read_json_file(path)
        for name in ("matmul", *({"attention"} & content.keys())):
            content[name] = {key: [(x, y) for x, y in curve] for key, curve in content[name].items()}
        content["copy"] = [(x, y) for x, y in content["copy"]]
        profile = DeviceProfile(**content)
        curves = (*profile.matmul.values(), *profile.attention.values(), profile.copy)
        speeds = [y for curve in curves for _, y in curve]
        if not profile.matmul or not profile.copy or not all(0 < y < math.inf for y in speeds) or profile.launch < 0:
            raise ValueError("it has no speeds")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"this is not a device profile: {error}",
            code="E8002",
            path=path,
            help="delete it, or run `surefit calibrate` again",
        ) from None
    return profile


def load_stored_profile(device: GpuSpec | None = None) -> DeviceProfile | None:
    """Return the latest profile of a GPU of the catalogue, or of this processor (`device` None).

    Raises:
        ConfigError: a file in the folder is not a profile.
    """
    for path in sorted(profile_folder().glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        profile = load_profile(path)
        if device is not None and find_gpu(profile.device) == device:
            return profile
        if device is None and profile.kind == "cpu" and profile.device.startswith(f"{processor_name()}, "):
            return profile
    return None


def find_device_speed(hardware: HardwareFacts) -> GpuSpec | DeviceProfile | None:
    """Return what is known of the speed of a run's device; None for a CPU, or a GPU not in the catalogue, never
    measured."""
    gpu = find_gpu(hardware.name) if hardware.kind == "cuda" else None
    return load_stored_profile(gpu) or gpu if gpu or hardware.kind == "cpu" else None


def to_device_rates(device: GpuSpec | DeviceProfile) -> DeviceRates:
    """Return the rates of a measured device, or of a data sheet.

    Raises:
        MachineError: the catalogue lacks a figure of that GPU.
    """
    if isinstance(device, DeviceProfile):
        return _measured_rates(device)
    rates = {dtype: device.flops(dtype) for dtype in ("bfloat16", "float16", "float32")}
    peak = {dtype: rate for dtype, rate in rates.items() if rate is not None}
    if "float32" not in peak or not peak.keys() & {"bfloat16", "float16"} or device.bandwidth is None:
        raise MachineError(
            f"the speed of {device.name} is unknown: the catalogue has no figure for it",
            code="E8003",
            field="hardware.gpu",
            help="run `surefit calibrate` on that device, and copy the profile into SureFit's cache folder",
        )
    return DeviceRates(
        {dtype: [(1.0, rate * PRODUCTS)] for dtype, rate in peak.items()},
        [(1.0, device.bandwidth * MOVEMENT)],
        LAUNCH_SECONDS,
        peak,
        SHEET_MARGIN,
        f"data sheet: {device.rates_source}",
        capability=device.compute_capability,
    )


def _measured_rates(profile: DeviceProfile) -> DeviceRates:
    sheet = find_gpu(profile.device)
    fastest = {dtype: max(speed for _, speed in curve) for dtype, curve in profile.matmul.items()}
    peak = {dtype: (sheet and sheet.flops(dtype)) or speed for dtype, speed in fastest.items()}
    versions = f"torch {profile.torch}" + (f", driver {profile.driver}" if profile.driver else "")
    source = f"measured on {profile.device} with {versions}"
    capability = (sheet and sheet.compute_capability) or (8, 0)
    return DeviceRates(
        profile.matmul,
        profile.copy,
        profile.launch,
        peak,
        CALIBRATED_MARGIN,
        source,
        profile.attention,
        capability if profile.kind == "cuda" else None,
        profile.kind == "cuda",
    )


def interpolate_speed(curve: SpeedCurve, size: float) -> float:
    """Return the speed at a size, between two measured ones on a line of logarithms; outside them the nearest one's.

    >>> round(interpolate_speed([(10, 1.0), (1000, 100.0)], 100), 6), interpolate_speed([(10, 1.0), (1000, 100.0)], 1)
    (10.0, 1.0)
    """
    if size <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if size <= x1:
            share = math.log(size / x0) / math.log(x1 / x0)
            return math.exp(math.log(y0) + share * math.log(y1 / y0))
    return curve[-1][1]
