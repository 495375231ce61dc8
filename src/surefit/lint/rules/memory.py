"""MEM: memory limits that arithmetic alone shows to be exceeded. What might exceed them is part of the plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from surefit.config.capabilities import BITSANDBYTES
from surefit.config.resolve import ResolvedConfig
from surefit.config.schema import SureFitConfig
from surefit.config.world import count_processes, parallel_candidates, with_parallel_settings
from surefit.core.units import bytes_text
from surefit.facts.eval_prompts import EvalPromptFacts
from surefit.facts.fit_advice import CARDS
from surefit.facts.generation import (
    FOR_WEIGHTS,
    estimate_generation_memory,
    generation_room_bytes,
    held_by_training,
    largest_fitting_eval_batch,
)
from surefit.facts.hardware import GPUS, HardwareFacts
from surefit.facts.memory_formula import MOMENTS, MemoryTerm, fullest_moment_bytes
from surefit.facts.memory_per_rank import memory_terms
from surefit.facts.model import DTYPE_BYTES, ModelFacts
from surefit.facts.setup import Setup
from surefit.lint.rule import ConfigFix, Finding, LintContext, rule
from surefit.lint.rules.adapter import ABSURD, FROZEN_STORAGE

PER_ROW = ("gather", "loss", "backward")
"""Moments of a step whose memory grows with the length of the rows."""
ROOM = 0.9
"""Share of the memory that suggested settings may fill by `fullest_moment_bytes`, which is a lower bound."""
CHUNK = 2048
"""Proposed `evaluate.prefill_chunk`."""
MOST_CARDS = 8
"""Most cards of one machine that are proposed."""
SMALL_SHARE = 0.05
"""Share of the weights' memory below which making an optimizer's moments smaller is not worthwhile."""


@rule("MEM001", "does-not-fit", severity="error")
def does_not_fit(
    context: LintContext, resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts
) -> Iterator[Finding]:
    """Weights, gradients and optimizer state alone exceed the memory.

    ## What it does
    Adds up the memory of every optimizer step that does not depend on the data: the weights, the LoRA factors, the
    gradients, AdamW's two float32 moments and its float32 masters. MEM002 adds the activations, so passing this rule
    does not mean that the run fits.

    ## Why it is bad
    The run cannot start, and fails only after minutes of downloading and loading.

    ## Example
    Full training of Llama-3.1-8B in bfloat16 takes 8.03e9 × (2 + 2 + 8 + 4 + 4) bytes = 149.6 GiB, on a GPU with 79.

    ## Fix
    Make one of the changes that the finding names: settings, a larger card, more of them, or a smaller model. Each was
    tried, and fits by the formula.

    ## Evidence
    The runs of all five published reports on fine-tuning ran out of memory unexpectedly.
    """
    full = resolved.config.train.method == "full"
    yield from _too_large(
        [term for term in memory_terms(resolved, model, hardware.compute_capability) if term.moment not in PER_ROW],
        hardware,
        "train.method" if full else "model.name_or_path",
        _advice(context),
    )


def _fixed_bytes(resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts) -> int:
    """Return the bytes of an optimizer step that do not depend on the data."""
    terms = memory_terms(resolved, model, hardware.compute_capability)
    return fullest_moment_bytes([term for term in terms if term.moment not in PER_ROW])


def _advice(context: LintContext) -> str:
    """Return what makes the run fit, where it was searched for; in another tool's file no key is named."""
    return context.advice.text(not context.is_foreign) if context.advice else "use a smaller model or a larger GPU"


