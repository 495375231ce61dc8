"""Memory of one process of several: the closed form of `facts/memory_formula.py` for each parallel mode.

A process is one GPU. Every mode is described by its differences from a single process: the tokens, matrices or layers
that a process has (the arithmetic of `memory_formula` then applies), the shards of weights and optimizer state
that it holds, and the buffers that the engine adds. Where the processes differ, the numbers describe the one that
needs most.

    ddp     everything whole; the gradients are in buckets, b n, from the start. Accumulated ones are tensors besides
    fsdp    ⌈d₀ / N⌉ rows of every tensor; embedding, last norm and head gathered while a micro batch runs; at the loss
            the last layer's buffer, in the backward pass two layers and the buffer that fetches the next; gradients of
            a layer are added up in float32
    zero2   weights whole; of what is trained 4 (masters) + 8 (moments) + 4 (gradients) bytes for ⌈n / N⌉ numbers, each
            parameter group filled up to a multiple of 2 N; a bucket of 5e8 numbers in the backward pass
    zero3   ⌈numel / N⌉ of every tensor, the same 16 bytes of what is trained, up to 1e9 numbers gathered at a time, and
            a bucket of 5e8 numbers always
    tp      1 / N of the matrices that the model's plan cuts, of their LoRA factors one, of heads and MLP widths
    cp      T / N tokens and one of padding; keys and values of the whole document where attention runs; under fsdp too,
            where `parallel.cp` is above 1
    pp      some layers; the first of p stages keeps what min(p, m) micro batches kept, the s-th min(p − s, m); a hidden
            state per micro batch is received from each side, all m buffers from the start of the step

Worked example, Llama-3.2-3B in bfloat16, LoRA r 16, on eight A100 under fsdp: 3,212,749,824 parameters × 2 bytes / 8
are 0.75 GiB in each; 24.3 million factors × (2 + 8 + 4) bytes / 8 are 0.04 GiB; the embedding, which is the head too,
gathered: 128,256 × 3,072 × 2 bytes, 0.73 GiB; a layer has 100.7 million parameters, 0.19 GiB gathered, three times in
the backward pass. ddp holds 5.98 GiB of weights instead.

Sources: torch 2.13 (nn/parallel/distributed.py, distributed/fsdp/_fully_shard, distributed/pipelining), DeepSpeed
0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, config.py), `parallel/*.py`. `plan/ranks.py` runs the engines of torch
themselves on tensors without data, and docs/plan-method.md compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefit.config.modes import MODES, ZERO
from surefit.config.resolve import ResolvedConfig
from surefit.core.reading import read_json_file
from surefit.core.units import MIB, count_text, plural
from surefit.facts import memory_formula
from surefit.facts.activations import AMPERE, FLOAT32, MicroBatch, eval_bytes, final_bytes, kept_bytes, shared_tokens
from surefit.facts.memory_formula import MemoryTerm, StepMemory, fullest_moment_bytes, largest_micro_batch
from surefit.facts.model import DTYPE_BYTES, ModelFacts
from surefit.facts.sharding import (
    BY_INPUTS,
    BY_OUTPUTS,
    ShardingLayout,
    is_here,
    local_parameter_counts,
    model_state_bytes,
    pipeline_stages,
    sharing_of,
)
from surefit.facts.step_shape import micro_batch_shape
from surefit.facts.tensors import list_parameters

CONTEXT_BUCKET = 64 * MIB
"""`parallel/context_parallel.py` sums gradients in tensors of about this size."""
DEEPSPEED = {"reduce_bucket_size": 5e8, "stage3_max_live_parameters": 1e9, "stage3_prefetch_bucket_size": 5e7}
"""DeepSpeed's defaults (runtime/zero/config.py), in numbers."""


def peak_bytes(
    resolved: ResolvedConfig,
    model: ModelFacts,
    length: int | None = None,
    padded: bool | None = None,
    capability: tuple[int, int] | None = AMPERE,
) -> StepMemory | None:
    """Return the closed form for the process that needs most; see `memory_formula.peak_bytes_on_one`."""
    sharing = sharing_of(resolved.config)
    on_one = memory_formula.peak_bytes_on_one(resolved, model, length, padded, capability)
    if sharing is None or on_one is None:
        return on_one
    return _FORMS[sharing.mode](_Run(resolved, model, sharing, length, padded, capability), on_one)


