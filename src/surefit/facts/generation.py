"""Memory for generating answers to a batch of prompts, by arithmetic: weights, the KV cache, and the peak beside them.

Per token of a row the cache has 2 (keys and values) × layers × key heads × head width numbers. Reading the prompts
peaks either in an MLP, which has three tensors of its inner width, or in attention, whose mask of a padded batch has a
number for each pair of tokens beside the queries, keys and values of one layer. Where the kernel materializes the
attention logits (`facts/sdpa.py`: bfloat16 before Ampere, for one), each query head holds several numbers for each such
pair, and queries, keys and values are copied in float32. Writing the answers peaks at the last token, when the cache is
longest and one layer's keys are being extended, beside two float32 copies of the last position's logits.

Worked example, Llama-3.1-8B in bfloat16: 2 × 32 × 8 × 128 × 2 bytes are 128 KiB a token; 16 prompts of 2,048 tokens
with answers of 256 have a cache of 4.5 GiB beside 14.96 GiB of weights. On a T4 the logits of one layer's 32 heads
need 16 × 2,048² × 32 × 13 bytes = 26 GiB more.

Source: transformers 5.23 (`cache_utils.DynamicCache`, `masking_utils`), recorded on a CPU, where
tests/plan/test_generation.py compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from surefit.config.schema import SureFitConfig
from surefit.facts.activations import FLOAT32
from surefit.facts.hardware import HardwareFacts
from surefit.facts.memory_formula import MemoryTerm
from surefit.facts.model import DTYPE_BYTES, ModelFacts
from surefit.facts.sdpa import AttentionCall, Capability, Kernel, select_kernel

MATH_PAIR = 3 * FLOAT32 + 1
"""Bytes for each query head and pair of tokens in torch's math kernel (attention.cpp): the masked logits, their
softmax, the boolean mask of rows that are all minus infinity, and the result."""
FOR_WEIGHTS = 0.8
"""Share of a GPU's free memory for weights; the rest is left for the answers' keys and values and for temporaries."""


@dataclass(frozen=True)
class GenerationMemory:
    """Largest memory of a batch of answers.

    Attributes:
        rows: sequences at a time: prompts, or beams of them.
        prompt: tokens of the longest prompt; answer: tokens of the longest answer.
        weights: bytes of the weights; cache: bytes of keys and values when the answers are longest; beside: other bytes
            at the peak.
    """

    rows: int
    prompt: int
    answer: int
    weights: int
    cache: int
    beside: int

    @property
    def bytes(self) -> int:
        """Bytes at the peak."""
        return self.weights + self.cache + self.beside


def estimate_generation_memory(
    config: SureFitConfig,
    model: ModelFacts,
    kind: str,
    longest: int | None = None,
    capability: Capability | None = None,
) -> GenerationMemory | None:
    """Return the memory of `evaluate` with this config; None where the model's size is not known or a server answers.

    Args:
        config: a config without "auto".
        kind: kind of the device; on a GPU, kernels that support grouped keys without a copy are not assumed.
        longest: tokens of the longest prompt; `data.max_length` where it is not known. Neither a prompt nor an answer
            exceeds the model's context.
        capability: compute capability of the GPU; None on a CPU, and where it is not known: then no kernel is assumed
            to materialize the logits.
    """
    section, number = config.evaluate, DTYPE_BYTES[config.model.dtype]
    if model.parameters is None or section.server is not None:
        return None
    assert isinstance(section.batch_size, int)
    prompt, total = longest or config.data.max_length, (longest or config.data.max_length) + section.max_new_tokens
    if model.max_position_embeddings:
        prompt, total = min(prompt, model.max_position_embeddings), min(total, model.max_position_embeddings)
    rows = section.batch_size * section.num_beams
    read_tokens = rows * min(prompt, section.prefill_chunk or prompt)  # tokens that are read at a time
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    layer_cache = 2 * keys * number  # per token
    # Ids, masks and positions; logits in float32, twice.
    fixed_bytes = rows * (40 * total + 2 * FLOAT32 * model.vocab_size)
    # Around a layer: the residual stream, its sums, the positions.
    residual = read_tokens * number * (4 * model.hidden_size + 2 * model.head_dim)
    mlp = 3 * read_tokens * number * (model.intermediate_size or 4 * model.hidden_size)
    attention = number * (read_tokens * prompt + 2 * read_tokens * queries + 2 * rows * prompt * queries)
    math = 0
    if capability is not None and _kernel(config, model, capability, masked=rows > 1) == "math":
        heads = model.num_attention_heads
        attention += MATH_PAIR * read_tokens * prompt * heads + FLOAT32 * (
            read_tokens * queries + 2 * rows * prompt * queries
        )
        math = rows * total * (2 * FLOAT32 * queries + MATH_PAIR * heads)
    reading = model.num_layers * rows * prompt * layer_cache + read_tokens * prompt + residual + max(mlp, attention)
    cache = model.num_layers * rows * total * layer_cache
    repeated = 2 * rows * total * queries * number if kind == "cuda" else 0
    peak = fixed_bytes + max(reading, cache + max(rows * total * layer_cache, repeated + math))
    return GenerationMemory(rows, prompt, total - prompt, number * model.parameters, cache, max(0, peak - cache))


def _kernel(config: SureFitConfig, model: ModelFacts, capability: Capability, masked: bool) -> Kernel:
    """Return the kernel that prompts are read in; several at a time are padded, and so masked."""
    return select_kernel(
        AttentionCall(capability, config.model.dtype, model.head_dim, model.head_dim, masked=masked, trained=False)
    )


def held_by_training(terms: Sequence[MemoryTerm]) -> tuple[int | None, int]:
    """Return (weights, everything else) in bytes that training holds on the device while the trained model generates;
    None for the weights where the model's size is not known."""
    always = [term for term in terms if term.moment == "always"]
    weights = [term.bytes for term in always if term.term == "weights"]
    return (weights[0] if weights else None), sum(term.bytes for term in always) - sum(weights)


