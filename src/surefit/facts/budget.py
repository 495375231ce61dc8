"""What a training step costs in memory, by arithmetic alone: the closed form behind `check` and the search.

Every term follows from the config and the model's shape, and says what it assumes. Activations are known for the
decoders of `facts/activations.py`; for others the sum can show that a run does *not* fit, and never that it does. See
`LEFT_OUT` for what is in no term. Compared with the simulation: docs/plan.md, "The closed form".

Worked example, Llama-3.1-8B with LoRA r = 8 on all linear layers, bfloat16, one row of 2,048 tokens: 32 layers × 8 ×
(8,192 + 5,120 + 5,120 + 8,192 + 3 × 18,432) = 20,971,520 factors. Weights 2 × 8,030,261,248 bytes = 14.96 GiB; adapter
2, moments 8 and masters 4 bytes per factor, 0.27 GiB; activations 11.27 GiB, logits 2.94 GiB (both worked out in
`facts/activations.py`), cuBLAS 0.02 GiB: 29.45 GiB at the fullest moment, the loss's backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from surefit.config.resolve import LOSS_BYTES, Resolved
from surefit.config.schema import AdapterSection
from surefit.core.units import bytes_text, count_text
from surefit.facts.activations import (
    TOKEN_BYTES,
    MicroBatch,
    covered,
    eval_bytes,
    final_bytes,
    kept_bytes,
    layer_backward_bytes,
    layer_bytes,
    logits_bytes,
    norm_backward_bytes,
    segment_rest,
    workspace_bytes,
)
from surefit.facts.model import DTYPE_BYTES, ModelFacts

FLOAT32 = 4
MOMENTS = 8
"""AdamW's two moments of a trained parameter, in float32."""
AMPERE = (8, 0)
WORKSPACES = 2
"""Threads that call cuBLAS: the program's, and autograd's."""
OUTPUT_HEADS = ("lm_head", "embed_out", "output")
LEFT_OUT = (
    "the allocator's fragmentation, the CUDA context and its libraries",
    "time",
)
ACTIVATIONS_LEFT_OUT = (
    "activations, and what gradient checkpointing keeps of them",
    "temporaries of the attention, the MLP and the kernels",
)
"""Left out as well where the architecture is not covered."""

Moment = Literal["always", "loss", "backward", "step"]


@dataclass(frozen=True)
class Term:
    """One line of a budget.

    Attributes:
        term: what it is.
        bytes: how much.
        why: the assumption it follows from.
        moment: when the memory is held: through the whole step, while the loss is computed, or while the optimizer
            updates. Disk terms are always held.
    """

    term: str
    bytes: int
    why: str
    moment: Moment = "always"


def at_least(terms: Iterable[Term]) -> int:
    """The memory of the fullest moment: what is always held, and the larger of the loss and the update."""
    held: dict[Moment, int] = {"always": 0, "loss": 0, "backward": 0, "step": 0}
    for term in terms:
        held[term.moment] += term.bytes
    return held.pop("always") + max(held.values())


@dataclass(frozen=True)
class Trained:
    """What the optimizer updates; `bytes_each` is the size of one parameter in the model."""

    parameters: int
    bytes_each: int

    @property
    def master_bytes(self) -> int:
        """The optimizer's float32 copies, of whatever is not float32 in the model."""
        return 0 if self.bytes_each == FLOAT32 else FLOAT32 * self.parameters


def target_modules(model: ModelFacts, adapter: AdapterSection) -> dict[str, tuple[int, int]]:
    """The linear layers that get LoRA factors: all but the output head, or those whose names a listed text ends."""
    linears = model.linear_modules.items()
    if adapter.target_modules == "all-linear":
        return {name: shape for name, shape in linears if name.rpartition(".")[2] not in OUTPUT_HEADS}
    return {name: shape for name, shape in linears if any(ends_with(name, text) for text in adapter.target_modules)}


def ends_with(name: str, target: str) -> bool:
    """Whether a dotted module name is `target` or ends with it, part by part, as PEFT matches them."""
    return name == target or name.endswith(f".{target}")


def trained(model: ModelFacts, adapter: AdapterSection, dtype: str) -> Trained | None:
    """What will be trained; None where the model's layers are not known.

    LoRA factors are of the base model's type, as `model/adapter.py` makes them.
    """
    if adapter.kind == "full":
        return None if model.parameters is None else Trained(model.parameters, DTYPE_BYTES[dtype])
    if not model.linear_modules:
        return None
    targets = target_modules(model, adapter)
    factors = sum(adapter.r * (out + into) for out, into in targets.values())
    return Trained(factors, DTYPE_BYTES[dtype])