@rule("MEM002", "logits-do-not-fit", severity="warning")
def logits_do_not_fit(
    context: LintContext, resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts
) -> Iterator[Finding]:
    """The logits and activations of full-length rows do not fit in memory.

    ## What it does
    Adds to MEM001's terms the memory of one micro batch of `max_length` tokens: the activations, if the architecture's
    layers are known (Llama, Mistral, Qwen 2 and 3 and others), and the memory of the loss: a chunk of logits, or
    without `speed.chunked_loss` 12 bytes per token and vocabulary entry. The terms are explained under "The closed
    form" in docs/plan-method.md.

    ## Why it is bad
    The run starts, and runs out of memory at the first batch with a long enough row, which may come after hours.

    ## Example
    One row of 262,144 tokens and a vocabulary of 151,936, with `chunked_loss: false`: 445 GiB for the loss alone.

    ## Fix
    Make one of the changes that the finding names, each of which was tried; or split the tokens of each example across
    several devices (`parallel.mode: cp`; if all weights are trained, fsdp with `parallel.cp`).

    ## Evidence
    A published plan for training Qwen3-4B on 262,144 tokens counted 59 GB per GPU and left the logits out, which are
    80 GB in bfloat16.
    """
    terms = memory_terms(resolved, model, hardware.compute_capability)
    if hardware.memory_bytes is not None and _fixed_bytes(resolved, model, hardware) <= hardware.memory_bytes:
        yield from _too_large(
            terms,
            hardware,
            "data.max_length",
            _advice(context) + ("" if context.is_foreign else _suggest_context_parallel(resolved, model, hardware)),
        )


def _suggest_context_parallel(resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts) -> str:
    """Return advice on the fewest devices that can share the tokens of each example; empty if 8 do not suffice."""
    config, capacity = resolved.config, hardware.memory_bytes
    if resolved.provenance["speed.kernels"].kind == "auto":  # automatic kernels give way to another mode
        config = config.model_copy(update={"speed": config.speed.model_copy(update={"kernels": "auto"})})
    current = count_processes(config)
    for count in dict.fromkeys((current, *(n for n in (2, 4, 8) if n > current))):
        hardware_update = {"nodes": 1, "count": count} if count > current else {}
        larger = config.model_copy(update={"hardware": config.hardware.model_copy(update=hardware_update)})
        for settings in parallel_candidates(larger, count):
            candidate = replace(resolved, config=with_parallel_settings(larger, settings))
            terms = memory_terms(candidate, model, hardware.compute_capability)
            if (
                settings.get("parallel.cp", 1) > 1
                and capacity is not None
                and fullest_moment_bytes(terms) <= ROOM * capacity
            ):
                section = ", ".join(f"{key.removeprefix('parallel.')}: {value}" for key, value in settings.items())
                devices = "" if count == current else f"--gpus {count} with "
                return f", or split the tokens of each example across devices: {devices}parallel: {{{section}}}"
    return ""


def _too_large(terms: list[MemoryTerm], hardware: HardwareFacts, field: str, help_text: str) -> Iterator[Finding]:
    needed_bytes = fullest_moment_bytes(terms)
    if hardware.memory_bytes is not None and needed_bytes > hardware.memory_bytes:
        largest = max(terms, key=lambda term: term.bytes)
        yield Finding(
            field=field,
            message=f"the run needs at least {bytes_text(needed_bytes)}, but {hardware.name} has "
            f"{bytes_text(hardware.memory_bytes)}; the largest part is the {largest.term}, "
            f"{bytes_text(largest.bytes)} ({largest.why})",
            help=help_text,
            evidence="; ".join(f"{term.term} {bytes_text(term.bytes)}" for term in terms),
        )


@rule("MEM003", "offloaded-weights-cannot-train", severity="error")
def offloaded_weights_cannot_train(setup: Setup) -> Iterator[Finding]:
    """A device map moves weights to the CPU or to disk, but the model is to be trained.

    ## What it does
    Looks for `device_map` together with offloading. DeepSpeed's and FSDP's own offloading, which is made for training,
    is exempt.

    ## Why it is bad
    accelerate's hooks load a layer for its forward pass and then leave an empty tensor on the `meta` device, at which
    the backward pass stops.

    ## Example
    `device_map: auto` with `max_memory: {0: 20GiB, cpu: 60GiB}` for a 7B model on a 24 GB card.

    ## Fix
    Load the model on the GPU; if it does not fit, in 4 bits, or with DeepSpeed's or FSDP's offloading.

    ## Evidence
    A published report on training a 7B parser on one 24 GB card met "expected device meta but got cuda:0" and blamed
    gradient checkpointing. Measured: LoRA on an offloaded Llama fails the same way with and without checkpointing
    (accelerate 1.15, PEFT 0.21, transformers 5.23).
    """
    mapped = setup.device_map is not None or setup.parallel == "device_map"
    if mapped and setup.cpu_offload:
        yield Finding(
            field="cpu_offload",
            message=f"{setup.name('device_map')} offloads weights: the backward pass stops at the first of them "
            'with "expected device meta"',
            help="load the model on the GPU (in 4 bits if it does not fit), or offload with DeepSpeed or FSDP",
        )


