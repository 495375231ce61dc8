"""Bandwidth between GPUs: NVLink or PCIe inside a machine, the network between machines."""

from __future__ import annotations

from dataclasses import dataclass

from surefit.facts.gpus import GPUS, find_gpu

REACHED = 0.77
"""Share of a link's rate that NCCL reaches: 350 of 450 GB/s on H100 over NVLink, 12 of 16 over PCIe 3
(github.com/NVIDIA/nccl/issues/864, a maintainer's figures)."""
NETWORK = 25e9
"""Bytes per second and GPU between machines: 200 Gb/s InfiniBand for each, as in a DGX A100. An assumption, which your
cluster's rate replaces."""


@dataclass(frozen=True)
class Link:
    """Bytes per second in one direction, and the source of the figure."""

    bandwidth: float
    source: str


_NVLINK = {
    "a100-40": (300, "NVLink 3, 600 GB/s both ways: NVIDIA A100 data sheet, SXM4"),
    "a100-80": (300, "NVLink 3, 600 GB/s both ways: NVIDIA A100 data sheet, SXM4"),
    "h100": (450, "NVLink 4, 900 GB/s both ways: NVIDIA H100 data sheet, SXM5"),
    "h100-nvl": (300, "NVLink bridge, 600 GB/s both ways: NVIDIA H100 NVL data sheet"),
    "h200": (450, "NVLink 4, 900 GB/s both ways: NVIDIA H200 data sheet"),
    "gh200": (450, "NVLink 4, 900 GB/s both ways: NVIDIA GH200 data sheet"),
    "b200": (900, "NVLink 5, 1,800 GB/s both ways: NVIDIA HGX B200"),
    "b300": (900, "NVLink 5, 1,800 GB/s both ways: NVIDIA HGX B300"),
    "mi300x": (448, "Infinity Fabric, 7 links of 128 GB/s both ways: AMD MI300X data sheet"),
    "mi325x": (448, "Infinity Fabric, 7 links of 128 GB/s both ways: AMD MI325X data sheet"),
}
_PCIE = {
    "Pascal": 3,
    "Volta": 3,
    "Turing": 3,
    "Ampere": 4,
    "Ada": 4,
    "CDNA 2": 4,
    "Hopper": 5,
    "Blackwell": 5,
    "CDNA 3": 5,
}
_EIGHT_LANES = ("rtx4060", "rtx4060ti-8", "rtx4060ti-16", "rtx5060", "rtx5060ti-8", "rtx5060ti-16")
_PCIE_RATE = {3: 15.75, 4: 31.5, 5: 63.0}
"""GB/s of 16 lanes in one direction: 8, 16, 32 GT/s with 128 of 130 bits (PCI-SIG)."""


def link_of(name: str) -> Link | None:
    """Return the link between two GPUs of this name in one machine; None for a GPU that the catalogue does not have."""
    gpu = find_gpu(name)
    if gpu is None:
        return None
    key = next(key for key, spec in GPUS.items() if spec is gpu)
    if key in _NVLINK:
        rate, source = _NVLINK[key]
        return Link(rate * 1e9, source)
    generation = _PCIE[gpu.architecture]
    lanes = 8 if key in _EIGHT_LANES else 16
    return Link(
        _PCIE_RATE[generation] * lanes / 16 * 1e9,
        f"PCIe {generation}, {lanes} lanes: no NVLink between cards is assumed",
    )
