"""A quantised base with ordinary weights again: what an adapter that was trained beside it can be merged into.

An adapter corrects the errors of the weights it was trained beside. So it belongs to those, written out in 16 or 32
bits, and not to the original ones; and never back into 4 or 8 bits, where rounding loses most of the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from surefit.model.quantize import Float8Linear, frozen_matrix, is_four_bit

MARKS = ("hf_quantizer", "is_quantized", "is_loaded_in_4bit", "quantization_method")
"""What transformers notes on a model that it has quantised; with any of them it would save it as one."""


@torch.no_grad()
def dequantize(model: PreTrainedModel) -> list[str]:
    """Replace every quantised linear layer by one with the weights it computes with, in place.

    Args:
        model: as `load_model` gives it, without an adapter.

    Returns:
        The dotted names of these layers.
    """
    found = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, Float8Linear) or (isinstance(layer, torch.nn.Linear) and is_four_bit(layer))
    }
    for name, layer in found.items():
        model.set_submodule(name, _plain(layer))
    for mark in MARKS:
        model.__dict__.pop(mark, None)
    config: Any = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return list(found)


def _plain(layer: torch.nn.Linear) -> torch.nn.Linear:
    weight = frozen_matrix(layer)
    plain = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    plain.weight = torch.nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        plain.bias = torch.nn.Parameter(layer.bias.detach().to(weight.dtype), requires_grad=False)
    return plain