@rule("MEM004", "eval-batch-does-not-fit", severity="warning")
def eval_batch_does_not_fit(setup: Setup, model: ModelFacts, hardware: HardwareFacts) -> Iterator[Finding]:
    """The evaluation batch does not fit in memory.

    ## What it does
    If the evaluation batch is larger than the training batch, adds the logits of full-length rows (one number per token
    and vocabulary entry) to the stored weights. Skipped if the loss is computed without full logits: TRL, Liger.

    ## Why it is bad
    Training runs for hours, and the first evaluation stops it.

    ## Example
    A training batch of 1 with transformers' default evaluation batch of 8, at 32,768 tokens and a vocabulary of
    151,936: 74 GiB of logits in bfloat16.

    ## Fix
    Use the training batch size for evaluation.

    ## Evidence
    A published report on LLM ranking ran out of memory at its evaluation; so did hiyouga/LlamaFactory#1595.
    """
    batch, micro, length = setup.eval_micro_batch, setup.micro_batch, setup.max_length
    if setup.tool == "trl" or setup.liger or batch is None or micro is None or length is None:
        return
    if not 0 < micro < batch < ABSURD or not 0 < length < ABSURD:
        return
    logits = batch * length * model.vocab_size * DTYPE_BYTES.get(setup.dtype or "", 2)
    weights = (model.parameters or 0) // 2  # half a byte each: the size in 4-bit storage, and less than in any other
    if hardware.memory_bytes is not None and logits + weights > hardware.memory_bytes:
        yield Finding(
            field="eval_micro_batch",
            message=f"{batch} rows of {length:,} tokens have {bytes_text(logits)} of logits, but {hardware.name} has "
            f"{bytes_text(hardware.memory_bytes)}; training uses a batch of {micro}",
            help=f"write {micro}, as in training",
        )


@rule("MEM005", "generation-while-training", severity="warning")
def generation_while_training(setup: Setup) -> Iterator[Finding]:
    """Answers are generated in the training loop.

    ## What it does
    Looks for evaluation by generating: `predict_with_generate`, `eval_table_size` and the like. EVL006 covers the cost
    of SureFit's own `evaluate.in_training`.

    ## Why it is bad
    The KV cache of the answers comes on top of the training memory, so a run whose steps fit can still run out of
    memory at an evaluation. And while the GPU generates token by token, it does not train.

    ## Example
    ROUGE every 200 steps on generated summaries of documents of 200,000 tokens.

    ## Fix
    Measure the loss during training, and score the checkpoints afterwards, in a separate process.

    ## Evidence
    A published report on summarizing legal documents ran out of memory there, and its authors then computed ROUGE on
    saved checkpoints. LLaMA-Factory's author advises against it too (hiyouga/LlamaFactory#1110).
    """
    if setup.generates_in_loop and setup.tool != "surefit":
        yield Finding(
            field="generates_in_loop",
            message="answers are generated during training: their KV cache comes on top of the training memory",
            help="measure the loss during training, and score checkpoints afterwards (surefit evaluate)",
        )