def generation_room_bytes(found: GenerationMemory, config: SureFitConfig, hardware: HardwareFacts) -> int | None:
    """Return the bytes available for generation: one device's; if it cannot hold the weights, of all GPUs of
    the machine, with the layers spread over them (`model/layers.py`)."""
    count = config.hardware.count
    if hardware.memory_bytes is None or hardware.kind != "cuda" or not isinstance(count, int):
        return hardware.memory_bytes
    gpus = max(count, hardware.gpu_count if hardware.source == "detected" else 1)
    return hardware.memory_bytes * (gpus if found.weights > FOR_WEIGHTS * hardware.memory_bytes else 1)


def merged_weights_too_large(config: SureFitConfig, model: ModelFacts, hardware: HardwareFacts) -> bool:
    """Return whether a GPU trains a LoRA over a base in few bits but does not hold the merged model, whose weights are
    not quantized.

    Args:
        config: a config without "auto".
    """
    quantized = config.model.quantization != "none" and config.train.method == "lora"
    if not quantized or hardware.kind != "cuda" or hardware.memory_bytes is None or model.parameters is None:
        return False
    memory = estimate_generation_memory(config, model, hardware.kind, None, hardware.compute_capability)
    room = generation_room_bytes(memory, config, hardware) if memory else None
    return memory is not None and room is not None and memory.weights > room


def eval_batch_chooser(model: ModelFacts, hardware: HardwareFacts) -> Callable[[SureFitConfig], int | None]:
    """Return a function (config) → its `evaluate.batch_size`, or the largest below it that surely fits; None where that
    is not known.

    `config.resolve` uses it to decide what "auto" becomes.
    """

    def fitting(config: SureFitConfig) -> int | None:
        memory = estimate_generation_memory(config, model, hardware.kind, None, hardware.compute_capability)
        room = generation_room_bytes(memory, config, hardware) if memory else None
        if memory is None or room is None:
            return None
        size = config.evaluate.batch_size
        assert isinstance(size, int)
        return size if memory.bytes <= room else max(1, largest_fitting_eval_batch(config, model, hardware, room))

    return fitting


def largest_fitting_eval_batch(
    config: SureFitConfig, model: ModelFacts, hardware: HardwareFacts, room: int, longest: int | None = None
) -> int:
    """Return the largest `evaluate.batch_size` below the config's own that needs at most `room` bytes, or 0."""
    assert isinstance(config.evaluate.batch_size, int)
    low, high = 0, config.evaluate.batch_size
    while low + 1 < high:
        middle = (low + high) // 2
        section = config.evaluate.model_copy(update={"batch_size": middle})
        candidate = config.model_copy(update={"evaluate": section})
        memory = estimate_generation_memory(candidate, model, hardware.kind, longest, hardware.compute_capability)
        low, high = (middle, high) if memory is not None and memory.bytes <= room else (low, middle)
    return low
