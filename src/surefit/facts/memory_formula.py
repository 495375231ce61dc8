"""The memory formula: bytes that a training step needs, by arithmetic alone, for `check` and the search.

Every term follows from the config and the model's shape, and states its assumption. Activations are known for the
decoders of `facts/activations.py`; for others the sum can show that a run does *not* fit, and never that it does. See
`LEFT_OUT` for what no term covers. Compared with the simulation: docs/plan-method.md, "The closed form".

Worked example, Llama-3.1-8B with LoRA r = 8 on all linear layers, bfloat16, one row of 2,048 tokens: 32 layers × 8 ×
(8,192 + 5,120 + 5,120 + 8,192 + 3 × 18,432) = 20,971,520 factors. Weights 2 × 8,030,261,248 bytes = 14.96 GiB; adapter
2, moments 8 and masters 4 bytes per factor, 0.27 GiB; activations 11.27 GiB, a chunk of the loss and its hidden states
0.64 GiB (both worked out in `facts/activations.py`), cuBLAS 0.02 GiB: 27.15 GiB at the peak, which is the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from surefit.config.optimizers import OPTIMIZERS
from surefit.config.resolve import LOSS_BYTES, ResolvedConfig
from surefit.config.schema import LoraSection, SureFitConfig
from surefit.core.units import count_text
from surefit.facts.activations import (
    AMPERE,
    FLOAT32,
    TOKEN_BYTES,
    MicroBatch,
    attention_kept_bytes,
    cublas_workspace_bytes,
    eval_bytes,
    final_bytes,
    forward_bytes,
    has_closed_form,
    kept_bytes,
    layer_backward_bytes,
    layer_bytes,
    logits_bytes,
    norm_backward_bytes,
    segment_rest,
    shared_tokens,
)
from surefit.facts.all_linear import closed_to_lora, ends_with, is_quantizable, without_gradient
from surefit.facts.experts import factor_shapes, summed_bytes
from surefit.facts.model import DTYPE_BYTES, ModelFacts
from surefit.facts.step_shape import micro_batch_shape
from surefit.facts.vocabulary import row_shapes

MOMENTS = 8
"""Bytes of AdamW's two float32 moments, per trained parameter."""
WORKSPACES = 2
"""Threads that call cuBLAS: the main thread and autograd's."""
NF4_TABLES = 1024 + 512 + 512
"""Bytes of the code tables and the offset of each 4-bit layer, as the allocator rounds them."""
MIN_8BIT, PAGED, EIGHT_BIT_BLOCK = 4_096, 100_000, 256
"""bitsandbytes: smallest number of elements whose moments are in 8 bits; smallest number that is paged; block size of
a scale."""
OUTPUT_HEADS = ("lm_head", "embed_out", "output")
LEFT_OUT = "the allocator's fragmentation, the CUDA context and its libraries"
ACTIVATIONS_LEFT_OUT = (
    "activations, or the part that gradient checkpointing keeps",
    "temporaries of the attention, the MLP and the kernels",
)
"""Also left out where the architecture is not covered."""

Moment = Literal["always", "gather", "loss", "backward", "step"]


@dataclass(frozen=True)
class MemoryTerm:
    """One line of a budget.

    Attributes:
        term: name of the item.
        bytes: size in bytes.
        why: the assumption it follows from.
        moment: when the memory is held: through the whole step, while shards are gathered for the first layer, while
            the loss is computed, in the backward pass, or while the optimizer updates. Disk terms are always held.
    """

    term: str
    bytes: int
    why: str
    moment: Moment = "always"


def fullest_moment_bytes(terms: Iterable[MemoryTerm]) -> int:
    """Return the bytes at the peak: the terms that are always held, and the largest sum of any other moment's terms."""
    by_moment: dict[Moment, int] = dict.fromkeys(get_args(Moment), 0)
    for term in terms:
        by_moment[term.moment] += term.bytes
    return by_moment.pop("always") + max(by_moment.values())


@dataclass(frozen=True)
class TrainableParameters:
    """Parameters that the optimizer updates; `bytes_each` is the size of one parameter in the model."""

    parameters: int
    bytes_each: int

    @property
    def master_bytes(self) -> int:
        """Bytes of the optimizer's float32 copies of parameters that are not float32 in the model."""
        return 0 if self.bytes_each == FLOAT32 else FLOAT32 * self.parameters