@rule("MEM009", "scoring-may-not-fit", severity="warning")
def scoring_may_not_fit(
    resolved: ResolvedConfig, model: ModelFacts, hardware: HardwareFacts, scored: EvalPromptFacts
) -> Iterator[Finding]:
    """Generating the scored answers may need more memory than the device has.

    ## What it does
    Adds up the peak memory of a batch of answers (`facts/generation.py`): the weights, the KV cache of the longest
    prompt and answer, and the largest temporary, which is the full attention matrix if the GPU has no kernel that
    avoids it; with `evaluate.in_training`, also the memory that training keeps. The longest prompt is taken from a
    sample of the held-out rows and of every set of `evaluate.extra_sets`. Its length is its number of bytes, or of
    tokens if it has more bytes than `data.max_length` and the tokenizer is on this machine. For sets on the hub,
    prompts are assumed to have `data.max_length` tokens.

    ## Why it is bad
    The run trains to the end, or to its first checkpoint, and then runs out of memory.

    ## Example
    `in_training: true` with the default batch of 64 prompts of 65,536 tokens: Llama-3.1-8B keeps 128 KiB per token, 512
    GiB.

    ## Fix
    Lower `evaluate.batch_size`; for very long prompts, also set `evaluate.prefill_chunk`.

    ## Evidence
    A published report on LLM ranking ran out of memory at its evaluation; one on summaries of 200,000-token documents,
    when it generated in the training loop. Evaluation, unlike training, keeps rows that are longer than
    `data.max_length`.
    """
    if hardware.memory_bytes is None or _fixed_bytes(resolved, model, hardware) > hardware.memory_bytes:
        return  # unknown; or MEM001, whose changes decide what is scored
    max_length = resolved.config.data.max_length
    if resolved.config.evaluate.in_training:  # the model in training generates the answers, on its own device
        training_memory = held_by_training(memory_terms(resolved, model, hardware.compute_capability))
        finding = _too_large_to_answer(
            resolved.config, model, hardware, scored.held_out.longest or max_length, training_memory
        )
        if finding is not None:
            yield finding
            return
    finding = _too_large_to_answer(resolved.config, model, hardware, scored.longest(max_length))
    if finding is not None:
        yield finding


def _too_large_to_answer(
    config: SureFitConfig,
    model: ModelFacts,
    hardware: HardwareFacts,
    longest: int,
    held: tuple[int | None, int] | None = None,
) -> Finding | None:
    """Return a finding if answers to prompts of this length do not fit, alone or beside training (`held` bytes)."""
    estimate = estimate_generation_memory(config, model, hardware.kind, longest, hardware.compute_capability)
    if estimate is None or hardware.memory_bytes is None:
        return None
    room, weights, training_bytes = generation_room_bytes(estimate, config, hardware) or 0, estimate.weights, 0
    if held is not None:
        weights, training_bytes, room = held[0] or weights, held[1], hardware.memory_bytes
    needed_bytes = estimate.bytes - estimate.weights + weights
    if needed_bytes + training_bytes <= room:
        return None
    fitting_batch = largest_fitting_eval_batch(
        config, model, hardware, room - training_bytes - weights + estimate.weights, longest
    )
    help_text = f"write {fitting_batch}"
    if held is not None and not fitting_batch:
        later = _too_large_to_answer(config, model, hardware, longest)
        help_text = "set evaluate.in_training: false, and score after training: surefit evaluate"
        help_text += f"; there, {later.help}" if later else ""
    elif weights > room:
        help_text = _score_elsewhere(config, hardware, needed_bytes)
    elif not fitting_batch:
        in_chunks = config.model_copy(
            update={"evaluate": config.evaluate.model_copy(update={"batch_size": 1, "prefill_chunk": CHUNK})}
        )
        least = estimate_generation_memory(in_chunks, model, hardware.kind, longest, hardware.compute_capability)
        fits = least is not None and least.bytes - least.weights + weights + training_bytes <= room
        help_text = f"write 1, with evaluate.prefill_chunk: {CHUNK}" if fits else "score shorter prompts"
    rows_text = "one prompt" if estimate.rows == 1 else f"a batch of {estimate.rows} prompts"
    training_text = f", on top of {bytes_text(training_bytes)} for training" if training_bytes else ""
    return Finding(
        field="evaluate.batch_size",
        message=f"{rows_text} with up to {estimate.prompt:,} tokens needs up to "
        f"{bytes_text(needed_bytes)} (weights {bytes_text(weights)}, KV cache "
        f"{bytes_text(estimate.cache)}){training_text}, but {hardware.name} has {bytes_text(room)}",
        help=help_text,
    )


