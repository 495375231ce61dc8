"""The weights that a quantized base computed with, which an adapter that was trained on it corrects.

An adapter corrects the errors of the weights that it was trained on. So it is merged into them, dequantized to 16 or 32
bits, and not into the original ones; and never back into 4 or 8 bits, where rounding loses most of the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from surefit.model.quantize import quantization_round_trip, quantized_layers

FrozenWeight = Callable[[str, torch.Tensor], torch.Tensor]
"""(parameter's name, its stored value in the compute dtype) → the weight that the model computed with."""


def use_stored_weight(_: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the stored weight: for a base that was not quantized, or that is to be merged into as it was before."""
    return tensor


def build_dequantizer(model: PreTrainedModel, kind: str) -> FrozenWeight:
    """Build the function that returns the weights of a base that was quantized during training.

    Args:
        model: the base, possibly without real weights; its layers tell which of them were quantized.
        kind: `model.quantization`.
    """
    if kind == "none":
        return use_stored_weight
    names = {f"{name}.weight" for name in quantized_layers(model)}

    def frozen(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return quantization_round_trip(kind, tensor) if name in names else tensor

    return frozen