def target_modules(model: ModelFacts, adapter: LoraSection) -> dict[str, tuple[int, int]]:
    """Return the linear layers that get LoRA factors: all possible ones (facts/all_linear.py), or the listed ones."""
    kind, linears = model.model_type, [item for item in model.linear_modules.items() if not without_gradient(item[0])]
    if adapter.target_modules == "all-linear":
        return {n: s for n, s in linears if not (n.rpartition(".")[2] in OUTPUT_HEADS or closed_to_lora(kind, n))}
    return {name: shape for name, shape in linears if any(ends_with(name, text) for text in adapter.target_modules)}


def count_trainable_parameters(
    model: ModelFacts, adapter: LoraSection | None, dtype: str
) -> TrainableParameters | None:
    """Count the parameters that will be trained; None where the model's layers are not known.

    LoRA factors, DoRA's magnitudes and the rows of new tokens have the base model's dtype, as `model/adapter.py` makes
    them.
    """
    if adapter is None:
        return None if model.parameters is None else TrainableParameters(model.parameters, DTYPE_BYTES[dtype])
    if not model.linear_modules:
        return None
    targets = target_modules(model, adapter)
    factors = sum(adapter.r * (out + into) for out, into in targets.values())
    factors += sum(
        math.prod(a) + math.prod(b) for _, a, b in factor_shapes(model.expert_stacks, adapter, model.routers)
    )
    magnitudes = sum(out for out, _ in targets.values()) if adapter.use_dora else 0
    rows = sum(map(math.prod, row_shapes(model)))
    return TrainableParameters(factors + magnitudes + rows, DTYPE_BYTES[dtype])


@dataclass(frozen=True)
class StepMemory:
    """The memory of a run on one device, without the CUDA context and the allocator's overhead.

    Attributes:
        terms: terms of a training step; `fullest_moment_bytes` of them is its peak.
        phases: bytes in tensors at the peak of "load", "step" and "eval".
    """

    terms: tuple[MemoryTerm, ...]
    phases: dict[str, int]

    @property
    def allocated(self) -> int:
        return max(self.phases.values())


def peak_bytes_on_one(
    resolved: ResolvedConfig,
    model: ModelFacts,
    length: int | None = None,
    padded: bool | None = None,
    capability: tuple[int, int] | None = AMPERE,
    *,
    in_buckets: bool = False,
    parts: int = 1,
) -> StepMemory | None:
    """Return the closed form for one process; None for a model whose activations it does not cover.

    Args:
        resolved: the config without "auto".
        model: facts about the base model.
        length: tokens of the longest row; `data.max_length` if not given.
        padded: whether rows of one micro batch differ in length; if not given, whether it has more than one.
        capability: compute capability of the GPU, which decides cuBLAS's workspace; None without a GPU.
        in_buckets: each gradient is added to an existing buffer as soon as it is computed.
        parts: number of processes that share the tokens of the micro batch.
    """
    part = count_trainable_parameters(model, resolved.config.adapter, resolved.config.model.dtype)
    if part is None or model.parameters is None or not activations_known(resolved.config, model):
        return None
    batch = shared_tokens(largest_micro_batch(resolved, model, length, padded, capability), parts)
    accumulation = micro_batch_shape(resolved, length).micro_batches
    state_terms = _held(resolved, model, part)
    tokens = TOKEN_BYTES * batch.tokens
    workspace = WORKSPACES * cublas_workspace_bytes(capability)
    terms = (
        *state_terms,
        MemoryTerm("batch", tokens, f"ids, masks or positions, and targets of {batch.tokens:,} tokens"),
        MemoryTerm("workspace", workspace, "cuBLAS's, of the forward and of the backward thread"),
        *_loss_terms(batch),
        _backward_term(batch, part, in_buckets or accumulation > 1),
    )
    load_bytes = sum(term.bytes for term in state_terms if term.term in ("weights", "adapter", "masters"))
    resting_bytes = sum(term.bytes for term in state_terms if term.moment == "always" and term.term != "gradients")
    eval_peak = resting_bytes + tokens + workspace + eval_bytes(batch)
    return StepMemory(terms, {"load": load_bytes, "step": fullest_moment_bytes(terms), "eval": eval_peak})


