"""Reaction to out-of-memory errors: the next configuration that needs less memory and learns the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from surefit.config.memory import CHECKPOINTING, MICRO, RECOMPUTED, TILED
from surefit.config.resolve import ResolvedConfig, ValueOrigin, lookup, one_line_yaml, with_decisions
from surefit.config.schema import SureFitConfig
from surefit.config.world import count_accumulation_steps

ADAPTED = ValueOrigin("auto", "adapted after out of memory")
"""Origin of the values that `with_oom_changes` sets."""


def next_rung(config: SureFitConfig, kind: str) -> dict[str, Any]:
    """Return the next configuration that needs less memory and learns the same, as dotted key → value; empty at the
    end.

    The global batch stays as it is. The cheapest change in time comes first: smaller micro batches, then recomputing
    all but the attention, then all, then loss and MLP in chunks, then activations in host memory.

    Args:
        config: a config without "auto".
        kind: device type, cpu or cuda.
    """
    train, speed = config.train, config.speed
    micro, batch_size = train.per_device_train_batch_size, train.global_batch_size
    assert isinstance(micro, int)
    if micro > 1:
        return {MICRO: max(d for d in range(1, micro // 2 + 1) if batch_size % d == 0)}
    recomputed = RECOMPUTED.index(train.gradient_checkpointing)
    if recomputed < RECOMPUTED.index(True):
        return {CHECKPOINTING: RECOMPUTED[recomputed + 1]}
    parts = {"speed.chunked_loss": speed.chunked_loss, TILED: speed.tiled_mlp}
    if disabled := {key: True for key, on in parts.items() if not on}:
        return disabled
    if train.gradient_checkpointing is True and kind == "cuda":
        return {CHECKPOINTING: "offload"}
    return {}


def lowest_rung(config: SureFitConfig, kind: str) -> dict[str, Any]:
    """Return all changes that `next_rung` would make, one after the other, as dotted key → value; empty at the end."""
    changes: dict[str, Any] = {}
    while step_changes := next_rung(with_decisions(config, changes), kind):
        changes |= step_changes
    return changes


def with_oom_changes(resolved: ResolvedConfig, changes: Mapping[str, Any]) -> ResolvedConfig:
    """Return the resolved config with other values, by dotted key, because memory ran out."""
    config = with_decisions(resolved.config, changes)
    provenance = resolved.provenance | dict.fromkeys(changes, ADAPTED)
    return replace(
        resolved, config=config, provenance=provenance, gradient_accumulation_steps=count_accumulation_steps(config)
    )


def oom_changes(resolved: ResolvedConfig) -> dict[str, Any]:
    """Return the values that `with_oom_changes` has changed, as dotted key → value."""
    return {
        dotted: lookup(resolved.config, dotted) for dotted, origin in resolved.provenance.items() if origin == ADAPTED
    }


def as_arguments(changes: Mapping[str, Any]) -> str:
    """Format changes as command-line arguments.

    >>> as_arguments({"train.gradient_checkpointing": True, "speed.chunked_loss": True})
    '--set train.gradient_checkpointing=true --set speed.chunked_loss=true'
    """
    return " ".join(f"--set {key}={one_line_yaml(value)}" for key, value in changes.items())