def _score_elsewhere(config: SureFitConfig, hardware: HardwareFacts, needed: int) -> str:
    """Return advice for weights that are too large to generate with, though they were trained, in fewer bits or on
    several devices."""
    if hardware.kind == "cpu":
        return f"score on a machine with {bytes_text(needed)} of memory or more"
    card = next((name for name in CARDS if (GPUS[name].memory_bytes or 0) >= needed), None)
    ways = [f"score on a {CARDS[card]} GB card or larger"] if card else []
    count = math.ceil(needed / (FOR_WEIGHTS * (hardware.memory_bytes or 1)))
    ways += [f"on a machine with {count} of these"] if count <= MOST_CARDS else []
    if config.model.quantization != "none":
        ways.append(
            "or without the merged model, as `surefit run` does: "
            "surefit evaluate CONFIG --variant base --variant adapter"
        )
    return ", ".join(ways) or "use a smaller model"


@rule("MEM007", "cache-with-checkpointing", severity="info")
def cache_with_checkpointing(setup: Setup) -> Iterator[Finding]:
    """`use_cache` is on, but gradient checkpointing switches the KV cache off.

    ## What it does
    Looks for `use_cache: true` together with gradient checkpointing.

    ## Why it is bad
    With the models in transformers it is harmless: the setting is ignored, with a warning. Models with custom code may
    keep the cache, and then the recomputed forward pass differs from the first.

    ## Example
    `use_cache: true` from a config for inference.

    ## Fix
    Write `use_cache: false`: training does not need the cache.

    ## Evidence
    transformers 5.23, `modeling_layers.py`: "Caching is incompatible with gradient checkpointing in …".
    """
    if setup.use_cache and setup.gradient_checkpointing:
        yield Finding(
            field="use_cache",
            message=f"{setup.name('use_cache')} has no effect: gradient checkpointing switches the cache off",
            help="write false",
        )


@rule("MEM008", "small-moments-quantized", severity="info")
def small_moments_quantised(setup: Setup, model: ModelFacts) -> Iterator[Finding]:
    """An 8-bit or paged optimizer saves next to no memory here.

    ## What it does
    With LoRA and an 8-bit or paged optimizer, compares the memory of AdamW's float32 moments of the factors with the
    memory of the weights.

    ## Why it is bad
    It saves a few percent of the memory. In return each moment has only 256 possible values, and every factor is
    updated by a separate kernel.

    ## Example
    `optim: adamw_8bit` for LoRA of rank 16 on Llama-3.1-8B: 0.3 GiB of moments beside 15 GiB of weights.

    ## Fix
    Write `adamw`. The 8-bit optimizers are for training all weights.

    ## Evidence
    Dettmers et al. 2022 (arXiv 2110.02861) report their savings for full training. Each trained parameter has 8 bytes
    of moments, and LoRA trains about one parameter in a hundred.
    """
    if setup.adapter in (None, "full") or setup.optimizer not in BITSANDBYTES or not setup.lora_r:
        return
    if not model.parameters or setup.modules_to_save or setup.lora_r >= ABSURD:
        return
    moments = MOMENTS * sum(setup.lora_r * (inputs + outputs) for outputs, inputs in model.linear_modules.values())
    bytes_per_weight = 0.5 if setup.quantization in FROZEN_STORAGE else DTYPE_BYTES.get(setup.dtype or "", 2)
    weights = int(bytes_per_weight * model.parameters)
    if moments < SMALL_SHARE * weights:
        yield Finding(
            field="optimizer",
            message=f"{setup.name('optimizer')} {setup.optimizer} with LoRA saves little: the moments need at most "
            f"{bytes_text(moments)} in float32, the weights {bytes_text(weights)}",
            help="write adamw",
            fix=ConfigFix("train.optim", "adamw_torch") if setup.tool == "surefit" else None,
        )
