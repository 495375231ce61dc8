"""FLOPs of a training step, and their share of the GPU's peak: MFU.

Counted is the arithmetic that the mathematics needs, not what a program happens to do (PaLM, Chowdhery et al. 2022,
appendix B, arXiv:2204.02311): padding, logits that no loss uses and recomputed activations are not in it, so gradient
checkpointing lowers the MFU. Only matrix products count.

A product with a matrix of N numbers costs 2 N per token forward, 2 N for the gradient of its input, 2 N for the
gradient of the matrix. Frozen matrices: 4 N; trained ones, LoRA factors among them: 6 N. Below the first layer nothing
is trained with LoRA, so its queries, keys and values need no gradient of their input: 2 N less. The output head is
needed at supervised tokens only. For each pair of positions of which one sees the other, attention does two products
over the width of all heads: 4 per pair and number forward, twice that backward. A document of L tokens has
L (L + 1) / 2 pairs; with a window of W, no position sees more than W.

Worked example, Llama-3.1-8B with LoRA r = 8 on all linear layers, one document of 2,048 tokens, all but the first
supervised: 6,979,321,856 numbers in the layers' matrices and 20,971,520 in the factors; less, in the first layer,
2 × 25,165,824 and 2 × 3 × 8 × 4,096: 27,992,588,288 per token. The head: 4 × 525,336,576 = 2,101,346,304 per
supervised token. Attention: 12 × 4,096 × 32 layers = 1,572,864 per pair, of which there are 2,098,176. Together
64,930,422,194,176: 65.7 ms at the 989 TFLOP/s of an H100.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefit.config.resolve import HardwareLike
from surefit.config.schema import SureFitConfig
from surefit.facts.architecture import text_section
from surefit.facts.gpus import find_gpu
from surefit.facts.memory_formula import OUTPUT_HEADS, target_modules
from surefit.facts.model import ModelFacts

FORWARD = INPUT_GRADIENT = WEIGHT_GRADIENT = 2
"""FLOPs per number of a matrix and token: a multiplication and an addition."""
FROZEN, TRAINED = FORWARD + INPUT_GRADIENT, FORWARD + INPUT_GRADIENT + WEIGHT_GRADIENT
ATTENTION = 3 * 2 * FORWARD
"""Per pair and number of the heads' width: two products forward, four backward."""
FIRST_INPUTS = ("q_proj", "k_proj", "v_proj", "qkv_proj")


@dataclass(frozen=True)
class TrainingFlops:
    """The arithmetic of training a model, in FLOPs.

    Attributes:
        token: per token, in the matrices of the layers.
        supervised: per token that the loss counts, in the output head.
        pair: per pair of positions that may see each other, in one layer.
        windows: for each layer, how many positions a position sees at most, itself included; None: all before it.
    """

    token: int
    supervised: int
    pair: int
    windows: tuple[int | None, ...]

    def of(self, documents: Sequence[int], supervised: int, shared: Sequence[int] = ()) -> int:
        """Return the FLOPs of forward and backward over documents of these lengths in tokens, with `supervised` tokens
        in all.

        Args:
            shared: tokens of the prompts that two of the documents begin with, and that are computed once.
        """
        pairs = sum(
            self.windows.count(window)
            * (sum(seen_pairs(n, window) for n in documents) - sum(seen_pairs(n, window) for n in shared))
            for window in set(self.windows)
        )
        return self.token * (sum(documents) - sum(shared)) + self.supervised * supervised + self.pair * pairs


def training_flops(
    model: ModelFacts, config: SureFitConfig, windows: Sequence[int | None] | None = None
) -> TrainingFlops | None:
    """Return the FLOPs of training a model.

    Args:
        model: facts about the base model.
        config: its adapter determines what is trained.
        windows: result of `windows_of`; none by default.

    Returns:
        None where not every matrix is known to be used once per token: mixtures of experts, hybrids, and other models
        for which `facts/architecture.py` has no closed form.
    """
    if model.expected_parameters is None or not model.linear_modules:
        return None
    adapter = config.adapter
    rank = adapter.r if adapter else 0
    per_number = FROZEN if adapter else TRAINED
    adapted = target_modules(model, adapter) if adapter else {}
    factors = {name: rank * sum(shape) for name, shape in adapted.items()}
    token, head = 0, per_number * model.vocab_size * model.hidden_size
    for name, shape in model.linear_modules.items():
        last = name.rpartition(".")[2]
        if last in OUTPUT_HEADS:
            head += TRAINED * factors.get(name, 0)
            continue
        token += per_number * math.prod(shape) + TRAINED * factors.get(name, 0)
        if adapter and not model.new_tokens and last in FIRST_INPUTS and ".0." in name:
            token -= INPUT_GRADIENT * (math.prod(shape) + (rank * shape[1] if name in factors else 0))
    pair = ATTENTION * model.num_attention_heads * model.head_dim
    return TrainingFlops(token, head, pair, tuple(windows or [None] * model.num_layers))


def windows_of(config: Mapping[str, Any], layers: int) -> list[int | None]:
    """Return the attention window of each layer.

    Args:
        config: a transformers config as a dictionary, which, unlike config.json, always lists the layers with a window.
        layers: number of layers.

    >>> windows_of({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}, 2)
    [512, None]
    >>> windows_of({"sliding_window": 4096}, 1), windows_of({"sliding_window": 4096, "use_sliding_window": False}, 1)
    ([4096], [None])
    """
    section = text_section(config)
    window = section.get("sliding_window")
    if not isinstance(window, int) or section.get("use_sliding_window") is False:
        return [None] * layers
    kinds = section.get("layer_types") or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def seen_pairs(length: int, window: int | None = None) -> int:
    """Count the pairs (position, position it sees) in a document, itself included.

    >>> seen_pairs(4), seen_pairs(4, 2), seen_pairs(4, 9)
    (10, 7, 10)
    """
    width = length if window is None else min(length, window)
    return width * (width + 1) // 2 + (length - width) * width


def peak_flops(hardware: HardwareLike, dtype: str) -> float | None:
    """Return the vendor's dense FLOP/s of matrix products; None on a CPU, and for a GPU that is not known."""
    gpu = find_gpu(hardware.name) if hardware.kind == "cuda" else None
    return gpu.flops(dtype) if gpu else None