def largest_micro_batch(
    resolved: ResolvedConfig,
    model: ModelFacts,
    length: int | None = None,
    padded: bool | None = None,
    capability: tuple[int, int] | None = AMPERE,
) -> MicroBatch:
    """Return the largest micro batch of a run, from the arguments of `peak_bytes_on_one`."""
    config, shape = resolved.config, micro_batch_shape(resolved, length)
    adapter, packed, checkpointing = config.adapter, config.data.packing is True, config.train.gradient_checkpointing
    factors = None
    if adapter is not None:
        targets = target_modules(model, adapter).items()
        factors = {name.rpartition(".")[2]: shape for name, shape in targets if name.startswith("model.layers.0.")}
    rows, length = (shape.rows // 2, shape.tokens // (shape.rows // 2)) if shape.shared else (shape.rows, shape.length)
    return MicroBatch(
        model=model,
        dtype=config.model.dtype,
        rows=rows,
        length=length,
        padded=not packed and (shape.rows > 1 if padded is None else padded),
        checkpointing=False if checkpointing == "auto" else checkpointing,
        factors=factors,
        r=adapter.r if adapter and factors else 0,
        dropout=adapter.lora_dropout if adapter and factors else 0.0,
        packed=packed,
        chunked=config.speed.chunked_loss,
        fused=config.speed.fused_lora is True,
        tiled=config.speed.tiled_mlp is True,
        quantization=config.model.quantization,
        capability=capability,
        kernels=config.speed.kernels is True and capability is not None,
        reach=1 + shape.shared / length,  # a prompt that two answers share is read twice
    )


def activations_known(config: SureFitConfig, model: ModelFacts) -> bool:
    """Return whether there is a closed form for a run's activations: none where DoRA makes whole matrices per layer."""
    return has_closed_form(model) and not (config.train.method == "lora" and config.lora.use_dora)


def memory_terms_on_one(
    resolved: ResolvedConfig, model: ModelFacts, capability: tuple[int, int] | None = AMPERE
) -> list[MemoryTerm]:
    """Return the memory terms of a training step on rows of `data.max_length` tokens.

    They include the activations where the closed form covers the architecture, else only what every step needs; empty
    where the model's size is not known.
    """
    budget = peak_bytes_on_one(resolved, model, capability=capability)
    if budget is not None:
        return list(budget.terms)
    part = count_trainable_parameters(model, resolved.config.adapter, resolved.config.model.dtype)
    if model.parameters is None or part is None:
        return []
    batch = largest_micro_batch(resolved, model)
    terms = [*_held(resolved, model, part), MemoryTerm("logits", *_logits(batch), "loss")]
    if resolved.config.lora.experts:
        expert_bytes = summed_bytes(model.expert_stacks, batch.number, bool(batch.checkpointing))
        terms.append(
            MemoryTerm(
                "experts", expert_bytes, "their weights with the factors added, and a gradient of these", "backward"
            )
        )
    return terms


def _held(resolved: ResolvedConfig, model: ModelFacts, part: TrainableParameters) -> list[MemoryTerm]:
    """Return the terms of the weights and their update, which do not depend on the data."""
    config = resolved.config
    dtype, n = config.model.dtype, count_text(part.parameters)
    assert model.parameters is not None
    terms = [_weights_term(resolved, model)]
    if config.train.method == "lora":
        terms.append(
            MemoryTerm("adapter", part.parameters * part.bytes_each, f"{n} LoRA factors, in {dtype} like the base")
        )
    terms += _update_terms(resolved, model, part, n)
    slack = _slack_bytes(model, DTYPE_BYTES[dtype]) if config.model.quantization == "none" else 0
    if config.train.method == "full":
        slack += (3 if part.master_bytes else 2) * _slack_bytes(model, FLOAT32)
    if slack:
        terms.append(
            MemoryTerm("rest of segments", slack, "the allocator splits its 2 MiB pages into parts of at least 1 MiB")
        )
    return terms


def _weights_term(resolved: ResolvedConfig, model: ModelFacts) -> MemoryTerm:
    """Return the term of the weights, with all linear layers but the head quantized where the config says so.

    NF4: 4 bits, a scale of 8 bits per 64 weights, and one of 32 bits per 256 of those. FP8: 8 bits, and a scale of 32
    bits per output. Llama-3.1-8B in NF4: 6,979,321,856 weights × 4.127 bits and 1,050,939,392 others × 2 bytes are
    5.31 GiB.
    """
    dtype, kind = resolved.config.model.dtype, resolved.config.model.quantization
    assert model.parameters is not None
    if kind == "none":
        why = f"{count_text(model.parameters)} parameters in {dtype}"
        return MemoryTerm("weights", model.parameters * DTYPE_BYTES[dtype], why)
    layers = [item for item in model.linear_modules.items() if item[0].rpartition(".")[2] not in OUTPUT_HEADS]
    shapes = [shape for name, shape in layers if is_quantizable(name)]
    numbers = sum(out * into for out, into in shapes)
    if kind == "nf4":
        scales = [out * into // 64 for out, into in shapes]
        stored = numbers // 2 + sum(scales) + sum(FLOAT32 * (scale // 256) + NF4_TABLES for scale in scales)
    else:
        stored = sum(out * into + FLOAT32 * out for out, into in shapes)
    other_bytes = DTYPE_BYTES[dtype] * (model.parameters - numbers)
    why = f"{count_text(numbers)} weights in {kind}, {count_text(model.parameters - numbers)} others in {dtype}"
    return MemoryTerm("weights", stored + other_bytes, why)


def _slack_bytes(model: ModelFacts, number: int) -> int:
    """Return the bytes that the allocator adds to a model's matrices, `number` bytes per entry (`segment_rest`).

    Qwen3-4B's MLP in bfloat16: 2 × 2,560 × 9,728 bytes are 47.5 MiB, which occupy 48; 54 MiB in 108 of them.
    """
    shapes = [*model.linear_modules.values(), (model.vocab_size, model.hidden_size)]
    return sum(segment_rest(number * out * into) for out, into in shapes)


def _update_terms(resolved: ResolvedConfig, model: ModelFacts, part: TrainableParameters, n: str) -> list[MemoryTerm]:
    dtype, accumulation = resolved.config.model.dtype, micro_batch_shape(resolved).micro_batches
    terms = [_moments_term(resolved, model, part, n)]
    if part.master_bytes:
        terms.append(MemoryTerm("masters", part.master_bytes, f"float32 copies of {n} trained parameters in {dtype}"))
    terms.append(
        MemoryTerm(
            "gradients",
            part.parameters * part.bytes_each,
            f"{n} trained parameters in {dtype}"
            + (f"; kept over {accumulation} micro batches" if accumulation > 1 else "; gone before the next loss"),
            "always" if accumulation > 1 else "step",
        )
    )
    if part.master_bytes:
        terms.append(
            MemoryTerm(
                "float32 gradients", part.master_bytes, "for the update of the masters; gone before the loss", "step"
            )
        )
    return terms


def _moments_term(resolved: ResolvedConfig, model: ModelFacts, part: TrainableParameters, n: str) -> MemoryTerm:
    """Return the term of AdamW's moments on the device. In 8 bits, 256 numbers of each moment share a 32-bit scale."""
    kind = resolved.config.train.optim
    row = OPTIMIZERS[kind]
    if not (row.eight_bit or row.paged):
        why = f"{kind}: {len(row.state)} float32 moments of {n} trained parameters"
        return MemoryTerm("optimizer", FLOAT32 * len(row.state) * part.parameters, why)
    tensors = list(trainable_tensor_sizes(model, resolved.config.adapter))
    small_numbers = part.parameters - sum(numbers for numbers, _ in tensors)  # norms and biases: too small for either
    bytes_on_device = MOMENTS * small_numbers
    for numbers, embedding in tensors:
        eight = row.eight_bit and numbers >= MIN_8BIT and not embedding
        scales = 2 * FLOAT32 * -(-numbers // EIGHT_BIT_BLOCK) if eight else 0
        paged = row.paged and numbers >= PAGED
        bytes_on_device += scales + (0 if paged else (2 if eight else MOMENTS) * numbers)
    return MemoryTerm(
        "optimizer",
        bytes_on_device,
        f"{kind}: the part of the moments of {n} trained parameters that stays on the device",
    )


def trainable_tensor_sizes(model: ModelFacts, adapter: LoraSection | None) -> Iterator[tuple[int, bool]]:
    """Yield (numbers, whether it is the embedding) of each trained tensor: every matrix, DoRA's vectors; a tied head is
    the embedding."""
    if adapter is not None:
        for out, into in target_modules(model, adapter).values():
            yield from ((adapter.r * into, False), (out * adapter.r, False))
            if adapter.use_dora:
                yield out, False
        for _, a, b in factor_shapes(model.expert_stacks, adapter, model.routers):
            yield from ((math.prod(a), False), (math.prod(b), False))
        yield from ((math.prod(shape), False) for shape in row_shapes(model))
        return
    yield model.vocab_size * model.hidden_size, True
    for name, (out, into) in model.linear_modules.items():
        if name.rpartition(".")[2] not in OUTPUT_HEADS or not model.tied_embeddings:
            yield out * into, False


@dataclass(frozen=True)
class _Gradients:
    """Bytes of gradients that a micro batch holds at moments of its backward pass, beyond an earlier micro batch's.

    Attributes:
        head: after the output head's backward pass.
        layer: at the beginning of the last layer's.
        above: at the beginning of the first layer's.
        all: while the embedding's gradient is computed.
    """

    head: int
    layer: int
    above: int
    all: int


def _gradients(batch: MicroBatch, part: TrainableParameters, accumulated: bool) -> _Gradients:
    """Return the gradients of one backward pass.

    The gradient of a tied head waits for the embedding's: at the end both and their sum exist. A second micro batch
    adds to the gradients of the first in place, so only a gradient that waits or is being computed counts.
    """
    model, number = batch.model, batch.number
    if batch.factors is not None:
        layer = number * part.parameters // model.num_layers
        down = number * batch.r * sum(batch.factors.get("down_proj", ()))
        gradients = _Gradients(0, down, layer * (model.num_layers - 1) + down, layer * model.num_layers)
        return _Gradients(0, 0, 0, 0) if accumulated else gradients
    matrix = number * model.vocab_size * model.hidden_size
    layers = number * part.parameters - matrix * (1 if model.tied_embeddings else 2)
    if accumulated:
        waiting = matrix if model.tied_embeddings else 0
        return _Gradients(waiting, waiting, waiting, 3 * waiting or matrix)
    down = number * batch.mlp_width * model.hidden_size
    above = layers - layers // model.num_layers + matrix + down
    return _Gradients(matrix, matrix + down, above, layers + matrix * (3 if model.tied_embeddings else 2))


KEPT: dict[object, str] = {
    True: "the inputs of all layers",
    "selective": "the inputs and the attention of all layers",
    "offload": "the inputs of all layers are on the host",
}


def _loss_terms(batch: MicroBatch) -> list[MemoryTerm]:
    """Return the terms of the loss's backward pass at its peak or, for a small micro batch, of the head's."""
    kept = kept_bytes(batch)
    how = KEPT.get(batch.checkpointing, "what all layers keep for the backward pass")
    activations = MemoryTerm("activations", kept, f"{how}, {kept // batch.tokens:,} bytes per token", "loss")
    if batch.chunked:
        why = f"a chunk of the loss at {batch.targets:,} tokens, their hidden states and their gradients"
        return [activations, MemoryTerm("logits", logits_bytes(batch), why, "loss")]
    head = batch.number * (batch.model.vocab_size + batch.model.hidden_size) * batch.tokens
    head += batch.number * batch.model.vocab_size * batch.model.hidden_size
    logits, why = _logits(batch)
    if batch.full and head > logits:
        return [activations, MemoryTerm("logits", head, "their gradient, and that of the output head", "loss")]
    return [activations, MemoryTerm("logits", logits, why, "loss")]


def _logits(batch: MicroBatch) -> tuple[int, str]:
    """Return the bytes of the logits, and why. Llama-3.2-3B, 2 rows of 2,048 tokens: 12 × 2 × 2,048 × 128,256 bytes =
    5.87 GiB."""
    why = (
        f"{batch.targets:,} tokens × {batch.model.vocab_size:,} vocabulary entries × {LOSS_BYTES} "
        "bytes in the loss's backward pass, if the rows are that long"
    )
    return logits_bytes(batch), why


def _backward_term(batch: MicroBatch, part: TrainableParameters, accumulated: bool) -> MemoryTerm:
    moments = backward_moments(batch, part, accumulated)
    where = max(moments, key=lambda name: moments[name])
    why = f"activations, temporaries and gradients at the backward pass of {where}"
    return MemoryTerm("backward pass", moments[where], why, "backward")


EMBEDDING = "the embedding"


def backward_moments(batch: MicroBatch, part: TrainableParameters, accumulated: bool) -> dict[str, int]:
    """Return the bytes at each moment of the backward pass below the loss that may be its peak.

    Args:
        batch: the micro batch.
        part: the trained parameters.
        accumulated: gradients have buffers already, to which each is added as soon as it is computed.
    """
    model = batch.model
    gradients = _gradients(batch, part, accumulated)
    layer = layer_backward_bytes(batch)
    last_layer = attention_kept_bytes(batch) if batch.checkpointing else layer_bytes(batch)
    other_layers = kept_bytes(batch) - final_bytes(batch) - last_layer
    if batch.checkpointing == "offload":
        other_layers += 2 * batch.number * model.hidden_size * batch.tokens
    stream = batch.number * model.hidden_size * batch.tokens
    return {
        "the final norm": norm_backward_bytes(batch) + gradients.head,
        "the last layer": other_layers + layer + gradients.layer,
        "the first layer": layer + (stream if batch.checkpointing else 0) + gradients.above,
        EMBEDDING: stream + gradients.all,
        "the last MLP, which has just run": forward_bytes(batch),
    }
