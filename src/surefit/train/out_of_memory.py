"""When memory runs out: what took it, and which setting needs less and learns the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from surefit.config.resolve import Resolved, one_line_yaml
from surefit.config.schema import Config
from surefit.config.spread import accumulation, processes
from surefit.core.errors import MachineError
from surefit.core.units import bytes_text, plural
from surefit.facts.model import ModelFacts
from surefit.facts.ranks import memory_terms, peak_bytes

CPU_TEXTS = ("can't allocate memory", "not enough memory", "std::bad_alloc", "Cannot allocate memory")
"""What torch's CPU allocator, its libraries and the operating system say in errors that have no class of their own."""


class OutOfMemory(MachineError):
    """Memory ran out while training.

    Attributes:
        changes: dotted key → value: the next configuration to try, which learns the same; empty where there is none.
    """

    changes: dict[str, Any]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of the GPU or the machine is used up."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(text in str(error) for text in CPU_TEXTS)


@contextlib.contextmanager
def explained(when: str, config: Config, model: ModelFacts | None, kind: str, longest: int) -> Iterator[None]:
    """Turn what says that memory ran out into an error that says why, and what to do.

    Args:
        when: such as "in step 3".
        config: nothing in it is "auto".
        model: facts about the base model, for the sum of what it needs; None: without.
        kind: of the device, cpu or cuda.
        longest: tokens of the longest row.

    Raises:
        OutOfMemory: with the next configuration.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise _explanation(when, config, model, kind, longest) from error


def next_rung(config: Config, kind: str) -> dict[str, Any]:
    """The next configuration that needs less memory and learns the same, as dotted key → value; empty at the end.

    The global batch stays as it is. What costs little time comes first: smaller micro batches, then recomputing all but
    the attention, then all, then loss and MLP in parts, then activations in the host's memory.
    """
    train, speed = config.train, config.speed
    micro, whole = train.per_device_train_batch_size, train.global_batch_size
    assert isinstance(micro, int)
    if micro > 1:
        return {"train.per_device_train_batch_size": max(d for d in range(1, micro // 2 + 1) if whole % d == 0)}
    if train.gradient_checkpointing in (False, "selective"):
        return {"train.gradient_checkpointing": "selective" if train.gradient_checkpointing is False else True}
    parts = {"speed.chunked_loss": speed.chunked_loss, "speed.tiled_mlp": speed.tiled_mlp}
    if off := {key: True for key, on in parts.items() if not on}:
        return off
    if train.gradient_checkpointing is True and kind == "cuda":
        return {"train.gradient_checkpointing": "offload"}
    return {}


def as_arguments(changes: dict[str, Any]) -> str:
    """Changes as the command line takes them.

    >>> as_arguments({"train.gradient_checkpointing": True, "speed.chunked_loss": True})
    '--set train.gradient_checkpointing=true --set speed.chunked_loss=true'
    """
    return " ".join(f"--set {key}={one_line_yaml(value)}" for key, value in changes.items())


def _explanation(when: str, config: Config, model: ModelFacts | None, kind: str, longest: int) -> OutOfMemory:
    micro = config.train.per_device_train_batch_size
    assert isinstance(micro, int)
    changes = next_rung(config, kind)
    learning = ", ".join(_what_changes_learning(config))
    advice = f"what is left changes what is learnt: {learning}, or a smaller model"
    if changes:
        by_itself = "; --adapt does it by itself" if processes(config) == 1 else ""
        advice = f"try {as_arguments(changes)} (the same is learnt{by_itself}), with --resume if steps "
        advice += f"were taken; {learning} also need less, but change what is learnt"
    error = OutOfMemory(
        f"the {'GPU' if kind == 'cuda' else 'machine'}'s memory ran out {when}, with micro batches of "
        f"{plural(micro, 'row')} of up to {longest:,} tokens{_largest(config, model, longest) if model else ''}",
        field=next(iter(changes), None),
        help=advice,
    )
    error.changes = changes
    return error


def _largest(config: Config, model: ModelFacts, longest: int) -> str:
    """The largest term of the closed form, as a clause; nothing where it knows none."""
    resolved = Resolved(config, {}, accumulation(config), None)
    budget = peak_bytes(resolved, model, longest)
    terms = budget.terms if budget else memory_terms(resolved, model)
    if not terms:
        return ""
    largest = max(terms, key=lambda term: term.bytes)
    return f"; the largest part is {largest.term}, {bytes_text(largest.bytes)} ({largest.why})"


def _what_changes_learning(config: Config) -> list[str]:
    """Settings that need less memory and are not set yet, as command line arguments."""
    shorter = as_arguments({"data.max_length": config.data.max_length // 2})
    if config.adapter.kind == "full":
        smaller = "--set train.optimizer=adamw_8bit" if config.train.optimizer == "adamw" else "--set adapter.kind=lora"
        return [shorter, smaller]
    return [shorter, *(["--set model.quantization=nf4"] if config.model.quantization == "none" else [])]
