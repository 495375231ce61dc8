"""The communication between the processes of a run in a step, and its effect on the step's time. Torch-free.

Bytes are those that one GPU sends and receives in each direction, by the usual ring: for a tensor of S bytes among N,
an all-gather or a reduce-scatter moves (N - 1) / N × S, an all-reduce twice that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from surefit.config.modes import MODES
from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import decided
from surefit.config.world import examples_per_data_rank
from surefit.facts.activations import FLOAT32
from surefit.facts.hardware import HardwareFacts
from surefit.facts.interconnect import NETWORK, REACHED, link_of
from surefit.facts.model import DTYPE_BYTES, ModelFacts
from surefit.facts.sharding import ShardingLayout, pipeline_stages, sharing_of
from surefit.facts.step_shape import usual_shape
from surefit.facts.tensors import list_parameters

if TYPE_CHECKING:
    from surefit.plan.time import StepTime


@dataclass(frozen=True)
class StepCommunication:
    """Bytes that one GPU sends and receives in an optimizer step.

    Attributes:
        bytes: bytes in each direction.
        what: the contents, in words.
        bandwidth: bytes per second that are reached; None where the link is not known.
        source: origin of the bandwidth.
        across: the bytes that go between machines, where the others stay inside.
        waited: the bytes during which nothing is computed; none of them in `across`.
    """

    bytes: int
    what: str
    bandwidth: float | None
    source: str
    across: int = 0
    waited: int = 0

    @property
    def seconds(self) -> float | None:
        if not self.bandwidth:
            return None
        return (self.bytes - self.across) / self.bandwidth + self.across / (REACHED * NETWORK)

    @property
    def waited_seconds(self) -> float:
        return self.waited / self.bandwidth if self.bandwidth else 0.0


def estimate_step_communication(
    resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts, length: int
) -> StepCommunication | None:
    """Return the communication of a step; None for one process, and where the model's layers are not known.

    Args:
        length: tokens of every example.
    """
    sharing = sharing_of(resolved.config)
    if sharing is None or sharing.processes == 1 or model.parameters is None or not model.linear_modules:
        return None
    size, contents = _communication_bytes(resolved, model, sharing, length)
    key_values = 0
    if sharing.mode == "fsdp" and sharing.tokens > 1:
        key_values, contents = (
            _key_value_bytes(resolved, model, sharing, length),
            f"{contents}; keys and values of every layer",
        )
        size += key_values
    inside, link = sharing.size <= sharing.each, link_of(hardware.name)
    across = _replica_gradient_bytes(resolved, model, sharing, length) if sharing.processes > sharing.each else 0
    if link is None and inside:
        return StepCommunication(
            size, contents, None, "the speed of the link between these devices is unknown", waited=key_values
        )
    if inside:
        assert link is not None
        return StepCommunication(size + across, contents, REACHED * link.bandwidth, link.source, across, key_values)
    if key_values and link and sharing.tokens <= sharing.each:
        return StepCommunication(size, contents, REACHED * link.bandwidth, link.source, size - key_values, key_values)
    return StepCommunication(
        size, contents, REACHED * NETWORK, "200 Gb/s per GPU between machines, assumed", waited=key_values
    )


def _communication_bytes(
    resolved: ResolvedConfig, model: ModelFacts, sharing: ShardingLayout, length: int
) -> tuple[int, str]:
    config, count = resolved.config, sharing.size
    number = DTYPE_BYTES[config.model.dtype]
    parameters = list(list_parameters(model, config.adapter))
    trained = sum(math.prod(tensor.shape) for tensor in parameters if tensor.trained)
    total = sum(math.prod(tensor.shape) for tensor in parameters)
    shape = usual_shape(resolved, length)
    micro, tokens = shape.micro_batches, shape.tokens
    all_ranks_share, share = (sharing.processes - 1) / sharing.processes, (count - 1) / count
    # The recomputed forward pass gathers and sums again.
    passes = 3 if config.train.gradient_checkpointing else 2
    state = number * model.hidden_size * tokens
    groups = sharing.processes // count
    between_groups = 2 * (groups - 1) / groups * number * trained / count
    gradients_note = ", and gradients between the groups" if groups > 1 else ""
    match sharing.mode:
        case "ddp":
            return round(2 * all_ranks_share * number * trained), "all-reduce of the gradients"
        case "fsdp":
            micro_batch_bytes = 2 * share * number * total + share * FLOAT32 * trained
            return round(
                micro * micro_batch_bytes
            ), "two all-gathers of the weights and a reduction of the gradients per micro batch"
        case "zero2":
            return round(
                all_ranks_share * number * trained * (2 * micro + 1)
            ), "gradients of each micro batch, and the updated weights"
        case "zero3":
            micro_batch_bytes = 2 * all_ranks_share * number * total + 2 * all_ranks_share * number * trained
            return round(
                micro * micro_batch_bytes
            ), "two all-gathers of the weights and a reduction of the gradients per micro batch"
        case "tp":
            hidden_state_bytes = micro * 2 * share * 2 * model.num_layers * passes * state
            return round(
                hidden_state_bytes + between_groups
            ), f"two hidden states per layer in each direction{gradients_note}"
        case "cp":
            key_value_bytes = _key_value_bytes(resolved, model, sharing, length)
            return round(
                key_value_bytes + 2 * all_ranks_share * number * trained
            ), "keys and values of every layer, and all gradients"
        case "pp":
            return round(2 * micro * state + between_groups), f"hidden states and their gradients{gradients_note}"
    raise AssertionError(f"no communication model for {sharing.mode}")


def _key_value_bytes(resolved: ResolvedConfig, model: ModelFacts, sharing: ShardingLayout, length: int) -> int:
    """Return the bytes of keys and values between the processes that share the tokens of an example: forward,
    recomputed, and their gradients back."""
    config, shape = resolved.config, usual_shape(resolved, length)
    passes = 3 if config.train.gradient_checkpointing else 2
    share = (sharing.tokens - 1) / sharing.tokens
    keys = 2 * DTYPE_BYTES[config.model.dtype] * model.num_key_value_heads * model.head_dim * shape.tokens
    return round(shape.micro_batches * passes * model.num_layers * share * keys)


def _replica_gradient_bytes(resolved: ResolvedConfig, model: ModelFacts, sharing: ShardingLayout, length: int) -> int:
    """Return the bytes of gradient sums between machines that each hold a replica of the model."""
    replicas = sharing.processes // sharing.size
    if replicas == 1 or sharing.mode != "fsdp":
        return 0
    trained = sum(
        math.prod(tensor.shape) for tensor in list_parameters(model, resolved.config.adapter) if tensor.trained
    )
    micro = usual_shape(resolved, length).micro_batches
    return round(micro * 2 * (replicas - 1) / replicas * FLOAT32 * trained / sharing.size)


def distributed_step_time(
    step: StepTime, resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts, length: int
) -> StepTime:
    """Return the time of a step that several processes share, from the time of one process with everything.

    The arithmetic is divided; where micro batches do not divide evenly, some processes wait; a pipeline waits at its
    ends. In the expected time, communication that a mode overlaps with computation (`Mode.overlaps`) hides behind the
    arithmetic, but for the keys and values of shared tokens; at most, nothing hides and only half the rate is reached;
    at least, everything hides.
    """
    sharing = sharing_of(resolved.config)
    if sharing is None or sharing.processes == 1:
        return step
    time_share = _slowest(resolved, model, sharing, length) / sharing.processes
    communication = estimate_step_communication(resolved, model, hardware, length)
    transfer_seconds = (communication.seconds if communication else None) or 0.0
    computed = step.seconds * time_share
    waiting = transfer_seconds
    if communication is not None and MODES[sharing.mode].overlaps:
        waiting = communication.waited_seconds + max(0.0, transfer_seconds - communication.waited_seconds - computed)
    seconds = computed + waiting
    return replace(
        step,
        seconds=seconds,
        low=step.low * time_share,
        high=step.high * time_share + 2 * transfer_seconds,
        mfu=step.mfu * step.seconds / (sharing.processes * seconds),
        tokens_per_second=step.tokens_per_second * step.seconds / seconds,
        evaluation_tokens_per_second=step.evaluation_tokens_per_second / time_share,
        limit="exchange between GPUs" if waiting > computed else step.limit,
    )


def _slowest(resolved: ResolvedConfig, model: ModelFacts, sharing: ShardingLayout, length: int) -> float:
    """Return how much longer the slowest process works than the mean, as a ratio."""
    config = resolved.config
    rows = usual_shape(resolved, length).rows
    micro_batches = decided(config.train.global_batch_size) / rows
    groups = sharing.data_ranks
    # With packing, processes share whole examples, not micro batches.
    most_examples = (
        rows * math.ceil(math.ceil(micro_batches) / groups)
        if config.data.packing is not True
        else examples_per_data_rank(config)
    )
    uneven = most_examples * groups / decided(config.train.global_batch_size) if groups > 1 else 1.0
    if sharing.mode != "pp":
        return uneven
    stages = pipeline_stages(model, sharing.size)
    waiting = (micro_batches + sharing.size - 1) / micro_batches
    return waiting * max(map(len, stages)) * sharing.size / model.num_layers
