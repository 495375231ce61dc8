"""Parallel layout of a run, and the bytes of weights, gradients and optimizer state that each process holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from surefit.config.modes import MODES
from surefit.config.optimizers import OPTIMIZERS
from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import SureFitConfig
from surefit.config.world import count_processes
from surefit.core.errors import ConfigError
from surefit.facts.activations import FLOAT32
from surefit.facts.model import DTYPE_BYTES, ModelFacts
from surefit.facts.tensors import ParameterSpec, list_parameters

BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
BY_INPUTS = ("o_proj", "down_proj")
"""The layers that transformers' tensor-parallel plans for `activations.LLAMA_LIKE` cut, by outputs and by inputs."""
FIELD = "parallel.pp"


@dataclass(frozen=True)
class ShardingLayout:
    """The parallel layout of a run's processes.

    Attributes:
        mode: `parallel.mode`, decided.
        processes: number of all processes.
        size: number that share one copy of the model's weights, of an example's tokens, or of its layers.
        offload: `parallel.offload`.
        rank: rank of the process that is meant.
        each: processes on one machine.
        tokens: processes that share an example's tokens, under fsdp too.
    """

    mode: str
    processes: int
    size: int
    offload: bool = False
    rank: int = 0
    each: int = 1
    tokens: int = 1

    @property
    def data_ranks(self) -> int:
        """Number of groups that each process a part of the global batch."""
        return self.processes // (self.size if MODES[self.mode].grouped else self.tokens)


def sharing_obstacle(config: SureFitConfig, model: ModelFacts) -> tuple[str, str] | None:
    """Return why processes cannot share this model as the config says: the setting, and the reason as a clause."""
    parallel = config.parallel
    if parallel.tp > 1:
        widths = {
            "attention heads": model.num_attention_heads,
            "key heads": model.num_key_value_heads,
            "rows in its MLPs": model.intermediate_size or 0,
        }
        uneven = next(((name, count) for name, count in widths.items() if count % parallel.tp), None)
        if uneven:
            return "parallel.tp", f"it has {uneven[1]} {uneven[0]}, not divisible by {parallel.tp} processes"
    if parallel.pp > model.num_layers:
        return "parallel.pp", f"it has {model.num_layers} layers, and {parallel.pp} stages need one each"
    if parallel.cp > 1 and model.packing_obstacle:
        return "parallel.cp", f"its tokens cannot be divided: {model.packing_obstacle}"
    for field in ("pp", "cp") if model.router_loss else ():
        if getattr(parallel, field) > 1:
            return f"parallel.{field}", (
                "its config.json turns on the routers' loss (output_router_logits), which covers all layers and tokens"
            )
    return None


