"""What a run on a CPU holds beside its step: arithmetic, for the closed form and the simulation. Torch-free."""

from __future__ import annotations

from surefit.config.modes import MODES
from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import LoraSection
from surefit.core.units import MIB
from surefit.facts.memory_formula import StepMemory, count_trainable_parameters, target_modules
from surefit.facts.model import DTYPE_BYTES, ModelFacts
from surefit.facts.sharding import sharing_of

KERNELS = 64 * MIB
"""Of oneDNN, compiled; by benchmarks/plan_real.py's bfloat16 case with 1,024 kept and with 4."""
UPDATED = ("optimizer", "masters")


def cpu_overhead_bytes(resolved: ResolvedConfig, model: ModelFacts, budget: StepMemory) -> int:
    """The checkpoint's copy, where a step has it beside it, what stays of the files, and what products take."""
    copied = snapshot_bytes(resolved, model, budget) if saves_before_last_step(resolved) else 0
    return mapped_file_bytes(resolved, model) + onednn_scratch_bytes(resolved, model) + copied


def snapshot_bytes(resolved: ResolvedConfig, model: ModelFacts, budget: StepMemory) -> int:
    """What `checkpoint.snapshot` keeps for the next checkpoint: what is trained, and the optimizer's tensors."""
    part = count_trainable_parameters(model, resolved.config.adapter, resolved.config.model.dtype)
    assert part is not None, "there is a budget"
    updated = sum(term.bytes for term in budget.terms if term.term in UPDATED and term.moment == "always")
    sharing = sharing_of(resolved.config)
    parts = sharing.size if sharing is not None and MODES[sharing.mode].sharded else 1
    return part.parameters * part.bytes_each // parts + updated


def mapped_file_bytes(resolved: ResolvedConfig, model: ModelFacts) -> int:
    """Return what was read of the files and stays in memory beside the copies made of it, while any tensor is still the
    file's: embeddings and norms are taken as they are. Of a base that is quantized these are the matrices, of a mixture
    the experts that lie one by one in the files and are read into stacks. In another type all are copies, and the
    file goes."""
    config = resolved.config.model
    if model.dtype != config.dtype:
        return 0
    copied = model.lone_expert_parameters
    if config.quantization != "none":
        copied += sum(out * into for out, into in target_modules(model, LoraSection()).values())
    return DTYPE_BYTES[config.dtype] * copied


def onednn_scratch_bytes(resolved: ResolvedConfig, model: ModelFacts) -> int:
    """What oneDNN takes beside a step whose products are in 16 bits: the weights of the one at work, in its own layout,
    and the kernels that it has compiled, one for each shape (ONEDNN_PRIMITIVE_CACHE_CAPACITY: 1,024 of them). Products
    in float32 are MKL's, and pack little.

    Worked example, SmolLM2-135M: the output head's 49,152 × 576 × 2 bytes and 64 MiB are 123.7 MB. Measured on a
    processor with AMX: 0.19 GB more than the tensors, of which the kernels 0.06 (docs/LOG.md, 2026-11-23).
    """
    if DTYPE_BYTES[resolved.config.model.dtype] > 2:
        return 0
    matrices = [out * into for out, into in target_modules(model, LoraSection()).values()]
    return 2 * max([model.vocab_size * model.hidden_size, *matrices]) + KERNELS


def saves_before_last_step(resolved: ResolvedConfig) -> bool:
    """Whether a checkpoint is made before the last step."""
    every = resolved.config.checkpoint.save_steps
    return not isinstance(every, int) or resolved.total_steps is None or every < resolved.total_steps
