"""Router load statistics of a mixture of experts during training, for metrics.jsonl."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from surefit.facts.experts import is_stack

DEAD = 0.1
"""An expert that gets less than this share of an even load counts as dead in that step."""
ENOUGH = 30
"""Tokens per expert at an even load from which on a dead expert is hardly chance: Poisson's probability of less than a
tenth is 5e-6, even where every token is counted twice because layers are recomputed."""


class ExpertUse:
    """Counts the tokens that each layer routes to each of its experts in training mode, padding included.

    The counts stay on the device and are copied to the host once per step, in one transfer, without other waits for the
    device. A model that does not pass the chosen experts' numbers to its expert modules (Llama 4) is not counted.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._counts: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            parameters = dict(module.named_parameters(recurse=False))
            stacks = [tensor for key, tensor in parameters.items() if is_stack(f"experts.{key}", tensor.ndim)]
            if stacks:
                module.register_forward_pre_hook(partial(self._count, name, len(stacks[0])))

    def _count(self, name: str, experts: int, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        expert_ids = next(
            (argument for argument in args[1:] if isinstance(argument, torch.Tensor) and argument.dtype == torch.int64),
            None,
        )
        if expert_ids is None or not module.training:
            return
        if name not in self._counts:
            self._counts[name] = torch.zeros(experts, device=expert_ids.device)
        flat = expert_ids.flatten()
        self._counts[name].scatter_add_(0, flat, torch.ones((), device=flat.device).expand(flat.shape))

    def taken(self) -> dict[str, Any]:
        """Return the statistics since the last call, and reset the counts; empty without experts.

        Returns:
            `expert_entropy`: the smallest entropy of the token shares over the layers, divided by the entropy of an
            even load. `expert_max_share`: the largest share of one expert. `expert_use`: per layer [layer number,
            number of experts, largest share, dead experts]; the last is null where the tokens are too few to tell.
        """
        if not self._counts:
            return {}
        sizes = [len(layer_counts) for layer_counts in self._counts.values()]
        layers = [_layer(name) for name in self._counts]
        counts = pad_sequence(list(self._counts.values()), batch_first=True)
        self._counts.clear()
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
        even_load = counts.sum(1) / torch.tensor(sizes, device=counts.device)
        unused = (counts < DEAD * even_load[:, None]).sum(
            1
        )  # includes the padding of layers with fewer experts, subtracted below
        statistics = torch.stack([torch.special.entr(shares).sum(1), shares.amax(1), unused, even_load])
        entropies, largest, dead, even_loads = statistics.tolist()
        return {
            "expert_entropy": min(
                entropy / math.log(max(2, size)) for entropy, size in zip(entropies, sizes, strict=True)
            ),
            "expert_max_share": max(largest),
            "expert_use": [
                [layer, size, round(share, 4), int(number) - counts.shape[1] + size if tokens >= ENOUGH else None]
                for layer, size, share, number, tokens in zip(layers, sizes, largest, dead, even_loads, strict=True)
            ],
        }


def _layer(name: str) -> int:
    """Return the number of the layer that a module belongs to; 0 if its name has none.

    >>> _layer("model.layers.3.mlp.experts")
    3
    """
    match = re.search(r"\.(\d+)\.", name)
    return int(match[1]) if match else 0
