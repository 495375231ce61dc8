"""The memory of a run on a CPU besides its step: arithmetic, for the closed form and the simulation. Torch-free."""

from __future__ import annotations

from surefit.config.modes import MODES
from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import LoraSection
from surefit.core.units import MIB
from surefit.facts.memory_formula import StepMemory, count_trainable_parameters, target_modules
from surefit.facts.model import DTYPE_BYTES, ModelFacts
from surefit.facts.sharding import sharing_of

KERNELS = 64 * MIB
"""Bytes of oneDNN's compiled kernels, from benchmarks/plan_real.py's bfloat16 case with 1,024 kept and with 4."""
UPDATED = ("optimizer", "masters")


def cpu_overhead_bytes(resolved: ResolvedConfig, model: ModelFacts, budget: StepMemory) -> int:
    """Return the bytes of the checkpoint's copy, where a step runs beside it, of the mapped weight files, and of
    oneDNN's scratch memory."""
    copied = snapshot_bytes(resolved, model, budget) if saves_before_last_step(resolved) else 0
    return mapped_file_bytes(resolved, model) + onednn_scratch_bytes(resolved, model) + copied


def snapshot_bytes(resolved: ResolvedConfig, model: ModelFacts, budget: StepMemory) -> int:
    """Return the bytes that `checkpoint.snapshot` keeps for the next checkpoint: the trained weights, and the
    optimizer's tensors."""
    trainable = count_trainable_parameters(model, resolved.config.adapter, resolved.config.model.dtype)
    assert trainable is not None, "there is a budget"
    updated = sum(term.bytes for term in budget.terms if term.term in UPDATED and term.moment == "always")
    sharing = sharing_of(resolved.config)
    parts = sharing.size if sharing is not None and MODES[sharing.mode].sharded else 1
    return trainable.parameters * trainable.bytes_each // parts + updated


def mapped_file_bytes(resolved: ResolvedConfig, model: ModelFacts) -> int:
    """Return the bytes of the weight files that stay in memory beside the copies made from them, as long as any tensor
    still uses the file: embeddings and norms are used as they are. In a quantized base these bytes are the matrices, in
    a mixture of experts the experts that are stored one by one in the files and are read into stacks. In another dtype
    all tensors are copies, and the file is released."""
    config = resolved.config.model
    if model.dtype != config.dtype:
        return 0
    copied = model.lone_expert_parameters
    if config.quantization != "none":
        copied += sum(out * into for out, into in target_modules(model, LoraSection()).values())
    return DTYPE_BYTES[config.dtype] * copied


def onednn_scratch_bytes(resolved: ResolvedConfig, model: ModelFacts) -> int:
    """Return the bytes that oneDNN needs beside a step whose products are in 16 bits: the weights of the product at
    work, in its own layout, and the kernels that it has compiled, one for each shape (ONEDNN_PRIMITIVE_CACHE_CAPACITY:
    1,024 of them). Products in float32 are MKL's, and pack little.

    Worked example, SmolLM2-135M: the output head's 49,152 × 576 × 2 bytes and 64 MiB are 123.7 MB. Measured on a
    processor with AMX: 0.19 GB more than the tensors, of which the kernels 0.06 (docs/LOG.md, 2026-11-23).
    """
    if DTYPE_BYTES[resolved.config.model.dtype] > 2:
        return 0
    matrices = [out * into for out, into in target_modules(model, LoraSection()).values()]
    return 2 * max([model.vocab_size * model.hidden_size, *matrices]) + KERNELS


def saves_before_last_step(resolved: ResolvedConfig) -> bool:
    """Return whether a checkpoint is made before the last step."""
    save_steps = resolved.config.checkpoint.save_steps
    return not isinstance(save_steps, int) or resolved.total_steps is None or save_steps < resolved.total_steps
