"""The static plan: memory, disk and steps from the config and the model's shape alone, torch-free, in milliseconds.

It can say that a run does not fit, and never that it does: `left_out` in the plan names what is not counted, the CUDA
context and fragmentation above all, and activations where the architecture is not known. docs/plan.md explains each
term.
"""

from __future__ import annotations

from typing import Any

from surefit import __version__
from surefit.config.resolve import Resolved
from surefit.config.schema import Config
from surefit.config.world import processes
from surefit.core.units import bytes_text, plural
from surefit.facts.budget import ACTIVATIONS_LEFT_OUT, LEFT_OUT, Term, activations_known, at_least, trained
from surefit.facts.disk import disk_terms
from surefit.facts.hardware import HardwareFacts
from surefit.facts.memory_per_rank import memory_terms
from surefit.facts.model import ModelFacts


def static_plan(
    resolved: Resolved, model: ModelFacts, hardware: HardwareFacts, rows: int | None = None
) -> dict[str, Any]:
    """The plan, as plan.json holds it.

    `memory_total_bytes` is the fullest moment of a training step, not the sum of all terms: the logits are gone when
    the optimizer updates. Each memory term says in `moment` when it is held. Totals are None where the model's size is
    not known; `does_not_fit` lists, in words, what certainly exceeds this device or disk.

    Args:
        resolved: the config without "auto".
        model: facts about the base model.
        hardware: the device.
        rows: training rows, None where they are not counted yet.
    """
    memory, disk = memory_terms(resolved, model, hardware.compute_capability), disk_terms(resolved, model)
    part = trained(model, resolved.config.adapter, resolved.config.model.dtype)
    train = resolved.config.train
    return {
        "surefit": __version__,
        "device": {
            "name": hardware.name,
            "kind": hardware.kind,
            "memory_bytes": hardware.memory_bytes,
            "source": hardware.source,
            "figure": hardware.figure,
        },
        "model": {
            "name": model.name,
            "parameters": model.parameters,
            "trainable": part.parameters if part else None,
            "architecture": model.architecture,
            "source": model.source,
        },
        "memory": [_entry(term) | {"moment": term.moment} for term in memory],
        "memory_total_bytes": at_least(memory) if memory else None,
        "left_out": _left_out(resolved.config, model, hardware, bool(memory)),
        "disk": [_entry(term) for term in disk],
        "disk_total_bytes": at_least(disk) if disk else None,
        "disk_free_bytes": hardware.disk_free_bytes,
        "steps": {
            "rows": rows,
            "total_steps": resolved.total_steps,
            "global_batch_size": train.global_batch_size,
            "per_device_train_batch_size": train.per_device_train_batch_size,
            "gradient_accumulation_steps": resolved.gradient_accumulation_steps,
        },
        "does_not_fit": _does_not_fit(memory, disk, hardware),
    }


def _entry(term: Term) -> dict[str, Any]:
    return {"term": term.term, "bytes": term.bytes, "why": term.why}


def _left_out(config: Config, model: ModelFacts, hardware: HardwareFacts, known: bool) -> list[str]:
    left_out = [*(() if activations_known(config, model) else ACTIVATIONS_LEFT_OUT), *LEFT_OUT]
    if not known:
        left_out.insert(0, f"all memory and disk terms: the size of {model.name} is not known on this machine")
    if model.source == "gguf" and model.path is None and model.weight_bytes:
        left_out.append(
            f"the conversion of the GGUF file, once, into SureFit's cache: {bytes_text(model.weight_bytes)}"
        )
    if model.source in ("catalogue", "hub") and model.weight_bytes:
        left_out.append(f"the download of the base model into the Hugging Face cache, {bytes_text(model.weight_bytes)}")
    if hardware.gpu_count > (count := processes(config)):
        idle = plural(hardware.gpu_count - count, "other GPU")
        left_out.append(f"{idle} of this machine: --gpus {hardware.gpu_count} takes all")
    return left_out


def _does_not_fit(memory: list[Term], disk: list[Term], hardware: HardwareFacts) -> list[str]:
    problems = []
    if hardware.memory_bytes is not None and at_least(memory) > hardware.memory_bytes:
        problems.append(
            f"memory: at least {bytes_text(at_least(memory))} are needed, "
            f"and {hardware.name} has {bytes_text(hardware.memory_bytes)}"
        )
    if hardware.source == "detected" and at_least(disk) > hardware.disk_free_bytes:
        problems.append(
            f"disk: {bytes_text(at_least(disk))} are written, and {bytes_text(hardware.disk_free_bytes)} are free"
        )
    return problems
