"""What answering a batch of prompts takes of the device, by arithmetic: weights, the KV cache, and the widest moment.

Per token of a row the cache has 2 (keys and values) × layers × key heads × head width numbers. Reading the prompts is
widest either in an MLP, which has three tensors of its inner width, or in attention, whose mask of a padded batch has a
number for each pair of tokens beside the queries, keys and values of one layer. Writing the answers is widest at its
last token, when the cache is longest and one layer's keys are being extended, beside two float32 copies of the last
position's logits.

Worked example, Llama-3.1-8B in bfloat16: 2 × 32 × 8 × 128 × 2 bytes are 128 KiB a token; 16 prompts of 2,048 tokens
with answers of 256 have a cache of 4.5 GiB beside 14.96 GiB of weights.

Source: transformers 5.23 (`cache_utils.DynamicCache`, `masking_utils`), recorded on a CPU, where
tests/plan/test_generation.py compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from surefit.config.schema import Config
from surefit.facts.hardware import HardwareFacts
from surefit.facts.model import DTYPE_BYTES, ModelFacts

FLOAT32 = 4
FOR_WEIGHTS = 0.8
"""Of a GPU's free memory; the rest is left for the keys and values of the answers and for what is being computed."""


@dataclass(frozen=True)
class Answering:
    """What a batch of answers takes at most.

    Attributes:
        rows: sequences at a time: prompts, or beams of them.
        prompt: tokens of the longest prompt; answer: of the longest answer.
        weights: bytes; cache: of keys and values when the answers are longest; beside: what else is there at the
            widest moment.
    """

    rows: int
    prompt: int
    answer: int
    weights: int
    cache: int
    beside: int

    @property
    def bytes(self) -> int:
        """At the fullest moment."""
        return self.weights + self.cache + self.beside


def answering(config: Config, model: ModelFacts, kind: str, longest: int | None = None) -> Answering | None:
    """What `evaluate` takes with this config; None where the model's size is not known, and where a server answers.

    Args:
        config: nothing in it is "auto".
        kind: of the device; on a GPU kernels are not counted on that read grouped keys as they are.
        longest: tokens of the longest prompt; `data.max_length` where it is not known.
    """
    section, number = config.evaluate, DTYPE_BYTES[config.model.dtype]
    if model.parameters is None or section.server is not None:
        return None
    assert isinstance(section.batch_size, int)
    prompt = min(config.data.max_length, longest or config.data.max_length)
    total = prompt + section.max_new_tokens
    rows = section.batch_size * section.num_beams
    read = rows * min(prompt, section.prefill_chunk or prompt)  # tokens that are read at a time
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    layer_cache = 2 * keys * number  # per token
    small = rows * (40 * total + 2 * FLOAT32 * model.vocab_size)  # ids, masks and positions; logits in float32, twice
    # Around a layer: the residual stream, its sums, the positions.
    around = read * number * (4 * model.hidden_size + 2 * model.head_dim)
    mlp = 3 * read * number * (model.intermediate_size or 4 * model.hidden_size)
    attention = number * (read * prompt + 2 * read * queries + 2 * rows * prompt * queries)
    reading = model.num_layers * rows * prompt * layer_cache + read * prompt + around + max(mlp, attention)
    cache = model.num_layers * rows * total * layer_cache
    repeated = 2 * rows * total * queries * number if kind == "cuda" else 0
    most = small + max(reading, cache + max(rows * total * layer_cache, repeated))
    return Answering(rows, prompt, section.max_new_tokens, number * model.parameters, cache, max(0, most - cache))


def room_for(found: Answering, config: Config, hardware: HardwareFacts) -> int | None:
    """Bytes that answering has: one device's; where that does not hold the weights, those of all GPUs of the machine,
    with the layers spread over them (`model/layers.py`)."""
    count = config.hardware.count
    if hardware.memory_bytes is None or hardware.kind != "cuda" or not isinstance(count, int):
        return hardware.memory_bytes
    there = max(count, hardware.gpu_count if hardware.source == "detected" else 1)
    return hardware.memory_bytes * (there if found.weights > FOR_WEIGHTS * hardware.memory_bytes else 1)


def fitting_prompts(model: ModelFacts, hardware: HardwareFacts) -> Callable[[Config], int | None]:
    """(config) → its `evaluate.batch_size`, or the largest below it that surely fits; None where that is not known.

    `config.resolve` takes it, to decide what "auto" becomes.
    """

    def fitting(config: Config) -> int | None:
        found = answering(config, model, hardware.kind)
        room = room_for(found, config, hardware) if found else None
        if found is None or room is None:
            return None
        size = config.evaluate.batch_size
        assert isinstance(size, int)
        return size if found.bytes <= room else max(1, most_prompts(config, model, hardware.kind, room))

    return fitting


def most_prompts(config: Config, model: ModelFacts, kind: str, room: int, longest: int | None = None) -> int:
    """The largest `evaluate.batch_size` below the config's own with which answering needs at most `room`, or 0."""
    assert isinstance(config.evaluate.batch_size, int)
    few, many = 0, config.evaluate.batch_size
    while few + 1 < many:
        middle = (few + many) // 2
        section = config.evaluate.model_copy(update={"batch_size": middle})
        found = answering(config.model_copy(update={"evaluate": section}), model, kind, longest)
        few, many = (middle, many) if found is not None and found.bytes <= room else (few, middle)
    return few
