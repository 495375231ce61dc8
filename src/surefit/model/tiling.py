"""Tiled MLPs: for contexts so long that the activations inside one layer's MLP do not fit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from surefit.core.errors import ModelError
from surefit.model.compat import wrap_forward

NAMES = ("mlp", "feed_forward")
"""transformers' names for the MLP of a decoder layer, where it is one module."""
FIELD = "speed.tiled_mlp"


def tile_mlps(model: torch.nn.Module, tokens: int) -> int:
    """Let the MLP of every decoder layer process `tokens` tokens at a time, and recompute in the backward pass.

    An MLP treats every token independently, so outputs and gradients stay the same up to the order of sums. Of its
    inner activations, about 3 × intermediate size numbers per token, only one tile's exist at a time: with 200,000
    tokens, an intermediate size of 9,728 and 16 bits 11.7 GB become 0.24 GB in tiles of 4,096. The price is one more
    forward pass of the MLPs; inside a recomputed layer (model/checkpointing.py) too.

    Call it last: it wraps the current forward pass of the modules.

    Args:
        model: with or without LoRA factors. It is changed in place, and all names stay the same.
        tokens: tokens of a tile, at least 1.

    Returns:
        Number of MLPs that are tiled.

    Raises:
        ModelError: a decoder layer has no MLP of its own, or one that may not treat every token independently.
    """
    mlps = list(_mlps(model))
    for name, mlp in mlps:
        if (obstacle := _obstacle(mlp)) is not None:
            raise ModelError(f"{name} {obstacle}", code="E5067", field=FIELD, help="set speed.tiled_mlp: false")
    if not mlps:
        raise ModelError(
            f"no decoder layer has a module named {' or '.join(NAMES)}",
            code="E5068",
            field=FIELD,
            help="set speed.tiled_mlp: false",
        )
    for _, mlp in mlps:
        wrap_forward(mlp, lambda forward: _tiled(forward, tokens))
    return len(mlps)


def _tiled(forward: Callable[..., Any], tokens: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def tiled(hidden: torch.Tensor) -> torch.Tensor:
        """Run the MLP on hidden (..., size) in tiles; the result has the same shape."""
        row = hidden.reshape(1, -1, hidden.shape[-1])
        # split, not slices: its backward pass joins the gradients once, where each slice would add a whole tensor.
        tiles = torch.split(row, tokens, dim=1)
        return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in tiles], dim=1).view_as(hidden)

    return tiled


def _mlps(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the MLP of every module of a list, the container of decoder layers."""
    for list_name, layers in model.named_modules():
        if isinstance(layers, torch.nn.ModuleList):
            for index, layer in enumerate(layers):
                for name in NAMES:
                    if isinstance(mlp := getattr(layer, name, None), torch.nn.Module):
                        yield f"{list_name}.{index}.{name}", mlp


def _obstacle(mlp: torch.nn.Module) -> str | None:
    """Return why a module cannot be tiled; None where its only input is the hidden states and it is made of linear
    layers."""
    _, *parameters = inspect.signature(type(mlp).forward).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(required) != 1:
        return f"takes {', '.join(p.name for p in required)}, not hidden states alone"
    parts = {name: module for name, module in mlp.named_modules() if module is not mlp}
    if experts := [name for name in parts if "expert" in name or "router" in name]:
        return f"is a mixture of experts ({experts[0]})"
    for name, module in parts.items():
        if not _treats_tokens_alone(module):
            return f"has a part, {name} ({type(module).__name__}), that may see more than one token"
    matrices = [name for name, parameter in mlp.named_parameters(recurse=False) if parameter.ndim > 1]
    return f"has its own weights ({matrices[0]})" if matrices else None


def _treats_tokens_alone(module: torch.nn.Module) -> bool:
    """Return whether a part of an MLP is a linear layer, LoRA beside it, a norm, or has no weights (activations,
    dropout)."""
    if isinstance(module, torch.nn.Linear | Conv1D | torch.nn.ModuleDict | torch.nn.ParameterDict):
        return True
    # A LoRA layer has its weights in submodules; a norm has vectors.
    return all(parameter.ndim <= 1 for parameter in module.parameters(recurse=False))
