"""What a quantised base computed with: the weights that an adapter which was trained beside it belongs to.

An adapter corrects the errors of the weights it was trained beside. So it belongs to those, written out in 16 or 32
bits, and not to the original ones; and never back into 4 or 8 bits, where rounding loses most of the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from surefit.model.quantize import quantization_round_trip, quantized_layers

FrozenWeight = Callable[[str, torch.Tensor], torch.Tensor]
"""(parameter's name, its stored value in the type of the arithmetic) → what the model computed with."""


def use_stored_weight(_: str, tensor: torch.Tensor) -> torch.Tensor:
    """The weights of a base that was not quantised, or that is to be merged into as it was before."""
    return tensor


def build_dequantizer(model: PreTrainedModel, kind: str) -> FrozenWeight:
    """For a base that was quantised while it was trained beside.

    Args:
        model: the base, possibly without real weights; its layers tell which of them were quantised.
        kind: `model.quantization`.
    """
    if kind == "none":
        return use_stored_weight
    names = {f"{name}.weight" for name in quantized_layers(model)}

    def frozen(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return quantization_round_trip(kind, tensor) if name in names else tensor

    return frozen
