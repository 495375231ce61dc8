"""The needs of a run on a GPU from the machine around it: RAM beside the process, and traffic over PCIe in a step.

Worked example, Qwen3-4B with one row of 262,144 tokens in bfloat16 and the layers' inputs on the host: 262,144 × 2,560
× 2 bytes are 1.25 GiB. Pinned memory comes in powers of two, so each of the 36 layers uses 2 GiB, 72 GiB in all; and
36 × 1.25 GiB go out and come back for each micro batch, 90 GiB.
"""

from __future__ import annotations

from typing import Any

from surefit.config.optimizers import OPTIMIZERS
from surefit.config.resolve import ResolvedConfig
from surefit.config.world import count_processes
from surefit.facts.activations import TOKEN_BYTES
from surefit.facts.hardware import HardwareFacts
from surefit.facts.memory_formula import MOMENTS, PAGED, trainable_tensor_sizes
from surefit.facts.model import DTYPE_BYTES, ModelFacts
from surefit.facts.step_shape import micro_batch_shape


def build_host_plan(
    resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts, length: int | None = None
) -> dict[str, Any] | None:
    """Return the entry `host` of plan.json; None on a CPU, for several processes, and where the model's layers are not
    known.

    Args:
        resolved: the config without "auto".
        model: facts about the base model.
        hardware: the device, and the machine's RAM where it was detected.
        length: tokens of the longest example; None: `data.max_length`.
    """
    if hardware.kind == "cpu" or count_processes(resolved.config) > 1 or not model.linear_modules:
        return None
    shape, layers = micro_batch_shape(resolved, length), model.num_layers
    traffic = {"batches": TOKEN_BYTES * shape.tokens * shape.micro_batches}
    memory: list[dict[str, Any]] = []
    if resolved.config.train.gradient_checkpointing == "offload":
        layer_bytes = shape.tokens * model.hidden_size * DTYPE_BYTES[resolved.config.model.dtype]
        reason = (
            f"{layers} layers' inputs in pinned memory, {pinned_bytes(layer_bytes):,} bytes each for {layer_bytes:,}"
        )
        memory.append({"term": "layer inputs", "bytes": layers * pinned_bytes(layer_bytes), "why": reason})
        traffic["layer inputs"] = 2 * layers * layer_bytes * shape.micro_batches
    if paged := paged_bytes(resolved, model):
        reason = f"moments of parameters with at least {PAGED:,} elements; the driver moves them if the GPU is full"
        memory.append({"term": "paged moments", "bytes": paged, "why": reason})
        traffic["paged moments, at most"] = 2 * paged
    return {
        "memory": memory,
        "memory_total_bytes": sum(term["bytes"] for term in memory),
        "ram_bytes": hardware.ram_bytes if hardware.source == "detected" else None,
        "pcie_bytes_per_step": traffic,
        "pcie_total_bytes_per_step": sum(traffic.values()),
    }


def pinned_bytes(size: int) -> int:
    """Return the bytes that PyTorch pins for a tensor of `size` bytes: the next power of two
    (ATen/core/CachingHostAllocator.h, 2.11 to 2.13).

    >>> pinned_bytes(5 * 2**28) / 2**30, pinned_bytes(4096)
    (2.0, 4096)
    """
    return 1 << max(0, size - 1).bit_length()


def paged_bytes(resolved: ResolvedConfig, model: ModelFacts) -> int:
    """Return the bytes of the moments that a paged optimizer of bitsandbytes keeps where a driver may move them to the
    host."""
    optimizer = OPTIMIZERS[resolved.config.train.optim]
    sizes = trainable_tensor_sizes(model, resolved.config.adapter) if optimizer.paged else ()
    large = [(numbers, optimizer.eight_bit and not embedding) for numbers, embedding in sizes if numbers >= PAGED]
    return sum((2 if eight_bit else MOMENTS) * numbers for numbers, eight_bit in large)
