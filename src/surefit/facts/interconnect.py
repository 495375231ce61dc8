"""Bandwidth between GPUs: NVLink or PCIe inside a machine, the network between machines."""

from __future__ import annotations

from dataclasses import dataclass

from surefit.facts.gpus import GPUS, TABLE, find_gpu

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


_PCIE_RATE = {3: 15.75, 4: 31.5, 5: 63.0}
"""GB/s of 16 lanes in one direction: 8, 16, 32 GT/s with 128 of 130 bits (PCI-SIG)."""


def link_of(name: str) -> Link | None:
    """Return the link between two GPUs of this name in one machine; None for a GPU that the catalogue does not have."""
    gpu = find_gpu(name)
    if gpu is None:
        return None
    card = TABLE["cards"][next(key for key, spec in GPUS.items() if spec is gpu)]
    if "link" in card:
        rate, source = card["link"]
        return Link(rate * 1e9, source)
    generation, lanes = TABLE["architectures"][gpu.architecture]["pcie"], card.get("pcie_lanes", 16)
    return Link(
        _PCIE_RATE[generation] * lanes / 16 * 1e9,
        f"PCIe {generation}, {lanes} lanes: no NVLink between cards is assumed",
    )
