"""The catalogue of GPUs: memory, rates and features of cards that need not be installed.

Rates are the vendor's for dense matrices (data sheets print twice as much "with sparsity") accumulated in float32, as
PyTorch does; a GeForce card has half the advertised rate for that. gpus.json has the figures, each with its source, and
none where none was found. Measured rates are better: `surefit calibrate` measures them, and `plan.time` prefers them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefit.core.errors import ConfigError
from surefit.core.units import GIB, KIB, MIB, bytes_text

AMD_UNTESTED = "SureFit is for NVIDIA's CUDA: nothing was run on ROCm, this is arithmetic"
BF16_CAPABILITY = (8, 0)
"""NVIDIA GPUs multiply bfloat16 natively from compute capability 8.0 (Ampere) on:
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities."""
TABLE: dict[str, Any] = json.loads((Path(__file__).parent / "gpus.json").read_text(encoding="utf-8"))
"""Cards and architectures: `features` are what PyTorch's own kernels support, `tensor_ratio` the speed of the tensor
cores as a multiple of float32 in cards whose rates are computed, `link` a card's link to others in GB/s and its
source."""


@dataclass(frozen=True)
class GpuSpec:
    """A GPU model.

    Attributes:
        memory_bytes: memory as PyTorch reports it on the real card, not the advertised amount.
        compute_capability: NVIDIA's; None for other vendors.
        source: source of `memory_bytes`. "an upper bound" in it: PyTorch will report less.
        bf16, fp16, fp8, tf32, fp32: dense TFLOP/s of matrix products; fp32 without the tensor cores, PyTorch's default
            (`torch.backends.cuda.matmul`). None: not supported, or no figure was found.
        bandwidth: memory bandwidth in bytes per second.
        rates_source: source of the rates and the bandwidth.

    Raises:
        ConfigError: a card without memory.
    """

    name: str
    architecture: str
    memory_bytes: int
    compute_capability: tuple[int, int] | None
    source: str
    bf16: float | None
    fp16: float | None
    fp8: float | None
    tf32: float | None
    fp32: float | None
    bandwidth: float | None
    rates_source: str

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0:
            raise ConfigError(
                f"{self.name} has {bytes_text(self.memory_bytes)} of memory: nothing can be trained on it",
                code="E2067",
                field="hardware.gpu",
                help="name a GPU with memory, e.g. h100",
            )

    @property
    def multiplies_bf16(self) -> bool:
        """Return whether bfloat16 is multiplied natively."""
        return self.compute_capability is None or self.compute_capability >= BF16_CAPABILITY

    @property
    def assumed(self) -> str:
        """What a plan for this card assumes, in words; empty where its figures are the catalogue's and CUDA's."""
        if self.rates_source == GENERIC:
            gib = self.memory_bytes / GIB
            return f"Ampere or newer (bfloat16); PyTorch sees {gib:.1f} GiB of it"
        return AMD_UNTESTED if self.compute_capability is None else ""

    @property
    def features(self) -> tuple[str, ...]:
        """Names among bf16, fp8, flash-attention-2 and flash-attention-3 that the architecture supports."""
        features: list[str] = TABLE["architectures"][self.architecture]["features"]
        return ("bf16", *features) if self.multiplies_bf16 else tuple(features)

    def flops(self, dtype: str) -> float | None:
        """Return FLOP/s of matrix products in a torch dtype; a card without bfloat16 computes it in float32."""
        by_name = {"bfloat16": self.bf16 if self.multiplies_bf16 else self.fp32, "float16": self.fp16}
        rate = by_name.get(dtype, self.fp32)
        return rate * 1e12 if rate is not None else None


_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB}


def _gpu(entry: dict[str, Any]) -> GpuSpec:
    """Return the card of an entry of gpus.json, whose bandwidth is in GB/s, as data sheets print it."""
    size, unit = entry["memory"]
    computed = "cuda_cores" in entry
    rates = _geforce_rates(entry) if computed else entry
    capability, bandwidth = entry.get("compute_capability"), entry.get("bandwidth")
    return GpuSpec(
        name=entry["name"],
        architecture=entry["architecture"],
        memory_bytes=round(size * _UNITS[unit]),
        compute_capability=tuple(capability) if capability else None,
        source=entry["source"],
        **{dtype: rates.get(dtype) for dtype in ("bf16", "fp16", "fp8", "tf32", "fp32")},
        bandwidth=bandwidth * 1e9 if bandwidth is not None else None,
        rates_source=_geforce_source(entry) if computed else entry["rates_source"],
    )


def _geforce_rates(entry: dict[str, Any]) -> dict[str, float]:
    """Return the rates of a GeForce card by its CUDA cores and boost clock in MHz: two operations per core and cycle in
    float32, and in the tensor cores, which accumulate in float32 here, a multiple of that by architecture.

    The white papers' own figures have these ratios: the RTX 2080 Ti's, 3090's, 4090's and 5090's.
    """
    architecture = TABLE["architectures"][entry["architecture"]]
    fp32 = 2 * entry["cuda_cores"] * entry["boost_mhz"] / 1e6
    half = architecture["tensor_ratio"] * fp32
    rates = {"fp16": half, "fp32": fp32}
    if entry["architecture"] != "Turing":
        rates |= {"bf16": half, "tf32": half / 2}
    if "fp8" in architecture["features"]:
        rates["fp8"] = 2 * half
    return {dtype: round(rate, 1) for dtype, rate in rates.items()}


def _geforce_source(entry: dict[str, Any]) -> str:
    """Return where those rates are from; `rates_source` is a page with cores, clock and bandwidth, where one was
    found."""
    page = entry.get("rates_source")
    checked = f": {page}" if page else "; estimated: no published table was found to compare these with"
    cores = f"{entry['cuda_cores']:,} CUDA cores at {entry['boost_mhz']:,} MHz"
    return f"{cores}, tensor cores by the architecture's ratio{checked}"


GPUS: dict[str, GpuSpec] = {key: _gpu(entry) for key, entry in TABLE["cards"].items()}
_ALIASES: dict[str, str] = TABLE["aliases"]
_SIZES: dict[str, list[str]] = TABLE["sizes"]
"""Cards that exist with different amounts of memory under one name, the smallest first."""


def _plain(name: str) -> str:
    """Return a name without vendor, form factor and punctuation; a GeForce card's begins with rtx.

    >>> _plain("NVIDIA GeForce RTX 3060 Ti"), _plain("4060 Ti 16GB"), _plain("NVIDIA A100-SXM4-80GB")
    ('rtx3060ti', 'rtx4060ti16gb', 'a100sxm480gb')
    """
    plain = re.sub(r"nvidia|geforce|tesla|amd|instinct|[^a-z0-9]", "", name.lower())
    return f"rtx{plain}" if re.match(r"[2345]0[5-9]0(?!0)", plain) else plain


_NAMES = {_plain(spelling): key for key, gpu in GPUS.items() for spelling in (key, gpu.name)} | _ALIASES
_NAMES |= {f"{plain}gb": key for plain, key in _NAMES.items() if re.search(r"-\d+$", key) and plain == _plain(key)}


def spellings() -> list[str]:
    """Return the accepted names of GPUs: the catalogue's names, and short ones, such as 4090."""
    return [*GPUS, *_NAMES, *(name.removeprefix("rtx") for name in _NAMES if name.startswith("rtx"))]