@dataclass(frozen=True)
class Budget:
    """The memory of a run on one device, without the CUDA context and what the allocator holds beyond it.

    Attributes:
        terms: of a training step; `at_least` of them is its fullest moment.
        phases: bytes in tensors at the fullest moment of "load", "step" and "eval".
    """

    terms: tuple[Term, ...]
    phases: dict[str, int]

    @property
    def allocated(self) -> int:
        return max(self.phases.values())


def peak_bytes(
    resolved: Resolved,
    model: ModelFacts,
    length: int | None = None,
    padded: bool | None = None,
    capability: tuple[int, int] | None = AMPERE,
) -> Budget | None:
    """The closed form; None for a model whose activations it does not know.

    Args:
        resolved: the config without "auto".
        model: facts about the base model.
        length: tokens of the longest row; `data.max_length` if not given.
        padded: whether rows of one micro batch differ in length; if not given, whether it has more than one.
        capability: of the GPU, which decides cuBLAS's workspace; None for none.
    """
    part = trained(model, resolved.config.adapter, resolved.config.model.dtype)
    if part is None or model.parameters is None or not covered(model):
        return None
    batch = micro_batch(resolved, model, length, padded)
    accumulation = resolved.gradient_accumulation_steps
    held = _held(resolved, model, part)
    tokens = TOKEN_BYTES * batch.tokens
    workspace = WORKSPACES * workspace_bytes(capability)
    terms = (
        *held,
        Term("batch", tokens * accumulation, f"ids, mask and labels of {batch.tokens * accumulation:,} tokens"),
        Term("workspace", workspace, "cuBLAS's, of the forward and of the backward thread"),
        *_loss_terms(batch),
        _backward_term(batch, part, accumulation > 1),
    )
    loaded = sum(term.bytes for term in held if term.term in ("weights", "adapter", "masters"))
    resting = sum(term.bytes for term in held if term.moment == "always" and term.term != "gradients")
    evaluated = resting + tokens + workspace + eval_bytes(batch)
    return Budget(terms, {"load": loaded, "step": at_least(terms), "eval": evaluated})


def micro_batch(
    resolved: Resolved, model: ModelFacts, length: int | None = None, padded: bool | None = None
) -> MicroBatch:
    """The largest micro batch of a run; `length` and `padded` as in `peak_bytes`."""
    config = resolved.config
    adapter, rows = config.adapter, config.train.per_device_train_batch_size
    assert isinstance(rows, int)
    first = "model.layers.0."
    factors = None
    if adapter.kind == "lora":
        targets = target_modules(model, adapter).items()
        factors = {name.rpartition(".")[2]: shape for name, shape in targets if name.startswith(first)}
    return MicroBatch(
        model=model,
        dtype=config.model.dtype,
        rows=rows,
        length=config.data.max_length if length is None else length,
        padded=rows > 1 if padded is None else padded,
        checkpointing=config.train.gradient_checkpointing is True,
        factors=factors,
        r=adapter.r if factors else 0,
        dropout=adapter.dropout if factors else 0.0,
    )


def disagreement(closed: int, simulated: int, limit: float = 0.03) -> str | None:
    """A sentence where the closed form and the simulation, in bytes, differ by more than `limit`; else None."""
    error = closed / simulated - 1
    if abs(error) <= limit:
        return None
    return (
        f"the closed form says {bytes_text(closed)} where the simulation says {bytes_text(simulated)} ({error:+.1%}): "
        "trust the simulation, and report the config"
    )


def memory_terms(resolved: Resolved, model: ModelFacts, capability: tuple[int, int] | None = AMPERE) -> list[Term]:
    """The memory of a training step on rows of `data.max_length` tokens.

    With the activations where the closed form knows the architecture, else what no step can do without; empty where the
    model's size is not known.
    """
    budget = peak_bytes(resolved, model, capability=capability)
    if budget is not None:
        return list(budget.terms)
    part = trained(model, resolved.config.adapter, resolved.config.model.dtype)
    if model.parameters is None or part is None:
        return []
    batch = micro_batch(resolved, model)
    return [*_held(resolved, model, part), Term("logits", *_logits(batch), "loss")]


