"""What a training step costs in memory, by arithmetic alone: the closed form behind `check` and the search.

Every term follows from the config and the model's shape, and says what it assumes. Activations are known for the
decoders of `facts/activations.py`; for others the sum can show that a run does *not* fit, and never that it does. See
`LEFT_OUT` for what is in no term. Compared with the simulation: docs/plan-method.md, "The closed form".

Worked example, Llama-3.1-8B with LoRA r = 8 on all linear layers, bfloat16, one row of 2,048 tokens: 32 layers × 8 ×
(8,192 + 5,120 + 5,120 + 8,192 + 3 × 18,432) = 20,971,520 factors. Weights 2 × 8,030,261,248 bytes = 14.96 GiB; adapter
2, moments 8 and masters 4 bytes per factor, 0.27 GiB; activations 11.27 GiB, a chunk of the loss and its hidden states
0.64 GiB (both worked out in `facts/activations.py`), cuBLAS 0.02 GiB: 27.15 GiB at the fullest moment, the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from surefit.config.optimizers import OPTIMIZERS
from surefit.config.resolve import LOSS_BYTES, ResolvedConfig
from surefit.config.schema import Config, LoraSection
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
"""AdamW's two moments of a trained parameter, in float32."""
WORKSPACES = 2
"""Threads that call cuBLAS: the program's, and autograd's."""
NF4_TABLES = 1024 + 512 + 512
"""Bytes of the code tables and the offset that each 4-bit layer has, as the allocator rounds them."""
MIN_8BIT, PAGED, EIGHT_BIT_BLOCK = 4_096, 100_000, 256
"""bitsandbytes keeps the moments of fewer numbers in 32 bits, pages none of fewer, and scales so many together."""
OUTPUT_HEADS = ("lm_head", "embed_out", "output")
LEFT_OUT = "the allocator's fragmentation, the CUDA context and its libraries"
ACTIVATIONS_LEFT_OUT = (
    "activations, and what gradient checkpointing keeps of them",
    "temporaries of the attention, the MLP and the kernels",
)
"""Left out as well where the architecture is not covered."""

Moment = Literal["always", "gather", "loss", "backward", "step"]


@dataclass(frozen=True)
class MemoryTerm:
    """One line of a budget.

    Attributes:
        term: what it is.
        bytes: how much.
        why: the assumption it follows from.
        moment: when the memory is held: through the whole step, while shards are gathered for the first layer, while
            the loss is computed, in the backward pass, or while the optimizer updates. Disk terms are always held.
    """

    term: str
    bytes: int
    why: str
    moment: Moment = "always"


def fullest_moment_bytes(terms: Iterable[MemoryTerm]) -> int:
    """The memory of the fullest moment: what is always held, and the largest of what the others hold."""
    held: dict[Moment, int] = dict.fromkeys(get_args(Moment), 0)
    for term in terms:
        held[term.moment] += term.bytes
    return held.pop("always") + max(held.values())


@dataclass(frozen=True)
class TrainableParameters:
    """What the optimizer updates; `bytes_each` is the size of one parameter in the model."""

    parameters: int
    bytes_each: int

    @property
    def master_bytes(self) -> int:
        """The optimizer's float32 copies, of whatever is not float32 in the model."""
        return 0 if self.bytes_each == FLOAT32 else FLOAT32 * self.parameters


def target_modules(model: ModelFacts, adapter: LoraSection) -> dict[str, tuple[int, int]]:
    """The linear layers that get LoRA factors: all that can (facts/all_linear.py), or those that a listed text ends."""
    kind, linears = model.model_type, [each for each in model.linear_modules.items() if not without_gradient(each[0])]
    if adapter.target_modules == "all-linear":
        return {n: s for n, s in linears if not (n.rpartition(".")[2] in OUTPUT_HEADS or closed_to_lora(kind, n))}
    return {name: shape for name, shape in linears if any(ends_with(name, text) for text in adapter.target_modules)}


