"""What a run on a CPU holds beside its step: arithmetic, for the closed form and the simulation. Torch-free."""

from __future__ import annotations

from surefit.config.modes import MODES
from surefit.config.resolve import Resolved
from surefit.config.schema import AdapterSection
from surefit.facts.budget import Budget, target_modules, trained
from surefit.facts.model import DTYPE_BYTES, ModelFacts
from surefit.facts.sharding import sharing_of

UPDATED = ("optimizer", "masters")


def beside_bytes(resolved: Resolved, model: ModelFacts, budget: Budget) -> int:
    """The checkpoint's copy, where a step has it beside it, and what stays of the weights' files."""
    return mapped_bytes(resolved, model) + (copied_bytes(resolved, model, budget) if saves_between(resolved) else 0)


def copied_bytes(resolved: Resolved, model: ModelFacts, budget: Budget) -> int:
    """What `checkpoint.snapshot` keeps for the next checkpoint: what is trained, and the optimizer's tensors."""
    part = trained(model, resolved.config.adapter, resolved.config.model.dtype)
    assert part is not None, "there is a budget"
    updated = sum(term.bytes for term in budget.terms if term.term in UPDATED and term.moment == "always")
    sharing = sharing_of(resolved.config)
    parts = sharing.size if sharing is not None and MODES[sharing.mode].sharded else 1
    return part.parameters * part.bytes_each // parts + updated


def mapped_bytes(resolved: Resolved, model: ModelFacts) -> int:
    """What was read of a file stays while one tensor is still the file's: of a base that is quantised, the matrices in
    the type of the file, because embeddings and norms are taken as they are. In another type all are copies, and the
    file goes."""
    config = resolved.config.model
    if config.quantization == "none" or model.dtype != config.dtype:
        return 0
    return DTYPE_BYTES[config.dtype] * sum(out * into for out, into in target_modules(model, AdapterSection()).values())


def saves_between(resolved: Resolved) -> bool:
    """Whether a checkpoint is made before the last step."""
    every = resolved.config.checkpoint.every
    return not isinstance(every, int) or resolved.total_steps is None or every < resolved.total_steps
