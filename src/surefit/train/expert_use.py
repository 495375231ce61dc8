"""How evenly a mixture uses its experts while it trains: what metrics.jsonl says of it."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from surefit.facts.experts import is_stack

DEAD = 0.1
"""An expert that took less than this part of an even share is dead in that step."""
ENOUGH = 30
"""Tokens that an even use would have to give each expert, so that a dead one is hardly chance: Poisson's probability of
less than a tenth is 5e-6, even where every token is counted twice because layers are recomputed."""


class ExpertUse:
    """Counts the tokens that each layer of a model in training sends to each of its experts, padding among them.

    The counts stay on the device: a step's go to the host in one transfer, and nothing else waits for the device. A
    model whose experts are not told which of them were chosen (Llama 4's, which all read something) is not counted.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._counts: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            stacks = [tensor for key, tensor in own.items() if is_stack(f"experts.{key}", tensor.ndim)]
            if stacks:
                module.register_forward_pre_hook(partial(self._count, name, len(stacks[0])))

    def _count(self, name: str, experts: int, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        chosen = next((each for each in args[1:] if isinstance(each, torch.Tensor) and each.dtype == torch.int64), None)
        if chosen is None or not module.training:
            return
        if name not in self._counts:
            self._counts[name] = torch.zeros(experts, device=chosen.device)
        flat = chosen.flatten()
        self._counts[name].scatter_add_(0, flat, torch.ones((), device=flat.device).expand(flat.shape))

    def taken(self) -> dict[str, Any]:
        """What was counted since the last call; empty without experts.

        Returns:
            `expert_entropy`: of the layers the smallest entropy of the tokens' shares, as a part of what an even use
            has. `expert_max_share`: the largest share that one expert had. `expert_use`: of each layer its number,
            how many experts it has, the largest share, and how many are dead: null where the tokens are too few to say.
        """
        if not self._counts:
            return {}
        sizes = [len(each) for each in self._counts.values()]
        layers = [_layer(name) for name in self._counts]
        counts = pad_sequence(list(self._counts.values()), batch_first=True)
        self._counts.clear()
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
        evenly = counts.sum(1) / torch.tensor(sizes, device=counts.device)
        unused = (counts < DEAD * evenly[:, None]).sum(1)  # what a layer with fewer experts lacks among them
        measured = torch.stack([torch.special.entr(shares).sum(1), shares.amax(1), unused, evenly])
        entropies, largest, dead, even = measured.tolist()
        return {
            "expert_entropy": min(each / math.log(max(2, size)) for each, size in zip(entropies, sizes, strict=True)),
            "expert_max_share": max(largest),
            "expert_use": [
                [layer, size, round(share, 4), int(number) - counts.shape[1] + size if tokens >= ENOUGH else None]
                for layer, size, share, number, tokens in zip(layers, sizes, largest, dead, even, strict=True)
            ],
        }


def _layer(name: str) -> int:
    """The number of the layer that a module belongs to.

    >>> _layer("model.layers.3.mlp.experts")
    3
    """
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else 0
