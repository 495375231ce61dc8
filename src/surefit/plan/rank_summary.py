"""The entry `ranks` of a plan for several processes: the rank simulated, the division of the run, the communication.
Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from surefit.config.modes import GROUPED, MODES
from surefit.config.resolve import ResolvedConfig, with_decisions
from surefit.core.units import plural
from surefit.facts.hardware import HardwareFacts
from surefit.facts.memory_per_rank import fullest_stage
from surefit.facts.model import ModelFacts
from surefit.facts.sharding import ShardingLayout, model_state_bytes, pipeline_stages, sharing_of
from surefit.facts.tensors import LLAMA_LIKE
from surefit.plan.communication import estimate_step_communication

DEEP_PIPELINE = 8
"""Largest number of layers of a pipeline that is simulated: its stages are not alike, so none can be repeated."""


def as_single_process(resolved: ResolvedConfig) -> ResolvedConfig:
    """Return the same run in one process."""
    if sharing_of(resolved.config) is None:
        return resolved
    changes = {"hardware.count": 1, "hardware.nodes": 1, "parallel.mode": "single", "parallel.dp_replicate": 1}
    changes |= {f"parallel.{name}": 1 for name in GROUPED}
    return replace(resolved, config=with_decisions(resolved.config, changes))


def simulation_obstacle(sharing: ShardingLayout, model: ModelFacts) -> str | None:
    """Return why a shared step is calculated; None where its engine runs on tensors without data."""
    if MODES[sharing.mode].deepspeed:
        return "DeepSpeed reads the values of its tensors, so it cannot run without data"
    if sharing.mode == "pp" and model.num_layers > DEEP_PIPELINE:
        return f"the stages of a pipeline of {model.num_layers} layers differ"
    if sharing.offload and sharing.mode == "fsdp":
        return "the simulation cannot separate shards in host memory from shards on the GPU"
    return None


def summarize_ranks(
    resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts, length: int
) -> dict[str, Any] | None:
    """Return the entry `ranks` of plan.json; None for one process.

    Args:
        length: tokens of the rows that time is planned for.
    """
    sharing = sharing_of(resolved.config)
    if sharing is None:
        return None
    communication = estimate_step_communication(resolved, model, hardware, length)
    rank = 0
    shared_tokens = f", and {MODES['cp'].holds}" if sharing.mode == "fsdp" and sharing.tokens > 1 else ""
    if sharing.mode == "pp" and model.architecture in LLAMA_LIKE:
        rank = fullest_stage(resolved, model)
    document: dict[str, Any] = {
        "mode": sharing.mode,
        "processes": sharing.processes,
        "share": MODES[sharing.mode].holds + shared_tokens,
        "rank": rank,
        "which": _describe_simulated_rank(sharing, model, rank),
        "held": None,
        "exchanged_bytes_per_step": communication.bytes if communication else None,
        "exchanged": communication.what if communication else None,
        "exchange_seconds_per_step": communication.seconds if communication else None,
        "link": communication.source if communication else None,
    }
    if model.architecture in LLAMA_LIKE and resolved.config.model.quantization == "none" and model.parameters:
        rank_state = model_state_bytes(resolved, model, sharing, rank)
        document["held"] = {
            "parameters_bytes": rank_state.parameters, "gradients_bytes": rank_state.gradients,
            "optimizer_bytes": rank_state.optimizer,
        }  # fmt: skip
    return document


def _describe_simulated_rank(sharing: ShardingLayout, model: ModelFacts, rank: int) -> str:
    if sharing.mode == "pp" and model.architecture in LLAMA_LIKE:
        layers = pipeline_stages(model, sharing.size)[rank]
        return f"rank {rank}, the stage with most memory: {plural(len(layers), 'layer')}, {layers[0]} to {layers[-1]}"
    return "rank 0; the others need the same, or a few bytes less"
