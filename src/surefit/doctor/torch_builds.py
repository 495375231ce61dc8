"""The builds of torch that an NVIDIA driver can run.

Sources: docs.nvidia.com/deploy/cuda-compatibility, "Minor Version Compatibility" (CUDA 13 needs a driver from 580 on,
CUDA 12 one from 525); PyTorch's wheels (2.11: cu126, cu128, cu130; 2.12: cu126, cu130, cu132), of which the package
index has CUDA 13's since 2.11 (github.com/pytorch/pytorch/pull/177975). The wheels for CUDA 12.6 end at Hopper.
"""

from __future__ import annotations

from surefit.facts.hardware import DetectedGpu

OF_CUDA_13, BLACKWELL_OF_CUDA_12, OF_CUDA_12 = 580, 570, 525
"""The lowest driver version for each."""
BLACKWELL = (10, 0)
TORCH = "torch>=2.11,<2.14"
_INSTALL = "pip install --force-reinstall"
_INDEX = "--index-url https://download.pytorch.org/whl"


def install_command(card: DetectedGpu) -> str | None:
    """Return the command that installs a torch for the card and its driver; None if no build runs, or none is known.

    >>> install_command(DetectedGpu("A100", None, (8, 0), "535.183.01"))
    "pip install --force-reinstall 'torch>=2.11,<2.14' --index-url https://download.pytorch.org/whl/cu126"
    """
    number = card.driver.partition(".")[0]
    driver, blackwell = int(number) if number.isdecimal() else 0, card.compute_capability >= BLACKWELL
    if driver >= OF_CUDA_13:
        return f"{_INSTALL} '{TORCH}'"
    if blackwell:
        return f"{_INSTALL} 'torch==2.11.*' {_INDEX}/cu128" if driver >= BLACKWELL_OF_CUDA_12 else None
    return f"{_INSTALL} '{TORCH}' {_INDEX}/cu126" if driver >= OF_CUDA_12 else None