def sharing_of(config: SureFitConfig) -> ShardingLayout | None:
    """Return the layout of a decided config; None for one process, and where the mode is not decided."""
    count, parallel = count_processes(config), config.parallel
    if parallel.mode in ("auto", "single") or (count == 1 and not MODES[parallel.mode].deepspeed):
        return None
    grouped = MODES[parallel.mode].grouped
    size = getattr(parallel, parallel.mode) if grouped else max(1, count // parallel.dp_replicate)
    per_machine = config.hardware.count if isinstance(config.hardware.count, int) else count
    return ShardingLayout(parallel.mode, count, size, parallel.offload, each=per_machine, tokens=parallel.cp)


@dataclass(frozen=True)
class ModelStateBytes:
    """Bytes of one process that do not depend on the data: parameters (frozen and trained), gradients, float32
    masters and AdamW's moments."""

    parameters: int
    gradients: int
    masters: int
    moments: int

    @property
    def optimizer(self) -> int:
        return self.masters + self.moments


def model_state_bytes(
    resolved: ResolvedConfig, model: ModelFacts, sharing: ShardingLayout | None, rank: int = 0
) -> ModelStateBytes:
    """Return the bytes of weights, gradients and AdamW's state that one process holds, without quantized weights.

    Args:
        resolved: the config without "auto"; `adamw`.
        model: its architecture is one of `activations.LLAMA_LIKE`.
        sharing: None for one process.
        rank: rank of the process among the `size` that share.
    """
    number = DTYPE_BYTES[resolved.config.model.dtype]
    moments = FLOAT32 * len(OPTIMIZERS[resolved.config.train.optim].state)
    local_counts = list(
        local_parameter_counts(list(list_parameters(model, resolved.config.adapter)), model, sharing, rank)
    )
    frozen = sum(count for count, tensor in local_counts if not tensor.trained)
    trained = sum(count for count, tensor in local_counts if tensor.trained)
    if sharing is not None and MODES[sharing.mode].deepspeed:
        return _zero_held(local_counts, sharing, number, moments)
    master = FLOAT32 * trained if number != FLOAT32 else 0
    return ModelStateBytes(number * (frozen + trained), number * trained, master, moments * trained)


def _zero_held(
    mine: Sequence[tuple[int, ParameterSpec]], sharing: ShardingLayout, number: int, moments: int
) -> ModelStateBytes:
    """Return DeepSpeed's bytes: masters even for float32, and gradients in float32. Stage 2 pads parameter groups,
    stage 3 pads tensors."""
    size = sharing.processes
    if MODES[sharing.mode].divided == "optimizer state":
        groups = [sum(count for count, tensor in mine if tensor.trained and tensor.decayed == kind) for kind in (0, 1)]
        filled = sum(-(-group // (2 * size)) * 2 * size for group in groups)
        share = filled // size
        parameters = number * (sum(count for count, tensor in mine if not tensor.trained) + filled)
    else:
        share = sum(count for count, tensor in mine if tensor.trained)
        parameters = number * sum(count for count, _ in mine)
    return ModelStateBytes(parameters, FLOAT32 * share, FLOAT32 * share, moments * share)


def local_parameter_counts(
    every: Sequence[ParameterSpec], model: ModelFacts, sharing: ShardingLayout | None, rank: int
) -> Iterator[tuple[int, ParameterSpec]]:
    """Yield (numbers that this process holds, the tensor)."""
    mode = sharing.mode if sharing else "single"
    size = sharing.size if sharing else 1
    stage = None
    if mode == "pp":
        stage = pipeline_stages(model, size)[rank]
    for tensor in every:
        numbers, rows = math.prod(tensor.shape), tensor.shape[0]
        if mode == "fsdp":
            # A process after the last full shard has the remainder, or nothing.
            piece = -(-rows // size)
            yield max(0, min(piece, rows - rank * piece)) * (numbers // rows), tensor
        elif MODES[mode].deepspeed and MODES[mode].divided == "weights":
            yield -(-numbers // size), tensor
        elif mode == "tp":
            yield numbers // size if _cut(tensor.name, model) else numbers, tensor
        elif mode == "pp":
            assert stage is not None
            yield numbers if is_here(tensor.name, model, stage, rank, size) else 0, tensor
        else:
            yield numbers, tensor


def _cut(name: str, model: ModelFacts) -> bool:
    """Return whether tensor parallelism cuts this tensor; of LoRA factors, it cuts B beside a layer cut by its outputs,
    else A."""
    parts = name.split(".")
    if any(part in BY_OUTPUTS for part in parts):
        return "lora_A" not in parts and not (parts[-2] == "lm_head" and model.tied_embeddings)
    return any(part in BY_INPUTS for part in parts) and "lora_B" not in parts and parts[-1] != "bias"


def is_here(name: str, model: ModelFacts, layers: range, rank: int, size: int) -> bool:
    parts = name.split(".")
    if "layers" in parts:
        return int(parts[parts.index("layers") + 1]) in layers
    last = rank == size - 1
    if "embed_tokens" in parts:
        return rank == 0 or (last and model.tied_embeddings)
    return last


def pipeline_stages(model: ModelFacts, size: int) -> list[range]:
    """Return the layers of each pipeline stage, balanced by parameters as in `parallel/pipeline_parallel.py`."""
    layer = dict.fromkeys(range(model.num_layers), 0)
    outside = {"embed": 0, "end": 0}
    for tensor in list_parameters(model, None):
        parts = tensor.name.split(".")
        if "layers" in parts:
            layer[int(parts[parts.index("layers") + 1])] += math.prod(tensor.shape)
        else:
            outside["embed" if "embed_tokens" in parts else "end"] += math.prod(tensor.shape)
    costs = [layer[number] for number in sorted(layer)]
    costs[0] += outside["embed"]
    costs[-1] += outside["end"] + (outside["embed"] if model.tied_embeddings else 0)
    return split_layers(costs, size)


def split_layers(costs: Sequence[int], stages: int) -> list[range]:
    """Return consecutive layers for each stage, so that the most expensive stage is as cheap as possible.

    >>> split_layers([5, 1, 1, 1, 1, 3], 2)
    [range(0, 2), range(2, 6)]

    Raises:
        ConfigError: fewer layers than stages.
    """
    if len(costs) < stages:
        raise ConfigError(
            f"the model has {len(costs)} layers, too few for {stages} stages",
            code="E2095",
            field=FIELD,
            help=f"set parallel.pp to {len(costs)} or less",
        )
    # best[n]: (the most expensive stage, where the stages begin) of the first n layers, in as many stages as so far.
    best: dict[int, tuple[int, tuple[int, ...]]] = {n: (sum(costs[:n]), (0,)) for n in range(1, len(costs) + 1)}
    for stage in range(2, stages + 1):
        best = {
            n: min(
                (max(best[cut][0], sum(costs[cut:n])), (*best[cut][1], cut)) for cut in range(stage - 1, n)
            )
            for n in range(stage, len(costs) + 1)
        }  # fmt: skip
    return [range(a, b) for a, b in pairwise((*best[len(costs)][1], len(costs)))]