def _with_whole_logits(resolved: ResolvedConfig) -> ResolvedConfig:
    """Return the config without a chunked loss, as in `train/loss.py`: ZeRO-3 gathers the head only once."""
    speed = resolved.config.speed.model_copy(update={"chunked_loss": False})
    return replace(resolved, config=resolved.config.model_copy(update={"speed": speed}))


def memory_terms(
    resolved: ResolvedConfig, model: ModelFacts, capability: tuple[int, int] | None = AMPERE
) -> list[MemoryTerm]:
    """Return `memory_formula.memory_terms_on_one` for the process that needs most."""
    memory = peak_bytes(resolved, model, capability=capability)
    return list(memory.terms) if memory is not None else _without_activations(resolved, model, capability)


def _without_activations(
    resolved: ResolvedConfig, model: ModelFacts, capability: tuple[int, int] | None
) -> list[MemoryTerm]:
    """Return a lower bound of one process's terms without activations, divided where the mode shards them."""
    terms = memory_formula.memory_terms_on_one(resolved, model, capability)
    sharing = sharing_of(resolved.config)
    if sharing is None:
        return terms
    names = DIVIDED[MODES[sharing.mode].divided]
    return [
        replace(term, bytes=term.bytes // sharing.size, why=f"{term.why}; one process's part of {sharing.size}")
        if term.term in names
        else term
        for term in terms
    ]


UPDATED = ("optimizer", "masters", "float32 gradients")
DIVIDED = {"nothing": (), "optimizer state": UPDATED, "weights": ("weights", "adapter", "gradients", *UPDATED)}
"""`Mode.divided` → the terms of which each process has its shard."""


@dataclass(frozen=True)
class _Run:
    """The arguments of `peak_bytes`; batches are one process's, where several share their tokens."""

    resolved: ResolvedConfig
    model: ModelFacts
    sharing: ShardingLayout
    length: int | None
    padded: bool | None
    capability: tuple[int, int] | None

    @property
    def number(self) -> int:
        return DTYPE_BYTES[self.resolved.config.model.dtype]

    @property
    def micro_batches(self) -> int:
        return micro_batch_shape(self.resolved, self.length).micro_batches

    def of(self, model: ModelFacts, **changes: Any) -> StepMemory:
        memory = memory_formula.peak_bytes_on_one(
            self.resolved, model, self.length, self.padded, self.capability, parts=self.sharing.tokens, **changes
        )
        assert memory is not None, "the whole model was covered"
        return memory

    def batch(self, model: ModelFacts) -> MicroBatch:
        batch = largest_micro_batch(self.resolved, model, self.length, self.padded, self.capability)
        return shared_tokens(batch, self.sharing.tokens)


def _rebuilt(
    before: StepMemory, changed: dict[str, MemoryTerm | None], *added: MemoryTerm, evaluated: int = 0
) -> StepMemory:
    """Return a budget with terms replaced, or removed by None; `evaluated`: extra bytes that a held-out batch needs."""
    rebuilt = [changed.get(term.term, term) for term in before.terms]
    terms = (*(term for term in rebuilt if term is not None), *added)

    def resting(every: Iterable[MemoryTerm]) -> int:
        return sum(term.bytes for term in every if term.moment == "always" and term.term not in ("gradients", BUCKETS))

    load_bytes = sum(term.bytes for term in terms if term.term in ("weights", "adapter", "masters"))
    held_out = before.phases["eval"] - resting(before.terms) + resting(terms) + evaluated
    return StepMemory(terms, {"load": load_bytes, "step": fullest_moment_bytes(terms), "eval": held_out})


BUCKETS = "gradient buckets"


def _ddp(run: _Run, whole: StepMemory) -> StepMemory:
    """Return DDP's budget: buckets of the size of all gradients, which are views of them. Where micro batches are
    accumulated, gradients are tensors besides, since only the last micro batch goes through the buckets."""
    terms = {term.term: term for term in whole.terms}
    gradients = terms["gradients"]
    buckets = MemoryTerm(BUCKETS, gradients.bytes, "DDP's, of the size of all gradients", "always")
    if run.micro_batches > 1:
        return _rebuilt(whole, {}, buckets)
    bucketed = run.of(run.model, in_buckets=True)
    return _rebuilt(bucketed, {"gradients": None}, buckets)


def _cp(run: _Run, whole: StepMemory) -> StepMemory:
    """Return context parallelism's budget: one process's tokens, and keys and values of the document up to its last."""
    memory = run.of(run.model)
    bucket = min(CONTEXT_BUCKET, next(term.bytes for term in memory.terms if term.term == "gradients"))
    return _rebuilt(memory, {}, MemoryTerm("reduction", bucket, "gradients in communication", "step"))


def _tp(run: _Run, whole: StepMemory) -> StepMemory:
    """Return tensor parallelism's budget: a part of the heads and of the MLP's width; embedding, norms and residual
    stream are whole."""
    return run.of(cut_model(run.model, run.sharing.size))


def cut_model(model: ModelFacts, size: int) -> ModelFacts:
    """Return the model as one of `size` processes that share its matrices holds it."""
    shapes = {}
    for name, (outputs, inputs) in model.linear_modules.items():
        leaf = name.rpartition(".")[2]
        if leaf in BY_OUTPUTS:
            outputs //= size
        elif leaf in BY_INPUTS:
            inputs //= size
        shapes[name] = (outputs, inputs)
    removed = sum(a * b for a, b in model.linear_modules.values()) - sum(a * b for a, b in shapes.values())
    assert model.parameters is not None
    assert model.intermediate_size is not None
    return replace(
        model,
        linear_modules=shapes,
        parameters=model.parameters - removed,
        num_attention_heads=model.num_attention_heads // size,
        num_key_value_heads=model.num_key_value_heads // size,
        intermediate_size=model.intermediate_size // size,
    )


def _fsdp(run: _Run, whole: StepMemory) -> StepMemory:
    """Return FSDP's budget: shards of everything; gathered are the tensors outside of the layers, the layer that runs,
    and the next."""
    sharing, number = run.sharing, run.number
    state = model_state_bytes(run.resolved, run.model, sharing)
    tensors = list(list_parameters(run.model, run.resolved.config.adapter))
    shares = list(local_parameter_counts(tensors, run.model, sharing, 0))
    why = f"the rows of every tensor on one of {sharing.size} processes"
    frozen = number * sum(count for count, tensor in shares if not tensor.trained)
    trained = sum(count for count, tensor in shares if tensor.trained)
    layer = sum(math.prod(tensor.shape) for tensor in tensors if ".layers.0." in f".{tensor.name}")
    layer_trained = sum(math.prod(t.shape) for t in tensors if t.trained and ".layers.0." in f".{t.name}")
    outer = [tensor for tensor in tensors if ".layers." not in f".{tensor.name}"]
    root = number * sum(math.prod(tensor.shape) for tensor in outer)
    lora = run.resolved.config.train.method == "lora"
    host = 0 if sharing.offload else 1
    changed: dict[str, MemoryTerm | None] = {
        "weights": MemoryTerm("weights", host * (frozen if lora else number * trained), why),
        "adapter": MemoryTerm("adapter", host * number * trained, why) if lora else None,
        "optimizer": MemoryTerm("optimizer", host * state.moments, why),
        "masters": MemoryTerm("masters", host * state.masters, why) if state.masters else None,
        "gradients": MemoryTerm("gradients", host * state.gradients, f"added up micro batch by micro batch, {why}"),
        "float32 gradients": MemoryTerm("float32 gradients", host * state.masters, why, "step")
        if state.masters
        else None,
        "rest of segments": None,
    }
    # Full training: the root's gradients wait for its last use, and are copied to float32 to be accumulated.
    outer_trained = sum(math.prod(tensor.shape) for tensor in outer if tensor.trained)
    backward, layers, reduced = _fsdp_backward(run, 3 * number * layer, layer_trained)
    return _rebuilt(
        run.of(run.model, in_buckets=True),
        changed | {"backward pass": backward},
        MemoryTerm(GATHERED, root + number * layer, "embeddings, last norm, head, and a layer's buffer", "loss"),
        MemoryTerm(GATHERED, root + layers, "the same, and the gathered layers", "backward"),
        MemoryTerm(
            GATHERED,
            2 * (root + number * layer),
            "the first layer and all tensors outside layers, with their buffers",
            "gather",
        ),
        MemoryTerm("reduction", reduced, "gradients of a layer, whole, and in float32 to be added up", "backward"),
        MemoryTerm("reduction", FLOAT32 * outer_trained, "gradients outside the layers, in float32", "step"),
        evaluated=root + 2 * number * layer,
    )


GATHERED = "gathered weights"


def _fsdp_backward(run: _Run, gathered: int, trained: int) -> tuple[MemoryTerm, int, int]:
    """Return the term of the backward pass at its peak, the bytes of gathered layers then, and of reduced gradients.

    The peak is among the layers, where `gathered` bytes exist (two layers and the buffer of the next) and the gradients
    of one layer, `trained` numbers, whole and twice in float32; or at the embedding, where no layer is gathered and the
    first layer's gradients exist once in float32.
    """
    config = run.resolved.config
    part = memory_formula.count_trainable_parameters(run.model, config.adapter, config.model.dtype)
    assert part is not None, "the whole model was covered"
    moments = memory_formula.backward_moments(run.batch(run.model), part, True)
    last = moments.pop(memory_formula.EMBEDDING)
    first, reduced = max(moments.values()), (run.number + 2 * FLOAT32) * trained
    if first + gathered + reduced >= last + FLOAT32 * trained:
        return (
            MemoryTerm("backward pass", first, "activations, temporaries and gradients of a layer", "backward"),
            gathered,
            reduced,
        )
    return MemoryTerm("backward pass", last, "gradients of the embedding", "backward"), 0, FLOAT32 * trained


def _zero(run: _Run, whole: StepMemory) -> StepMemory:
    """Return ZeRO's budget: DeepSpeed's shards, and its buckets of a size that does not depend on the model's."""
    weights = MODES[run.sharing.mode].divided == "weights"
    if weights:
        run = replace(run, resolved=_with_whole_logits(run.resolved))
    sharing, number, resolved = run.sharing, run.number, run.resolved
    sizes = DEEPSPEED | _tuning(resolved.config.parallel.deepspeed_config)
    host = 0 if sharing.offload else 1
    bucket = int(number * sizes["reduce_bucket_size"])
    if run.capability is None:
        # On a CPU an empty tensor occupies only the pages that are written to: the gradients that are copied into it.
        part_of_all = memory_formula.count_trainable_parameters(
            run.model, resolved.config.adapter, resolved.config.model.dtype
        )
        assert part_of_all is not None, "the whole model was covered"
        bucket = min(bucket, number * part_of_all.parameters)
    state_bytes = model_state_bytes(resolved, run.model, sharing)
    part = f"one process's share of {sharing.processes}"
    state: dict[str, MemoryTerm | None] = {
        "optimizer": MemoryTerm("optimizer", host * state_bytes.moments, part),
        "masters": MemoryTerm("masters", host * state_bytes.masters, f"float32 copies, {part}"),
        "gradients": MemoryTerm("gradients", host * state_bytes.gradients, f"in float32, {part}"),
        "float32 gradients": None,
    }
    bucketed = run.of(run.model, in_buckets=True)
    if not weights:
        why = "DeepSpeed's reduce_bucket_size"
        return _rebuilt(bucketed, state, *_missing(bucketed, state), MemoryTerm("bucket", bucket, why, "backward"))
    tensors = list(list_parameters(run.model, resolved.config.adapter))
    numbers = sum(math.prod(tensor.shape) for tensor in tensors)
    live_numbers = int(min(numbers, sizes["stage3_max_live_parameters"] + sizes["stage3_prefetch_bucket_size"]))
    shares = list(local_parameter_counts(tensors, run.model, sharing, 0))
    lora = resolved.config.train.method == "lora"
    frozen = sum(count for count, tensor in shares if not tensor.trained or not lora)
    factors = sum(count for count, tensor in shares if tensor.trained)
    state |= {
        "weights": MemoryTerm("weights", host * number * frozen, part),
        "adapter": MemoryTerm("adapter", host * number * factors, part) if lora else None,
        "rest of segments": None,
    }
    why = f"up to stage3_max_live_parameters and the prefetched: {count_text(live_numbers)} numbers"
    return _rebuilt(
        bucketed,
        state,
        *_missing(bucketed, state),
        MemoryTerm("bucket", bucket, "DeepSpeed's reduce_bucket_size"),
        MemoryTerm(GATHERED, number * live_numbers, why, "loss"),
        MemoryTerm(GATHERED, number * live_numbers, why, "backward"),
        evaluated=number * live_numbers,
    )


def _missing(before: StepMemory, changed: dict[str, MemoryTerm | None]) -> list[MemoryTerm]:
    """Return the terms of `changed` that one process alone does not have: masters of float32 weights."""
    existing = {term.term for term in before.terms}
    return [term for name, term in changed.items() if term is not None and name not in existing]


def _tuning(path: str | None) -> dict[str, float]:
    """Read the sizes in a user's DeepSpeed file."""
    if path is None or not Path(path).expanduser().is_file():
        return {}
    document = read_json_file(Path(path).expanduser())
    section = document.get("zero_optimization") if isinstance(document, dict) else None
    section = section if isinstance(section, dict) else {}
    return {key: float(section[key]) for key in DEEPSPEED if isinstance(section.get(key), int | float)}


def _pp(run: _Run, whole: StepMemory) -> StepMemory:
    """Return the budget of the pipeline stage that needs most."""
    stages = pipeline_stages(run.model, run.sharing.size)
    return max((_stage(run, layers, rank) for rank, layers in enumerate(stages)), key=lambda memory: memory.allocated)


def fullest_stage(resolved: ResolvedConfig, model: ModelFacts, length: int | None = None) -> int:
    """Return the rank of the pipeline stage that needs most."""
    sharing = sharing_of(resolved.config)
    assert sharing is not None
    run = _Run(resolved, model, sharing, length, None, AMPERE)
    sizes = [_stage(run, layers, rank).allocated for rank, layers in enumerate(pipeline_stages(model, sharing.size))]
    return sizes.index(max(sizes))


def stage_model(model: ModelFacts, layers: range, rank: int, size: int) -> ModelFacts:
    """Return the model as one stage of a pipeline holds it; its first layer is called layer 0."""
    kept = {}
    for name, shape in model.linear_modules.items():
        parts = name.split(".")
        if not is_here(name, model, layers, rank, size):
            continue
        if "layers" in parts:
            parts[parts.index("layers") + 1] = str(int(parts[parts.index("layers") + 1]) - layers.start)
        kept[".".join(parts)] = shape
    tensors = (tensor for tensor in list_parameters(model, None) if is_here(tensor.name, model, layers, rank, size))
    numbers = sum(math.prod(tensor.shape) for tensor in tensors)
    return replace(model, num_layers=len(layers), linear_modules=kept, parameters=numbers)


def _stage(run: _Run, layers: range, rank: int) -> StepMemory:
    """Return the budget of one stage: activations of all micro batches in flight; the loss on the last stage."""
    size, count = run.sharing.size, run.micro_batches
    stage = stage_model(run.model, layers, rank, size)
    memory, batch = run.of(stage, in_buckets=True), run.batch(stage)
    in_flight = min(size - rank, count)
    state = run.number * run.model.hidden_size * batch.tokens
    sides = (rank > 0) + (rank < size - 1)
    per_batch = kept_bytes(batch) - (final_bytes(batch) if rank < size - 1 else 0)
    kept = (in_flight - 1) * per_batch
    changed: dict[str, MemoryTerm | None] = {}
    saved = 0
    if rank < size - 1:
        changed["logits"] = None
        changed["activations"] = MemoryTerm("activations", per_batch, "the newest micro batch's", "loss")
        saved = eval_bytes(batch) - eval_bytes(batch, loss=False)
    return _rebuilt(
        memory,
        changed,
        *_while_running("in flight", kept, f"activations of {plural(in_flight - 1, 'micro batch')} before it"),
        *_while_running("received states", sides * count * state, f"{count} × a hidden state per token × {sides}"),
        evaluated=state - saved,
    )


def _while_running(name: str, size: int, why: str) -> tuple[MemoryTerm, MemoryTerm]:
    """Return the terms of memory that is held while micro batches run, but not when the optimizer updates."""
    return MemoryTerm(name, size, why, "loss"), MemoryTerm(name, size, why, "backward")


_FORMS: dict[str, Callable[[_Run, StepMemory], StepMemory]] = {
    "ddp": _ddp, "fsdp": _fsdp, **dict.fromkeys(ZERO, _zero), "tp": _tp, "cp": _cp, "pp": _pp,
}  # fmt: skip