def count_trainable_parameters(
    model: ModelFacts, adapter: LoraSection | None, dtype: str
) -> TrainableParameters | None:
    """What will be trained; None where the model's layers are not known.

    LoRA factors, DoRA's magnitudes and the rows of new tokens are of the base model's type, as `model/adapter.py` makes
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
    """The memory of a run on one device, without the CUDA context and what the allocator holds beyond it.

    Attributes:
        terms: of a training step; `fullest_moment_bytes` of them is its fullest moment.
        phases: bytes in tensors at the fullest moment of "load", "step" and "eval".
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
    """The closed form of one process; None for a model whose activations it does not know.

    Args:
        resolved: the config without "auto".
        model: facts about the base model.
        length: tokens of the longest row; `data.max_length` if not given.
        padded: whether rows of one micro batch differ in length; if not given, whether it has more than one.
        capability: of the GPU, which decides cuBLAS's workspace; None for none.
        in_buckets: gradients are put where others are waiting for them as soon as they are made.
        parts: processes that share the tokens of the micro batch.
    """
    part = count_trainable_parameters(model, resolved.config.adapter, resolved.config.model.dtype)
    if part is None or model.parameters is None or not activations_known(resolved.config, model):
        return None
    batch = shared_tokens(largest_micro_batch(resolved, model, length, padded, capability), parts)
    accumulation = micro_batch_shape(resolved, length).micro_batches
    held = _held(resolved, model, part)
    tokens = TOKEN_BYTES * batch.tokens
    workspace = WORKSPACES * cublas_workspace_bytes(capability)
    terms = (
        *held,
        MemoryTerm("batch", tokens, f"ids, masks or positions, and targets of {batch.tokens:,} tokens"),
        MemoryTerm("workspace", workspace, "cuBLAS's, of the forward and of the backward thread"),
        *_loss_terms(batch),
        _backward_term(batch, part, in_buckets or accumulation > 1),
    )
    loaded = sum(term.bytes for term in held if term.term in ("weights", "adapter", "masters"))
    resting = sum(term.bytes for term in held if term.moment == "always" and term.term != "gradients")
    evaluated = resting + tokens + workspace + eval_bytes(batch)
    return StepMemory(terms, {"load": loaded, "step": fullest_moment_bytes(terms), "eval": evaluated})


def largest_micro_batch(
    resolved: ResolvedConfig,
    model: ModelFacts,
    length: int | None = None,
    padded: bool | None = None,
    capability: tuple[int, int] | None = AMPERE,
) -> MicroBatch:
    """The largest micro batch of a run; the arguments are those of `peak_bytes_on_one`."""
    config, shape = resolved.config, micro_batch_shape(resolved, length)
    adapter, packed, checkpointing = config.adapter, config.data.packing is True, config.train.gradient_checkpointing
    factors = None
    if adapter is not None:
        targets = target_modules(model, adapter).items()
        factors = {name.rpartition(".")[2]: shape for name, shape in targets if name.startswith("model.layers.0.")}
    return MicroBatch(
        model=model,
        dtype=config.model.dtype,
        rows=shape.rows,
        length=shape.length,
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
    )


def activations_known(config: Config, model: ModelFacts) -> bool:
    """Whether there is a closed form for a run's activations: none where DoRA makes whole matrices in every layer."""
    return has_closed_form(model) and not (config.train.method == "lora" and config.lora.use_dora)


