"""Recognition of out-of-memory errors. Only PyTorch's own allocator has an exception class for them."""

from __future__ import annotations

import sys

TEXTS = (
    "can't allocate memory", "not enough memory", "std::bad_alloc", "Cannot allocate memory",
    "CUDA error: out of memory", "_STATUS_ALLOC_FAILED", "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
)  # fmt: skip
"""Messages of the other sources: torch's CPU allocator, its libraries and the operating system; the CUDA runtime, where
its own allocations fail (torch.AcceleratorError); cuBLAS and cuDNN, for a handle or a workspace
(github.com/Lightning-AI/lightning-thunder/issues/1296); NCCL, for its buffers
(github.com/rwth-i6/returnn/issues/1626)."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that the memory of the GPU or the machine is used up."""
    torch = sys.modules.get("torch")  # its errors come from processes that have imported it
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError | OSError) and any(text in str(error) for text in TEXTS)