def find_gpu(name: str, memory_bytes: int | None = None) -> GpuSpec | None:
    """Find a GPU in the catalogue, however its name is written: h100, RTX_3090, 4090, "NVIDIA A100-SXM4-80GB".

    Args:
        memory_bytes: its memory, which tells cards with the same name apart; without it the smaller one is taken.
    """
    if memory_bytes and (sizes := sizes_of(name)):
        return min((GPUS[key] for key in sizes), key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))
    plain = _plain(name)
    # The form factor is ignored unless it has an entry of its own, as the H100's have.
    key = _NAMES.get(plain) or _NAMES.get(re.sub(r"pcie|sxm\d?|hbm\de?", "", plain))
    return GPUS[key] if key else None


SEEN_SHARE = 0.92
"""Share of a card's advertised memory that is counted where only the size is given. No card above of that size shows
less to PyTorch: cards with ECC show 92.2 % (T4) to 93.8 % (A10, L4), consumer cards up to 98.5 %."""
LEAST_GB, MOST_GB = 1, 1024
"""Sizes in GB that a card may have."""
GENERIC = "none: only the size of the card is given"
_GB = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])i?b|(g))", re.IGNORECASE)
"""A size with its unit: GB, GiB or G; not 4060 Ti."""


def generic_gpu(text: str) -> GpuSpec | None:
    """Return a card of which only the memory is given, such as 12GB; None where the text is no size.

    It has the features of Ampere's consumer cards, the first with bfloat16. Its speed is unknown. GB and GiB are the
    same here, as on a card's box.

    Raises:
        ConfigError: no card has that much, or that little.
    """
    match = _GB.fullmatch(text.strip())
    if match is None:
        return None
    size = float(match[1]) * 1024.0 ** ("kmgt".index((match[2] or match[3]).lower()) - 2)
    if not LEAST_GB <= size <= MOST_GB:
        raise ConfigError(
            f"no GPU has {text.strip()} of memory",
            code="E2104",
            field="hardware.gpu",
            help=f"write the size in GB, {LEAST_GB}GB to {MOST_GB}GB, such as 12GB, or a card's name, such as 4070",
        )
    source = (
        f"{SEEN_SHARE:.0%} of {size:g} GB: what PyTorch sees of the card of this size that shows least, one with ECC"
    )
    memory = round(SEEN_SHARE * size * GIB)
    article = "an" if f"{size:g}".startswith("8") or size in (11, 18) else "a"
    name = f"{article} {size:g} GB card"
    return GpuSpec(name, "Ampere", memory, (8, 6), source, None, None, None, None, None, None, GENERIC)


def sizes_of(name: str) -> tuple[str, ...]:
    """Return the cards that a name without an amount of memory may mean; () where it means one.

    >>> sizes_of("A100 PCIe"), sizes_of("3080"), sizes_of("NVIDIA A100-SXM4-80GB")
    (('a100-40', 'a100-80'), ('rtx3080-10', 'rtx3080-12'), ())
    """
    return tuple(_SIZES.get(re.sub(r"pcie|sxm\d?|hbm\de?", "", _plain(name)), ()))