def memory_terms_on_one(
    resolved: ResolvedConfig, model: ModelFacts, capability: tuple[int, int] | None = AMPERE
) -> list[MemoryTerm]:
    """The memory of a training step on rows of `data.max_length` tokens.

    With the activations where the closed form knows the architecture, else what no step can do without; empty where the
    model's size is not known.
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
        held = summed_bytes(model.expert_stacks, batch.number, bool(batch.checkpointing))
        terms.append(
            MemoryTerm("experts", held, "their weights with the factors added, and a gradient of these", "backward")
        )
    return terms


def _held(resolved: ResolvedConfig, model: ModelFacts, part: TrainableParameters) -> list[MemoryTerm]:
    """What the weights and their update need, whatever the data is."""
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
            MemoryTerm("rest of segments", slack, "the allocator splits off no less than 1 MiB of its 2 MiB pages")
        )
    return terms


def _weights_term(resolved: ResolvedConfig, model: ModelFacts) -> MemoryTerm:
    """The weights, those of the linear layers in fewer bits where the config says so: all but the head's.

    NF4: 4 bits, a scale of 8 bits per 64 weights, and one of 32 bits per 256 of those. FP8: 8 bits, and a scale of 32
    bits per output. Llama-3.1-8B in NF4: 6,979,321,856 weights × 4.127 bits and 1,050,939,392 others × 2 bytes are
    5.31 GiB.
    """
    dtype, kind = resolved.config.model.dtype, resolved.config.model.quantization
    assert model.parameters is not None
    if kind == "none":
        why = f"{count_text(model.parameters)} parameters in {dtype}"
        return MemoryTerm("weights", model.parameters * DTYPE_BYTES[dtype], why)
    layers = [each for each in model.linear_modules.items() if each[0].rpartition(".")[2] not in OUTPUT_HEADS]
    shapes = [shape for name, shape in layers if is_quantizable(name)]
    numbers = sum(out * into for out, into in shapes)
    if kind == "nf4":
        scales = [out * into // 64 for out, into in shapes]
        stored = numbers // 2 + sum(scales) + sum(FLOAT32 * (scale // 256) + NF4_TABLES for scale in scales)
    else:
        stored = sum(out * into + FLOAT32 * out for out, into in shapes)
    others = DTYPE_BYTES[dtype] * (model.parameters - numbers)
    why = f"{count_text(numbers)} weights in {kind}, {count_text(model.parameters - numbers)} others in {dtype}"
    return MemoryTerm("weights", stored + others, why)


def _slack_bytes(model: ModelFacts, number: int) -> int:
    """What the allocator loses with the matrices of a model, `number` bytes per entry: see `segment_rest`.

    Qwen3-4B's MLP in bfloat16: 2 × 2,560 × 9,728 bytes are 47.5 MiB, which take 48; 54 MiB in 108 of them.
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
    """AdamW's moments on the device. In 8 bits: two numbers, and two scales of 32 bits per 256 of them."""
    kind = resolved.config.train.optim
    row = OPTIMIZERS[kind]
    if not (row.eight_bit or row.paged):
        why = f"{kind}: {len(row.state)} float32 moments of {n} trained parameters"
        return MemoryTerm("optimizer", FLOAT32 * len(row.state) * part.parameters, why)
    tensors = list(trainable_tensor_sizes(model, resolved.config.adapter))
    rest = part.parameters - sum(numbers for numbers, _ in tensors)  # norms and biases: too small for either
    held = MOMENTS * rest
    for numbers, embedding in tensors:
        eight = row.eight_bit and numbers >= MIN_8BIT and not embedding
        scales = 2 * FLOAT32 * -(-numbers // EIGHT_BIT_BLOCK) if eight else 0
        paged = row.paged and numbers >= PAGED
        held += scales + (0 if paged else (2 if eight else MOMENTS) * numbers)
    return MemoryTerm(
        "optimizer", held, f"{kind}: what of the moments of {n} trained parameters is always on the device"
    )


def trainable_tensor_sizes(model: ModelFacts, adapter: LoraSection | None) -> Iterator[tuple[int, bool]]:
    """(numbers, whether it is an embedding's) of what is trained: every matrix, DoRA's vectors; a tied head is the
    embedding."""
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
    """Bytes of gradients that a micro batch has made at moments of its backward pass, beyond those of an earlier one.

    Attributes:
        head: once the output head is done.
        layer: with the last layer begun.
        above: with the first layer begun.
        all: while the embedding's is made.
    """

    head: int
    layer: int
    above: int
    all: int


def _gradients(batch: MicroBatch, part: TrainableParameters, accumulated: bool) -> _Gradients:
    """The gradients of one backward pass.

    That of a tied head waits for the embedding's: at the end both and their sum are there. A second micro batch adds to
    the gradients of the first in place, so only what waits or is being made counts.
    """
    model, number = batch.model, batch.number
    if batch.factors is not None:
        layer = number * part.parameters // model.num_layers
        down = number * batch.r * sum(batch.factors.get("down_proj", ()))
        made = _Gradients(0, down, layer * (model.num_layers - 1) + down, layer * model.num_layers)
        return _Gradients(0, 0, 0, 0) if accumulated else made
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
    """The moment at which the loss's backward pass is fullest, or, where little is in the micro batch, the head's."""
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
    """Llama-3.2-3B, 2 rows of 2,048 tokens: 12 × 2 × 2,048 × 128,256 bytes = 5.87 GiB."""
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
    """Bytes at the moments of the backward pass below the loss that may be its fullest.

    Args:
        accumulated: gradients have a place already, where they are put as soon as they are made.
    """
    model = batch.model
    gradients = _gradients(batch, part, accumulated)
    layer = layer_backward_bytes(batch)
    own = attention_kept_bytes(batch) if batch.checkpointing else layer_bytes(batch)
    others = kept_bytes(batch) - final_bytes(batch) - own
    if batch.checkpointing == "offload":
        others += 2 * batch.number * model.hidden_size * batch.tokens
    stream = batch.number * model.hidden_size * batch.tokens
    return {
        "the final norm": norm_backward_bytes(batch) + gradients.head,
        "the last layer": others + layer + gradients.layer,
        "the first layer": layer + (stream if batch.checkpointing else 0) + gradients.above,
        EMBEDDING: stream + gradients.all,
        "the last MLP, which has just run": forward_bytes(batch),
    }
