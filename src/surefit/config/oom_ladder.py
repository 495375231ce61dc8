"""Where memory runs out: the next configuration, which needs less of it and learns the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from surefit.config.memory import CHECKPOINTING, MICRO, RECOMPUTED, TILED
from surefit.config.resolve import ResolvedConfig, ValueOrigin, lookup, one_line_yaml, with_changes
from surefit.config.schema import Config
from surefit.config.world import count_accumulation_steps

ADAPTED = ValueOrigin("auto", "adapted after out of memory")
"""Where the values come from that `with_oom_changes` has set."""


def next_rung(config: Config, kind: str) -> dict[str, Any]:
    """The next configuration that needs less memory and learns the same, as dotted key → value; empty at the end.

    The global batch stays as it is. What costs little time comes first: smaller micro batches, then recomputing all but
    the attention, then all, then loss and MLP in parts, then activations in the host's memory.

    Args:
        config: nothing in it is "auto".
        kind: of the device, cpu or cuda.
    """
    train, speed = config.train, config.speed
    micro, whole = train.per_device_train_batch_size, train.global_batch_size
    assert isinstance(micro, int)
    if micro > 1:
        return {MICRO: max(d for d in range(1, micro // 2 + 1) if whole % d == 0)}
    recomputed = RECOMPUTED.index(train.gradient_checkpointing)
    if recomputed < RECOMPUTED.index(True):
        return {CHECKPOINTING: RECOMPUTED[recomputed + 1]}
    parts = {"speed.chunked_loss": speed.chunked_loss, TILED: speed.tiled_mlp}
    if off := {key: True for key, on in parts.items() if not on}:
        return off
    if train.gradient_checkpointing is True and kind == "cuda":
        return {CHECKPOINTING: "offload"}
    return {}


def lowest_rung(config: Config, kind: str) -> dict[str, Any]:
    """All that `next_rung` would change, one after the other, as dotted key → value; empty at the end."""
    changes: dict[str, Any] = {}
    while further := next_rung(with_changes(config, changes), kind):
        changes |= further
    return changes


def with_oom_changes(resolved: ResolvedConfig, changes: Mapping[str, Any]) -> ResolvedConfig:
    """The same run with other values, by dotted key, because its memory ran out."""
    config = with_changes(resolved.config, changes)
    provenance = resolved.provenance | dict.fromkeys(changes, ADAPTED)
    return replace(
        resolved, config=config, provenance=provenance, gradient_accumulation_steps=count_accumulation_steps(config)
    )


def oom_changes(resolved: ResolvedConfig) -> dict[str, Any]:
    """What `with_oom_changes` has changed in it, as dotted key → value."""
    return {dotted: lookup(resolved.config, dotted) for dotted, why in resolved.provenance.items() if why == ADAPTED}


def as_arguments(changes: Mapping[str, Any]) -> str:
    """Changes as the command line takes them.

    >>> as_arguments({"train.gradient_checkpointing": True, "speed.chunked_loss": True})
    '--set train.gradient_checkpointing=true --set speed.chunked_loss=true'
    """
    return " ".join(f"--set {key}={one_line_yaml(value)}" for key, value in changes.items())
