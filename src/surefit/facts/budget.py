"""What a run costs in memory and on disk, as far as arithmetic knows: the closed form behind `check` and `plan`.

Only terms that follow from the config and the model's shape are here; each says what it assumes. Activations and
everything else that depends on how PyTorch executes the model are not: see `LEFT_OUT`. So a sum of these terms can show
that a run does *not* fit, and never that it does.

Worked example, Llama-3.1-8B with LoRA r = 8 on all linear layers: 32 layers × 8 × (8,192 + 5,120 + 5,120 + 8,192 +
3 × 18,432) = 20,971,520 factors in 448 tensors. In float32 an adapter file takes 4 bytes of each, 83.9 MB, and AdamW's
two moments 8, 167.8 MB. In bfloat16 the adapter takes 41.9 MB and the optimizer also keeps a float32 master of each
factor, another 83.9 MB. The merged model in bfloat16 takes 8,030,261,248 × 2 bytes = 16.06 GB.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from surefit.config.resolve import LOSS_BYTES, Resolved
from surefit.config.schema import AdapterSection
from surefit.core.units import count_text
from surefit.facts.model import DTYPE_BYTES, ModelFacts

FLOAT32 = 4
MOMENTS = 8
"""AdamW's two moments of a trained parameter, in float32."""
HEADER_BYTES = 150
"""Per tensor in the header of a safetensors file; the names of LoRA factors are long (a test compares real files)."""
OUTPUT_HEADS = ("lm_head", "embed_out", "output")
LEFT_OUT = (
    "activations, and what gradient checkpointing keeps of them",
    "temporaries of the attention, the MLP and the kernels",
    "the allocator's rounding and fragmentation, the CUDA context and its libraries",
    "time",
)

Moment = Literal["always", "loss", "step"]


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
    held: dict[Moment, int] = {"always": 0, "loss": 0, "step": 0}
    for term in terms:
        held[term.moment] += term.bytes
    return held["always"] + max(held["loss"], held["step"])


@dataclass(frozen=True)
class Trained:
    """What the optimizer updates; `bytes_each` is the size of one parameter in the model."""

    parameters: int
    tensors: int
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
        # The number of tensors only matters for the headers of files: a norm per linear layer is close enough.
        tensors = 2 * len(model.linear_modules)
        return None if model.parameters is None else Trained(model.parameters, tensors, DTYPE_BYTES[dtype])
    if not model.linear_modules:
        return None
    targets = target_modules(model, adapter)
    factors = sum(adapter.r * (out + into) for out, into in targets.values())
    return Trained(factors, 2 * len(targets), DTYPE_BYTES[dtype])


def memory_terms(resolved: Resolved, model: ModelFacts) -> list[Term]:
    """The memory that no training step can do without; empty where the model's size is not known."""
    config = resolved.config
    dtype = config.model.dtype
    part = trained(model, config.adapter, dtype)
    if model.parameters is None or part is None:
        return []
    n, lora = count_text(part.parameters), config.adapter.kind == "lora"
    terms = [
        Term("weights", model.parameters * DTYPE_BYTES[dtype], f"{count_text(model.parameters)} parameters in {dtype}")
    ]
    if lora:
        terms.append(Term("adapter", part.parameters * part.bytes_each, f"{n} LoRA factors, in {dtype} like the base"))
    return [*terms, *_update_terms(resolved, part, n), _loss_term(resolved, model)]


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


def _loss_term(resolved: Resolved, model: ModelFacts) -> Term:
    """Llama-3.2-3B, 2 rows of 2,048 tokens: 12 × 2 × 2,048 × 128,256 bytes = 5.87 GiB."""
    config = resolved.config
    micro, length = config.train.per_device_train_batch_size, config.data.max_length
    assert isinstance(micro, int)
    return Term(
        "logits",
        LOSS_BYTES * micro * length * model.vocab_size,
        f"{micro} rows of {length:,} tokens × {model.vocab_size:,} vocabulary entries × {LOSS_BYTES} bytes in the "
        "loss's backward pass, if the rows are that long",
        "loss",
    )


def disk_terms(resolved: Resolved, model: ModelFacts) -> list[Term]:
    """What the run directory holds at its largest; empty where the model's size is not known."""
    config = resolved.config
    part = trained(model, config.adapter, config.model.dtype)
    if model.parameters is None or part is None:
        return []
    kept, lora = config.checkpoint.save_total_limit, config.adapter.kind == "lora"
    weights = part.parameters * part.bytes_each + HEADER_BYTES * part.tensors
    entries = 4 if part.master_bytes else 3
    optimizer = MOMENTS * part.parameters + part.master_bytes + HEADER_BYTES * entries * part.tensors
    masters = ", masters" if part.master_bytes else ""
    terms = [
        Term(
            "checkpoints",
            (kept + 1) * (weights + optimizer),
            f"{kept} kept and one being written, {count_text(part.parameters)} trained parameters each: "
            f"weights{masters} and AdamW's moments",
        ),
        Term("adapter" if lora else "model", weights, f"the result of training, in {config.model.dtype}"),
    ]
    if lora:
        merged = model.parameters * DTYPE_BYTES[config.model.dtype]
        terms.append(Term("merged", merged, f"{count_text(model.parameters)} parameters in {config.model.dtype}"))
    return terms