def _held(resolved: Resolved, model: ModelFacts, part: Trained) -> list[Term]:
    """What the weights and their update need, whatever the data is."""
    config = resolved.config
    dtype, n = config.model.dtype, count_text(part.parameters)
    assert model.parameters is not None
    terms = [
        Term("weights", model.parameters * DTYPE_BYTES[dtype], f"{count_text(model.parameters)} parameters in {dtype}")
    ]
    if config.adapter.kind == "lora":
        terms.append(Term("adapter", part.parameters * part.bytes_each, f"{n} LoRA factors, in {dtype} like the base"))
    terms += _update_terms(resolved, part, n)
    slack = _slack_bytes(model, DTYPE_BYTES[dtype])
    if config.adapter.kind == "full":
        slack += (3 if part.master_bytes else 2) * _slack_bytes(model, FLOAT32)
    if slack:
        terms.append(Term("rest of segments", slack, "the allocator splits off no less than 1 MiB of its 2 MiB pages"))
    return terms


def _slack_bytes(model: ModelFacts, number: int) -> int:
    """What the allocator loses with the matrices of a model, `number` bytes per entry: see `segment_rest`.

    Qwen3-4B's MLP in bfloat16: 2 × 2,560 × 9,728 bytes are 47.5 MiB, which take 48; 54 MiB in 108 of them.
    """
    shapes = [*model.linear_modules.values(), (model.vocab_size, model.hidden_size)]
    return sum(segment_rest(number * out * into) for out, into in shapes)


def _update_terms(resolved: Resolved, part: Trained, n: str) -> list[Term]:
    dtype, accumulation = resolved.config.model.dtype, resolved.gradient_accumulation_steps
    terms = [Term("optimizer", MOMENTS * part.parameters, f"AdamW: two float32 moments of {n} trained parameters")]
    if part.master_bytes:
        terms.append(Term("masters", part.master_bytes, f"float32 copies of {n} trained parameters in {dtype}"))
    terms.append(
        Term(
            "gradients",
            part.parameters * part.bytes_each,
            f"{n} trained parameters in {dtype}"
            + (f"; kept over {accumulation} micro batches" if accumulation > 1 else "; gone before the next loss"),
            "always" if accumulation > 1 else "step",
        )
    )
    if part.master_bytes:
        terms.append(
            Term("float32 gradients", part.master_bytes, "for the update of the masters; gone before the loss", "step")
        )
    return terms


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


def _gradients(batch: MicroBatch, part: Trained, accumulated: bool) -> _Gradients:
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


def _loss_terms(batch: MicroBatch) -> list[Term]:
    """The moment at which the loss's backward pass is fullest, or, where little is in the micro batch, the head's."""
    kept = kept_bytes(batch)
    how = "the inputs of all layers" if batch.checkpointing else "what all layers keep for the backward pass"
    activations = Term("activations", kept, f"{how}, {kept // batch.tokens:,} bytes per token", "loss")
    head = batch.number * (batch.model.vocab_size + batch.model.hidden_size) * batch.tokens
    head += batch.number * batch.model.vocab_size * batch.model.hidden_size
    logits, why = _logits(batch)
    if batch.full and head > logits:
        return [activations, Term("logits", head, "their gradient, and that of the output head", "loss")]
    return [activations, Term("logits", logits, why, "loss")]


def _logits(batch: MicroBatch) -> tuple[int, str]:
    """Llama-3.2-3B, 2 rows of 2,048 tokens: 12 × 2 × 2,048 × 128,256 bytes = 5.87 GiB."""
    why = (
        f"{batch.rows} rows of {batch.length:,} tokens × {batch.model.vocab_size:,} vocabulary entries × {LOSS_BYTES} "
        "bytes in the loss's backward pass, if the rows are that long"
    )
    return logits_bytes(batch), why


def _backward_term(batch: MicroBatch, part: Trained, accumulated: bool) -> Term:
    """The fullest moment of the backward pass below the loss: at its top, in its last layer, or at the embedding."""
    model = batch.model
    gradients = _gradients(batch, part, accumulated)
    layer = layer_backward_bytes(batch)
    others = kept_bytes(batch) - final_bytes(batch) - (0 if batch.checkpointing else layer_bytes(batch))
    stream = batch.number * model.hidden_size * batch.tokens
    moments = {
        "the final norm": norm_backward_bytes(batch) + gradients.head,
        "the last layer": others + layer + gradients.layer,
        "the first layer": layer + (stream if batch.checkpointing else 0) + gradients.above,
        "the embedding": stream + gradients.all,
    }
    where = max(moments, key=lambda name: moments[name])
    why = f"activations, temporaries and gradients in the backward pass of {where}"
    return Term("backward pass", moments[where], why, "backward")
